"""The base of search models, and of trained rankers: DNN, group attention, towers.

A ranker scores each candidate independently of all other candidates, by a tower per
label, and learns by binary cross-entropy.

Shapes: `R` requests, `N` candidates, `O` columns of features, `K` labels, `G` groups,
`E` width of the reduced text, `e` width of a group's token.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional

from core.options import STRICT, Dropout, Fraction
from core.schemas import SearchInfo
from models.custom_features import CustomInputs, Standardised
from models.model import LabelOptions, Model, Ranked, label_loss, resolve_weights
from models.search import metrics
from models.search.catalogue import NO_QUERY, SearchCatalogue
from models.search.encoders import HSTULayer
from models.search.requests import (
    SEARCH,
    SearchBatch,
    SearchRequests,
    SearchSelection,
)

CATEGORY_WIDTH = 16
"""Width of the embedding of each category feature of the log."""

GROUP_WIDTH, GROUP_HEADS, GROUP_OUTPUT = 16, 8, 128
"""Width of a group's token (d_e), heads and output width (d_o) of the group attention
(Sec. 3.7 of QGS)."""


class SearchModel(Model):
    """A model that scores the candidates of requests by `score(batch)`."""

    kind = SEARCH
    requests_class = SearchRequests
    catalogue_class = SearchCatalogue
    extra_inputs: ClassVar[Mapping[str, bool]] = {"text": False}
    ranks: ClassVar[Ranked] = "candidates"
    metrics_module: ClassVar[ModuleType] = metrics
    reads_first_label: ClassVar[bool] = False
    """Whether the model uses only the first label of the log."""

    reads_times: bool = False
    """Whether the model reads the times of behaviours."""
    reads_history_queries: bool = False
    """Whether the model reads the text of behaviours' queries or pairs."""

    def selection(self, catalogue: Any, split: str, **fields: Any) -> SearchSelection:
        """Return the examples to load, with the text that the model reads."""
        text = {
            "text": catalogue.text,
            "reads_history_queries": self.reads_history_queries,
        }
        return super().selection(catalogue, split, **(text | fields))

    @classmethod
    def describe_requests(cls, info: SearchInfo) -> dict[str, Any]:
        """Return the names that requests refer to, with the labels of this model."""
        description = super().describe_requests(info)
        if cls.reads_first_label:
            description["labels"] = description["labels"][:1]
        return description

    def score(self, batch: SearchBatch) -> Tensor:
        """Return (N, K) logits of the candidates."""
        raise NotImplementedError

    def measure(
        self, batch: SearchBatch, by_user: int = 0, **options: Any
    ) -> dict[str, Any]:
        """Return sums over a batch (`models/search/metrics.py`)."""
        return metrics.measure(self, batch, by_user)


@dataclass(config=STRICT)
class RankerConfig(LabelOptions):
    """Options that all trained search models share."""

    max_history: PositiveInt = 100
    """Number of latest behaviours read (Sec. 4.1 of QGS for comparisons; 1,000 in Sec.
    3.7)."""
    window_overlap: Fraction = 0.75
    """Minimum share of `max_history` that training reads before a search of a user with
    a longer history. 1 reads `max_history` behaviours, as evaluation does, with one
    encoder pass for each search."""
    batch_unit: Literal["requests", "users"] = "requests"
    """Unit of `fit.batch_size`: searches, or users' examples of up to 64 searches."""
    text_width: PositiveInt = 64
    """Width to which text embeddings are reduced (d_b, Sec. 3.7 of QGS)."""
    dnn_width: PositiveInt = 256
    """Width of the two layers of the shared DNN over all raw features (Sec. 3.6 names
    no size)."""
    tower_width: PositiveInt = 128
    """Inner width of a label's tower (Sec. 3.6 names no size)."""
    dropout: Dropout = 0.1
    """Dropout rate in the DNN, the towers and the encoder."""
    category_dropout: Dropout = 0.02
    """Share of category values replaced by the unknown value in training, so that the
    embedding of unknown values is trained."""
    group_attention: bool = False
    """HFG-Attention over groups of features (Sec. 3.6 of QGS)."""


