"""The base class of all models.

    class Popularity(RetrievalModel):
        name = "popularity"
        config_class = PopularityConfig
        example_unit = "behaviour"
        trains_by_gradient = False

A model declares its properties as class attributes and overrides the methods in which
it differs. `RetrievalModel`, `SearchModel` and `ActionsModel` are the base classes of
the three kinds; `models/registry.py` lists all models by name. Commands use the
attributes of a model's class, never its name.

The loss of labels and the check of scores, which models of several kinds use, are here
too. Shapes: `N` candidates, `K` labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional

from core.errors import UserError
from core.options import STRICT, NamedConfig, check_known
from models.cpu.weights import use_exact_onednn
from models.dataset.dataset import Kind
from models.requests import Requests
from models.training.distributed import global_mean

Ranked = Literal["catalogue", "candidates", "nothing"]
"""Kinds of items that a model can rank."""


@dataclass(config=STRICT)
class NoOptions:
    """Options of a model whose `recommend` takes none."""


class Model(nn.Module):
    """A model that the commands train, evaluate, compare and serve.

    The constructor takes the resolved config and the catalogue. A model that is trained
    by gradient has a method `forward(batch)`, which returns a mapping with the () mean
    `loss` of the batch; other models have `fit_in_one_pass(batches)`. A model that
    ranks a catalogue has `recommend(batch, k, **options)`, and a model that ranks
    candidates has `score(batch)`.
    """

    name: ClassVar[str]
    """Name of the model in the registry."""
    kind: ClassVar[Kind]
    """Kind of requests that the model reads."""
    config_class: ClassVar[type]
    """Subclass of `NamedConfig` with the model's options, also `max_history`."""

    requests_class: ClassVar[type[Requests]]
    """Parser of the requests to a served model."""
    catalogue_class: ClassVar[Any]
    """Catalogue on which models are built. `load(inputs, scales, manifest_only)` loads
    it from its `tables`; `scales` of a checkpoint replace those of the tables; with
    `manifest_only`, as in a served model, `sequences` has only a manifest."""
    extra_inputs: ClassVar[Mapping[str, bool]] = {}
    """Folders of `Inputs` that the model reads in addition to the tables, and whether
    each is required."""
    example_unit: ClassVar[str]
    """Unit of a training example, such as `request` or `user`; datasets document the
    units."""
    eval_unit: ClassVar[str] = "request"
    """Unit of an evaluation example."""

    trains_by_gradient: ClassVar[bool] = True
    """Whether the model is trained by gradient descent; if not, `fit_in_one_pass` is
    called once."""
    stops_early: ClassVar[bool] = False
    """Whether `fit_in_one_pass(train, val)` takes validation batches, for early
    stopping or to choose options."""
    is_baseline: ClassVar[bool] = False
    """Whether the model is a simple baseline that trained models should outperform."""
    not_served: ClassVar[str] = ""
    """Why the model cannot be served; empty if it can."""
    is_diagnostic: ClassVar[bool] = False
    """Whether the model reads values that are known only after results were shown. It
    is never the best model of a comparison."""
    metrics_module: ClassVar[ModuleType]
    """Module of the kind's metrics, with functions `means`, `names`, `shown` and
    `summary`."""

    ranks: ClassVar[Ranked]
    """Items that the model ranks: a whole catalogue, or the candidates of a request."""
    options_class: ClassVar[type] = NoOptions
    """Dataclass of the options of `recommend`; an option that is not set is None."""
    requirements: ClassVar[tuple[str, ...]] = ()
    """Python packages that only this model needs for serving."""

    config: Any
    """Options of the model."""
    labels: Sequence[str] = ()
    """(K,) names of the labels that the model scores; empty for a model that ranks a
    catalogue."""
    train_rates: Sequence[float] = ()
    """(K,) fractions of positives in the training data, if known."""
    ranks_by: str = ""
    """Column, and direction if it was chosen in training, which name a baseline in
    comparisons."""
    choice: str = ""
    """Options that `fit_in_one_pass` chose on validation, as words."""

    def __init__(self, config: Any, catalogue: Any) -> None:
        super().__init__()
        use_exact_onednn()
        self.config = config

    @classmethod
    def inputs_of(cls, config: Any) -> Mapping[str, bool]:
        """Return the `extra_inputs` that a model with these options reads."""
        return cls.extra_inputs

    @classmethod
    def resolve_config(cls, config: Any, catalogue: Any) -> Any:
        """Return the config with values from the checkpoints that it names.

        For example, a student takes sizes from its teacher. The method is called before
        training, and is idempotent.
        """
        return config

    @classmethod
    def check_served(cls) -> None:
        """Raise UserError if the model cannot be served."""
        if cls.not_served:
            raise UserError(f"the model '{cls.name}' is not served: {cls.not_served}")

    @classmethod
    def describe_requests(cls, info: Any) -> dict[str, Any]:
        """Return the names of features, actions and labels that requests refer to.

        Args:
            info: Info of `sequences`, a subclass of `SequencesInfo`.
        """
        return cls.requests_class.list_names(info)

    def selection(self, catalogue: Any, split: str, **fields: Any) -> Any:
        """Return the examples of a split that the model reads.

        Args:
            catalogue: Catalogue of the tables.
            split: Name of the split.
            fields: Fields of the kind's `Selection`; by default the model's unit and
                the `max_history` of the config.
        """
        unit = self.example_unit if split == "train" else self.eval_unit
        defaults = {"unit": unit, "max_history": self.config.max_history}
        return self.kind.selection_class(split, **(defaults | fields))

    def prepare_training(self, catalogue: Any) -> list[str]:
        """Load training inputs other than the tables, like the outputs of a teacher.

        Called on every worker.

        Args:
            catalogue: Catalogue of the tables.

        Returns:
            Messages to print before training.
        """
        return []

    def lr_multipliers(self) -> dict[str, float]:
        """Return factors on the learning rate, by prefix of parameter names."""
        return {}

    def measure(self, batch: Any, **options: Any) -> dict[str, Any]:
        """Return sums over a batch from which `metric_means` computes metrics.

        Args:
            batch: Batch of the model's dataset.
            options: Options of `recommend`; and `by_user`, the stride of the users for
                whom per-user metrics are returned, 0 for none.
        """
        raise NotImplementedError

    @classmethod
    def metric_means(cls, sums: dict[str, Any]) -> dict[str, float]:
        """Compute metrics from sums that were added over batches and workers."""
        return dict(cls.metrics_module.means(sums))

    @classmethod
    def metric_names(cls, catalogue: Any) -> list[str]:
        """Return the names of a model's metrics for a catalogue."""
        return list(cls.metrics_module.names(catalogue))

    @classmethod
    def shown_metrics(cls) -> tuple[str, ...]:
        """Return the metrics of the best epoch that are printed after a training."""
        return cls.metrics_module.shown()  # type: ignore[no-any-return]

    @classmethod
    def format_metrics(cls, metrics: dict[str, float]) -> list[str]:
        """Format the metrics of an evaluation as lines of text."""
        return list(cls.metrics_module.summary(metrics))


