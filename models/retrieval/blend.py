"""Blend: the weighted sum of the scores of two trained models.

    score_i = s1_i + weight * s2_i

s1 and s2 are the scores of the models' rankings. Log-probabilities and logits differ by
a number per request, which changes no ranking. The scores of a model without training
count from 0: below are items that it ranks by popularity alone. An item that is not
among the `depth` first of a model gets the lowest score that the model ranked for the
request. The weight is chosen on validation. With `allowed` and `unseen`, the rankings
are those of the items that may be recommended.

Shapes: `B` requests, `N` items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from core.errors import UserError
from core.options import STRICT, CheckpointPath, NamedConfig
from models import registry
from models.loaded_model import build_model
from models.retrieval import metrics
from models.retrieval.baselines.choice import Values, choose
from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch
from models.retrieval.model import RetrievalModel
from models.retrieval.search import top_k
from models.training import checkpoint


@dataclass(config=STRICT)
class BlendConfig(NamedConfig):
    """Blend: two trained models whose scores are added."""

    first: CheckpointPath = ""
    """Checkpoint of a trained model, or folder of its finished run; used in training
    only."""
    second: CheckpointPath = ""
    """Checkpoint of the other model."""
    weight: Values[NonNegativeFloat] = (0.0, *(2.0**n for n in range(-6, 9)))
    """Weight of the second model's scores; of several values, validation chooses."""
    depth: PositiveInt = 100
    """Number of items that each model ranks."""
    models: tuple[dict[str, Any], ...] = ()
    """Names and configs of the models, filled in from their checkpoints."""
    hashes: tuple[str, ...] = ()
    """SHA-256 of the models' weights files, filled in from their checkpoints."""

    @property
    def max_history(self) -> int:
        """Number of latest behaviours that the models read."""
        configs = map(registry.build_model_config, self.models)
        return max(config.max_history for config in configs)


class Blend(RetrievalModel):
    """Two frozen models, whose weights are part of the blend's checkpoint."""

    name = "blend"
    config_class = BlendConfig
    example_unit = "behaviour"
    trains_by_gradient = False
    stops_early = True
    extra_inputs: ClassVar[Mapping[str, bool]] = {"sids": False}

    models: Any
    """The two models, an `nn.ModuleList`."""
    weight: Tensor
    """() the chosen `weight`."""

    def __init__(self, config: BlendConfig, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        self.num_items = catalogue.num_items
        models = [build_model(model, catalogue) for model in config.models]
        self.models = nn.ModuleList(models)
        self.register_buffer("weight", torch.zeros(()))

    @classmethod
    def resolve_config(cls, config: BlendConfig, catalogue: Catalogue) -> BlendConfig:
        """Return the config with the models' configs and hashes.

        Raises:
            UserError: If the models were not trained on these tables.
        """
        if not (config.first and config.second):
            raise UserError("a blend has two checkpoints, first and second", "second")
        uris = [checkpoint.locate(uri) for uri in (config.first, config.second)]
        first, second = (checkpoint.read(uri) for uri in uris)
        for table in sorted(first.hashes.keys() & second.hashes.keys()):
            hashes = first.hashes[table][:12], second.hashes[table][:12]
            if hashes[0] != hashes[1]:
                raise UserError(
                    f"{' and '.join(uris)} were trained on different tables '{table}': "
                    f"{' and '.join(hashes)}",
                    "second",
                )
        for uri, metadata in zip(uris, (first, second), strict=True):
            checkpoint.check(metadata, uri, catalogue.versions)
        return replace(
            config,
            first=uris[0],
            second=uris[1],
            models=(dict(first.model), dict(second.model)),
            hashes=tuple(checkpoint.weights_hash(uri) for uri in uris),
        )

    def prepare_training(self, catalogue: Catalogue) -> list[str]:
        """Load the weights of both models."""
        uris = (self.config.first, self.config.second)
        for model, uri in zip(self.models, uris, strict=True):
            checkpoint.load_weights(model, uri)
        return []

    def fit_in_one_pass(
        self, batches: Iterable[Any], val_batches: Iterable[RequestBatch]
    ) -> None:
        """Choose the weight on validation."""
        self.eval()
        longest = max(metrics.CUTOFFS)
        rank = cache(partial(self.rank, k=longest))

        def measure(batch: RequestBatch) -> dict[str, Any]:
            items, _ = self.fuse(rank(batch), longest)
            return metrics.measure_ranking(items, batch)

        choose(self, (), "weight", lambda: None, val_batches, measure)

    def encode_allowed(self, items: Tensor) -> Tensor:
        """Return the set of `items` (N,) unchanged, as each model encodes it."""
        return items

    @torch.no_grad()
    def recommend(
        self, batch: HistoryBatch, k: int, allowed: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Rank the items of both models by the weighted sum of their scores."""
        return self.fuse(self.rank(batch, k, allowed, **options), k)

    @torch.no_grad()
    def rank(
        self, batch: HistoryBatch, k: int, allowed: Tensor | None = None, **options: Any
    ) -> list[tuple[Tensor, Tensor]]:
        """Return each model's first items and scores, -1 and -inf at padding."""
        depth = max(k, self.config.depth)
        rankings = []
        for model in self.models:
            encoded = None if allowed is None else model.encode_allowed(allowed)
            items, scores = model.recommend(batch, depth, allowed=encoded, **options)
            if model.is_baseline:
                scores = torch.where(items < 0, scores, scores.clamp(min=0))
            rankings.append((items, scores))
        return rankings

    def fuse(
        self, rankings: list[tuple[Tensor, Tensor]], k: int
    ) -> tuple[Tensor, Tensor]:
        """Return items and scores, (B, k) both, from the rankings of both models."""
        rows = len(rankings[0][0])
        # missing items go to an extra column
        total = self.weight.new_zeros((rows, self.num_items + 1))
        is_ranked = torch.zeros_like(total, dtype=torch.bool)
        weights = (torch.ones_like(self.weight), self.weight)
        for (items, scores), weight in zip(rankings, weights, strict=True):
            # (B, 1) score of all items outside the ranking; 0 for an empty ranking
            lowest = scores.masked_fill(items < 0, torch.inf).amin(1, keepdim=True)
            lowest = lowest.masked_fill(lowest == torch.inf, 0.0)
            column = torch.where(items < 0, self.num_items, items)
            above = (scores - lowest).masked_fill(items < 0, 0.0)
            total += weight * lowest
            total.scatter_add_(1, column, weight * above)
            is_ranked.scatter_(1, column, True)
        total.masked_fill_(~is_ranked, -torch.inf)
        items, scores = top_k(total[:, :-1], k)
        return items.masked_fill(scores.isneginf(), -1), scores