class TextProjection(nn.Module):
    """Trained projections of frozen text vectors, or of ids without texts.

    One projection reduces documents and pairs, another one queries. The vectors of
    documents are a buffer of the module. The vectors of queries and pairs are part of a
    batch, together with the row of each use; row -1 means padding or no text.

    Without text, documents and pairs have a trained vector of the document's id, and
    queries have vectors of width 0.
    """

    items: Tensor
    """(I, W) vectors of the documents."""

    def __init__(self, catalogue: SearchCatalogue, width: int) -> None:
        super().__init__()
        vectors = catalogue.text.items
        self.register_buffer("items", vectors, persistent=False)
        self.has_text = vectors.shape[1] > 0
        self.document: nn.Module
        if not self.has_text:
            self.document = nn.Embedding(catalogue.num_items, width)
            nn.init.normal_(self.document.weight, std=0.02)
            return
        # entries of normalised vectors are small compared with standardised features
        self.gain = 1 / catalogue.text_size if catalogue.text_size > 0 else 1.0
        self.document = nn.Linear(vectors.shape[1], width)
        self.of_query = nn.Linear(vectors.shape[1], width)

    def project_query(self, vectors: Tensor, row: Tensor) -> Tensor:
        """Return the reduced vectors (..., E) of queries, 0 at row -1.

        Without text they have width 0.

        Args:
            vectors: (n, W) vectors of queries.
            row: (...) row of each query in `vectors`.
        """
        if not self.has_text:
            return self.items.new_zeros(*row.shape, 0)
        if not len(vectors):
            # part of the graph, since DDP needs gradients of all weights
            zeros = self.items.new_zeros(*row.shape, self.items.shape[1])
            return self.of_query(zeros) * 0
        reduced = self.of_query(self.gain * vectors[row.clamp(min=0)])
        return reduced * (row >= 0)[..., None]

    def project_item(self, item: Tensor) -> Tensor:
        """Return the reduced vectors (..., E) of documents alone.

        Args:
            item: (...) items; padding gets the vector of item 0.
        """
        item = item.clamp(min=0)
        if not self.has_text:
            return self.document(item)
        return self.document(self.gain * self.items[item])

    def project_pair(self, item: Tensor, pairs: Tensor, row: Tensor) -> Tensor:
        """Return the reduced vectors (..., E) of pairs ([CLS] in Eq. 1 of QGS).

        Args:
            item: (...) items.
            pairs: (P, W) vectors of pairs.
            row: (...) row of each pair in `pairs`, -1 for the document alone.
        """
        if not self.has_text:
            return self.project_item(item)
        vectors = self.items[item.clamp(min=0)]
        if len(pairs):
            is_pair = (row >= 0)[..., None]
            vectors = torch.where(is_pair, pairs[row.clamp(min=0)], vectors)
        return self.document(self.gain * vectors)


class FeatureScaler(Standardised):
    """Scale features: standardise built-in features, embed the log's custom features.

    Args:
        catalogue: Catalogue with the features and their scales.
        width: Width of the embedding of each category.
        dropout: Share of category values replaced by the unknown value in training.
    """

    def __init__(self, catalogue: SearchCatalogue, width: int, dropout: float) -> None:
        super().__init__(
            catalogue.feature_mean, catalogue.feature_std, catalogue.features
        )
        self.own = None  # the name in checkpoints
        if catalogue.custom_features.names:
            self.own = CustomInputs(catalogue.custom_features, width, dropout)
        custom_columns = self.own.columns if self.own else []
        self.columns = [*catalogue.features[: len(self.mean)], *custom_columns]
        """(O,) name of the feature of each output column."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the columns (..., O) of `features` (..., F)."""
        if self.own is None:
            return super().forward(features)
        built_in = features[..., : len(self.mean)]
        custom_features = features[..., len(self.mean) :]
        return torch.cat([super().forward(built_in), self.own(custom_features)], -1)


class HFGAttention(nn.Module):
    """HFG-Attention over groups of features (Eq. 11-13 of QGS).

    The tokens are the groups of features and, as one more token, the output of the DNN.

    Args:
        sizes: (G,) number of features of each group.
        context: Width of the DNN's output.
    """

    def __init__(self, sizes: list[int], context: int) -> None:
        super().__init__()
        # W_g and b_g of Eq. 11
        self.groups = nn.ModuleList(nn.Linear(size, GROUP_WIDTH) for size in sizes)
        self.context = nn.Linear(context, GROUP_WIDTH)
        self.attention = HSTULayer(
            GROUP_WIDTH, GROUP_HEADS, len(sizes) + 1, causal=False, ffn=4 * GROUP_WIDTH
        )
        self.out = nn.Linear(GROUP_WIDTH, GROUP_OUTPUT)

    def forward(
        self, groups: list[Tensor], group_mask: Tensor, context: Tensor
    ) -> Tensor:
        """Attend over groups of features.

        Args:
            groups: Features of each group, (N, size of the group).
            group_mask: (N, G) bool, true for groups to read.
            context: (N, context) output of the DNN, through which no gradient flows.

        Returns:
            (N, GROUP_OUTPUT) mean over the tokens, projected.
        """
        # Eq. 11
        tokens = [
            functional.relu(layer(group))
            for layer, group in zip(self.groups, groups, strict=True)
        ]
        tokens.append(self.context(context.detach()))
        r = torch.stack(tokens, 1)  # (N, G + 1, e): Eq. 12
        mask = functional.pad(group_mask, (0, 1), value=True)
        mixed = self.attention(r, mask) * mask[..., None]
        return self.out(mixed.sum(1) / mask.sum(1, keepdim=True))  # Eq. 13