@dataclass(config=STRICT)
class LabelOptions(NamedConfig):
    """Options of a model with several labels."""

    label_weights: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """Weight of each label in the loss; 1 for labels that are not listed."""


def resolve_weights(labels: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """Return the weight of each label."""
    check_known(weights, labels, "model.label_weights")
    return [weights.get(name, 1.0) for name in labels]


def label_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Sequence[float],
    selected: Tensor | None = None,
) -> Tensor:
    """Return the () weighted sum over labels of the mean binary cross-entropy.

    Args:
        logits: (N, K) logits.
        labels: (N, K) labels.
        weights: (K,) weights of the labels.
        selected: (N,) mask of the candidates to learn; None for all.
    """
    terms = functional.binary_cross_entropy_with_logits(
        logits.float(), labels.float(), reduction="none"
    )  # (N, K)
    if selected is None:
        sums = terms.sum(0)
        total = torch.stack([w * s for w, s in zip(weights, sums, strict=True)]).sum()
        return global_mean(total / max(1, len(terms)), len(terms))
    count = selected.sum()
    sums = (terms * selected[:, None]).sum(0)
    means = global_mean(sums / count.clamp(min=1), count)
    return torch.stack([w * m for w, m in zip(weights, means, strict=True)]).sum()


def check_finite(scores: Tensor, tail: bool = False) -> Tensor:
    """Return the scores unchanged if all are finite.

    The check waits for the GPU.

    Args:
        scores: Scores of any shape.
        tail: Whether -inf is allowed, as the padding of short rankings.
    """
    valid = scores.isfinite()
    if tail:
        valid = valid | scores.isneginf()
    num_invalid = int((~valid).sum())
    if num_invalid:
        raise UserError(
            f"the model gives {num_invalid} of {scores.numel()} scores that are not "
            f"finite"
        )
    return scores
