"""What every search ranker shares: candidates' features and text, shared DNN, group attention, task towers, BCE.

Candidates are flat and scored one by one: none sees another, of its request or of any.

Shapes: `R` requests, `N` candidates, `O` columns of features, `K` labels, `G` groups,
`E` reduced text, `e` width of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import check_choices, check_dropout, check_positive, check_shares
from models.label_loss import (
    LabelOptions,
    label_loss,
    resolve_masks,
    resolve_weights,
    sample_learned,
)
from models.layers.hstu import HSTULayer
from models.search.catalogue import NO_QUERY, SearchCatalogue
from models.search.data import SearchBatch
from models.search.inputs import (
    FeatureScaler,
    TextProjection,
    feature_groups,
)
from models.search.model import SearchModel
from models.search.position import Mode, Position


@dataclass
class RankerConfig(LabelOptions):
    """Sizes that all search models share."""

    max_history: int = 100
    """Latest behaviours read (Sec. 4.1 of QGS for comparisons; 1,000 in Sec. 3.7)."""
    window_overlap: float = 0.75
    """Of users with longer histories, the share of `max_history` that training reads
    before a search at least; 1 reads all of it, as evaluation does, in one pass for
    each search."""
    batch_unit: Literal["requests", "users"] = "requests"
    """What `fit.batch_size` counts: searches, or rows of users with up to 64
    searches."""
    text_width: int = 64
    """Width that text embeddings are reduced to (d_b, Sec. 3.7 of QGS)."""
    dnn_width: int = 256
    """Width of the two layers of the shared DNN over all raw features (Sec. 3.6 names
    no size)."""
    tower_width: int = 128
    """Inner width of a task tower (Sec. 3.6 names no size)."""
    dropout: float = 0.1
    """Dropout in DNN, towers and encoder."""
    position: Mode = "hidden"
    """What training reads of where a result was shown: nothing, `dropout`: its
    features, but of a share of requests, or `bias`: a term of its own in the logits.
    Evaluation, selection and serving never read it."""
    position_dropout: float = 0.5
    """Share of requests whose positions are hidden in training, of `dropout`."""
    category_width: int = 16
    """Width of the embedding of each category of the log's own."""
    category_dropout: float = 0.02
    """Share of their values that count as unknown in training, so that values which
    training has not seen mean something."""
    group_attention: bool = False
    """HFG-Attention over groups of features (Sec. 3.6 of QGS)."""
    group_width: int = 16
    """Width of a group's token (d_e, Sec. 3.7)."""
    group_heads: int = 8
    """Heads of the group attention (Sec. 3.7)."""
    group_output: int = 128
    """Width of what the group attention gives (d_o, Sec. 3.7)."""

    @property
    def reads_times(self) -> bool:
        """Whether the model reads when each behaviour was."""
        return False

    @property
    def reads_history_queries(self) -> bool:
        """Whether the model reads the text of behaviours' queries, alone or together with documents."""
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares(self, ["window_overlap"])
        widths = "max_history text_width dnn_width tower_width category_width group_width group_heads group_output"
        check_positive(self, widths.split())
        check_dropout(self, "dropout", "position_dropout", "category_dropout")
        check_choices(self)
        if self.group_width % self.group_heads:
            raise ValueError(
                f"group_width {self.group_width} is not a multiple of group_heads {self.group_heads}; change either"
            )


class HFGAttention(nn.Module):
    """HFG-Attention (Eq. 11-13 of QGS): a token per group of features and one for the DNN's view of all."""

    def __init__(
        self, sizes: list[int], context: int, width: int, heads: int, output: int
    ) -> None:
        super().__init__()
        self.groups = nn.ModuleList(
            nn.Linear(size, width) for size in sizes
        )  # W_g, b_g
        self.context = nn.Linear(context, width)
        self.attention = HSTULayer(
            width, heads, len(sizes) + 1, causal=False, ffn=4 * width
        )
        self.out = nn.Linear(width, output)

    def forward(
        self, groups: list[Tensor], group_mask: Tensor, context: Tensor
    ) -> Tensor:
        """Attend over groups of features.

        Args:
            groups: Features of each group, (N, size of the group).
            group_mask: (N, G) groups to read.
            context: (N, context) output of the DNN, through which no gradient flows.

        Returns:
            (N, output).
        """
        tokens = [
            functional.relu(layer(group))
            for layer, group in zip(self.groups, groups, strict=True)
        ]  # Eq. 11
        r = torch.stack(
            [*tokens, self.context(context.detach())], 1
        )  # (N, G + 1, e): Eq. 12
        mask = functional.pad(group_mask, (0, 1), value=True)
        mixed = self.attention(r, mask) * mask[..., None]
        return self.out(mixed.sum(1) / mask.sum(1, keepdim=True))  # Eq. 13