class Ranker(SearchModel):
    """A trained model that scores the candidates of search requests.

    Args:
        config: Options of the model.
        catalogue: Catalogue of the tables.
        sequence_width: Width of the subclass's user state, 0 for none.
        match: Whether the subclass also passes the similarity of user state and
            candidate to `rank`.
    """

    example_unit = "user"
    config: RankerConfig
    by_group: Tensor
    """Indices of the feature columns of all groups, group after group."""
    is_known: Tensor
    """(O,) bool: feature columns that are known before a result is shown."""

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
        self.text = TextProjection(catalogue, config.text_width)
        self.scale = FeatureScaler(catalogue, CATEGORY_WIDTH, config.category_dropout)
        unknown = catalogue.unknown_when_ranking
        is_known = torch.tensor([name not in unknown for name in self.scale.columns])
        self.register_buffer("is_known", is_known.bool(), persistent=False)
        text_sizes = [config.text_width] * (2 if self.text.has_text else 1)
        raw = len(self.scale.columns) + sum(text_sizes)
        self.dnn = nn.Sequential(
            nn.Linear(raw, config.dnn_width),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.dnn_width, config.dnn_width),
            nn.ReLU(),
        )
        groups = [
            [i for i, name in enumerate(self.scale.columns) if name in members]
            for members in catalogue.groups.values()
        ]
        self.group_sizes = [len(group) for group in groups]
        by_group = torch.tensor(list(itertools.chain(*groups)), dtype=torch.long)
        self.register_buffer("by_group", by_group, persistent=False)
        self.groups = None
        if config.group_attention:
            sizes = [*self.group_sizes, *text_sizes]
            self.groups = HFGAttention(sizes, config.dnn_width)
        fused_width = config.text_width + config.dnn_width + sequence_width
        fused_width += GROUP_OUTPUT if config.group_attention else 0
        self.norm = nn.LayerNorm(fused_width)
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(fused_width + match, config.tower_width),
                nn.ReLU(),
                nn.Dropout(config.dropout),
                nn.Linear(config.tower_width, 1),
            )
            for _ in self.labels
        )

    def selection(self, catalogue: Any, split: str, **fields: Any) -> SearchSelection:
        """Return the examples to load, with the windows and batches of training."""
        return super().selection(
            catalogue,
            split,
            window_overlap=self.config.window_overlap,
            batch_unit=self.config.batch_unit,
            **fields,
        )

    def prepare_training(self, catalogue: Any) -> list[str]:
        """Return a note on the vectors of items if the tables have no text."""
        if self.text.has_text:
            return []
        return ["without text: items have vectors of their ids, queries have none"]

    def rank(
        self,
        batch: SearchBatch,
        sequence: Tensor | None = None,
        match: Tensor | None = None,
    ) -> Tensor:
        """Return (N, K) logits of the candidates.

        Args:
            batch: Batch of requests.
            sequence: (N, sequence_width) user state of each candidate, or None.
            match: (N, 1) similarity of user state and candidate, or None.
        """
        request = batch.candidate_request
        features = self.scale(batch.features) * self.is_known
        query_row = batch.request_query_text[request]  # (N,)
        query_embedding = self.text.project_query(batch.query_text, query_row)  # (N, E)
        document = self.text.project_pair(
            batch.candidate, batch.pair_text, batch.candidate_pair_text
        )  # (N, E)
        shared = self.dnn(torch.cat([features, query_embedding, document], 1))
        parts = [document, shared]
        if self.groups is not None:
            groups = [
                *features.index_select(1, self.by_group).split(self.group_sizes, 1),
                document,
            ]
            if self.text.has_text:
                groups.insert(-1, query_embedding)
            group_mask = torch.ones(
                len(request), len(groups), dtype=torch.bool, device=request.device
            )
            if self.text.has_text:
                group_mask[:, -2] = batch.request_query[request] != NO_QUERY
            parts.insert(0, self.groups(groups, group_mask, shared))
        if sequence is not None:
            parts.append(sequence)
        fused = self.norm(torch.cat(parts, 1))
        if match is not None:
            # not normalised, which would shrink one number among hundreds
            fused = torch.cat([fused, match], 1)
        return torch.cat([tower(fused) for tower in self.towers], 1)

    def score(self, batch: SearchBatch) -> Tensor:
        """Return (N, K) logits of the candidates."""
        return self.rank(batch)

    def forward(self, batch: SearchBatch) -> dict[str, Tensor]:
        """Return the ranking `loss`: weighted binary cross-entropy of all labels."""
        return {"loss": self.ranking_loss(self.rank(batch), batch)}

    def ranking_loss(self, logits: Tensor, batch: SearchBatch) -> Tensor:
        """Return the () loss of the labels of all candidates, without padding."""
        selected = batch.candidate_valid if batch.is_padded else None
        return label_loss(logits, batch.labels, self.weights, selected)


class Base(Ranker):
    """Base (BERT and DNN), a baseline of the QGS paper that reads no history."""

    name = "base"
    config_class = RankerConfig