class Ranker(SearchModel):
    """A model that scores candidates.

    `sequence_width` is the width of a subclass's user state (0 for none); `match` tells
    whether the subclass also gives the similarity of user state and candidate.
    """

    example_unit = "user"
    config: RankerConfig
    by_group: Tensor
    """(O,) places of the features' columns, group after group."""

    def __init__(
        self,
        config: RankerConfig,
        catalogue: SearchCatalogue,
        sequence_width: int = 0,
        match: bool = False,
    ) -> None:
        super().__init__(config, catalogue)
        self.labels = catalogue.labels
        self.weights = resolve_weights(self.labels, config.label_weights)
        self.masks = resolve_masks(self.labels, config.label_masks)
        self.correction = config.correction
        self.text = TextProjection(catalogue, config.text_width)
        self.scale = FeatureScaler(
            catalogue, config.category_width, config.category_dropout
        )
        self.shown_at = Position(
            config.position,
            config.position_dropout,
            tuple(self.scale.columns),
            catalogue.unknown_when_ranking,
            len(self.labels),
        )
        self.reads_position = self.shown_at.reads
        raw = len(self.scale.columns) + 2 * config.text_width
        self.dnn = nn.Sequential(
            nn.Linear(raw, config.dnn_width),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.dnn_width, config.dnn_width),
            nn.ReLU(),
        )
        places = list(feature_groups(self.scale.columns, catalogue.groups).values())
        self.group_sizes = [len(group) for group in places]
        self.register_buffer(
            "by_group",
            torch.tensor(
                [place for group in places for place in group], dtype=torch.long
            ),
            persistent=False,
        )
        self.groups = None
        if config.group_attention:
            self.groups = HFGAttention(
                [*self.group_sizes, *[config.text_width] * 2],
                config.dnn_width,
                config.group_width,
                config.group_heads,
                config.group_output,
            )
        fused = config.text_width + config.dnn_width + sequence_width
        fused += config.group_output if config.group_attention else 0
        self.norm = nn.LayerNorm(fused)
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(fused + match, config.tower_width),
                nn.ReLU(),
                nn.Dropout(config.dropout),
                nn.Linear(config.tower_width, 1),
            )
            for _ in self.labels
        )

    def rank(
        self,
        batch: SearchBatch,
        sequence: Tensor | None = None,
        shown: bool = False,
        match: Tensor | None = None,
    ) -> Tensor:
        """Return (N, K) logits of the candidates.

        Args:
            sequence: (N, width) user state of each candidate, or None.
            shown: Whether to read shown positions, if `position` allows it.
            match: (N, 1) similarity of user state and candidate.
        """
        request = batch.candidate_request
        scaled = self.scale(batch.features)
        features = self.shown_at.hide(scaled, request, len(batch.request_query), shown)
        query_row = batch.request_query_text[request]  # (N,)
        query_embedding = self.text.project_query(batch.query_text, query_row)  # (N, E)
        document = self.text.project_pair(
            batch.candidate, batch.pair_text, batch.candidate_pair_text
        )  # (N, E)
        shared = self.dnn(torch.cat([features, query_embedding, document], 1))
        parts = [document, shared]
        if self.groups is not None:
            groups = [
                *features[:, self.by_group].split(self.group_sizes, 1),
                query_embedding,
                document,
            ]
            group_mask = torch.ones(
                len(request), len(groups), dtype=torch.bool, device=request.device
            )
            group_mask[:, -2] = batch.request_query[request] != NO_QUERY
            parts.insert(0, self.groups(groups, group_mask, shared))
        fused = self.norm(
            torch.cat(parts if sequence is None else [*parts, sequence], 1)
        )
        if (
            match is not None
        ):  # beside the norm, which would shrink one number among hundreds
            fused = torch.cat([fused, match], 1)
        return torch.cat(
            [tower(fused) for tower in self.towers], 1
        ) + self.shown_at.term(scaled, shown)

    def score(self, batch: SearchBatch, shown: bool = False) -> Tensor:
        """(N, K) logits of every label for every candidate."""
        return self.rank(batch, shown=shown) + self.config.correction

    def forward(self, batch: SearchBatch) -> dict[str, Tensor]:
        """The ranking loss: per label the mean binary cross-entropy over candidates, summed over labels."""
        batch, kept = self.sample(batch)
        return {
            "loss": label_loss(
                self.rank(batch, shown=True), batch.labels, self.weights, kept
            )
        }

    def sample(self, batch: SearchBatch) -> tuple[SearchBatch, Tensor | None]:
        """Return the batch with the candidates to learn from, and the labels (N, K) to learn; None for all labels.

        Candidates without a label to learn are left out, but for padded batches, whose
        shapes stay.
        """
        used = sample_learned(batch.labels, self.masks, self.config.negative_rate)
        if batch.is_padded:
            valid = batch.candidate_valid[:, None].expand_as(batch.labels)
            return batch, valid if used is None else valid & used
        if used is None:
            return batch, None
        kept = used.any(1)
        return batch.select("N", kept), used[kept]


class Base(Ranker):
    """The model without a history (BERT and DNN), which QGS compares with."""

    name = "base"
    config_class = RankerConfig
