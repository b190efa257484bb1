"""The base of actions models, and of trained ones: item and action networks, MMoE.

    model = AttnMVP(AttnMVPConfig(), catalogue)
    model(batch)["loss"]
    model.score(batch)      # batch: an ActionsBatch (models/actions/requests.py)

A model defines `encode`, which combines items and actions (`fusions.py`). All other
parts are shared, so that models differ in this fusion alone.

Shapes: `B` users, `T` context events, `C` candidates, `L` = T + C, `D` width, `A` kinds
of action, `K` tasks, `F` features, `V` viewer-side categories, `I` items, `S` width of
the states that the head reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from core.options import STRICT, Dropout, Fraction
from models.actions import metrics
from models.actions.catalogue import ActionsCatalogue
from models.actions.requests import (
    ACTIONS,
    ActionsBatch,
    ActionsRequests,
    ActionsSelection,
)
from models.custom_features import CustomInputs, EmbeddingTables, Standardised
from models.layers.causal_attention import CausalBlock, Layout
from models.layers.mmoe import MMoE
from models.model import LabelOptions, Model, Ranked, label_loss, resolve_weights

CONTENT_FIELDS = ("numbers", "categories", "text")
"""Content of an item, by which an item without an id is described."""


class ActionsModel(Model):
    """A model that scores each task for a user's candidates by `score(batch)`."""

    kind = ACTIONS
    requests_class = ActionsRequests
    catalogue_class = ActionsCatalogue
    extra_inputs: ClassVar[Mapping[str, bool]] = {"text": False}
    example_unit = "user"
    eval_unit = "user"
    ranks: ClassVar[Ranked] = "candidates"
    metrics_module: ClassVar[ModuleType] = metrics

    def score(self, batch: ActionsBatch) -> Tensor:
        """Return (N, K) logits of the valid candidates of all users, row by row."""
        raise NotImplementedError

    def measure(
        self, batch: ActionsBatch, by_user: int = 0, **options: Any
    ) -> dict[str, Any]:
        """Return sums over a batch (`models/actions/metrics.py`)."""
        return metrics.measure(self, batch, by_user)


@dataclass(config=STRICT)
class ActionsConfig(LabelOptions):
    """Options that all trained actions models share."""

    max_history: PositiveInt = 1024
    """Number of latest events of a user that are read (Sec. 3 of AttnMVP)."""
    window_overlap: Fraction = 0.5
    """Share of `max_history` by which the training examples of a user with more events
    overlap. An event that is learned has at least this much history, except at the
    user's first events. 0 reads each event in one example."""
    width: PositiveInt = 128
    """Width D of item and action embeddings and of all states (the paper names
    none)."""
    num_layers: PositiveInt = 12
    """Transformer blocks (Sec. 2)."""
    num_heads: PositiveInt = 4
    """Attention heads (the paper names none)."""
    ffn: PositiveInt = 512
    """Inner width of a feed-forward block (the paper names none)."""
    experts: PositiveInt = 4
    """Experts of the MMoE head (the paper names none)."""
    expert_width: PositiveInt = 128
    """Width of an expert's output."""
    tower_width: PositiveInt = 64
    """Inner width of a task's tower."""
    dropout: Dropout = 0.1
    """Dropout rate in blocks and head."""
    item_ids: Literal["learned", "none"] = "learned"
    """Embedding of an item's id, which is added to the item's attributes. `learned` has
    an embedding per item, `none` has no id, for feeds of new items (the features of
    Sec. 2 of the paper have no id)."""
    id_dropout: Dropout = 0.0
    """Share of the events whose id is replaced by the unknown id, a vector of zeros, in
    training. Above 0, all id embeddings are initialised with zeros, so that an item
    without training events has the unknown id."""
    category_dropout: Dropout = 0.02
    """Share of the values of the log's custom categories replaced by the unknown value
    in training, so that the embedding of unknown values is trained."""

    def __post_init__(self) -> None:
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width {self.width} is not a multiple of twice num_heads "
                f"{self.num_heads}"
            )


def build_projection(inputs: int, width: int) -> nn.Sequential:
    """Build a two-layer projection of items or actions.

    The layer norm gives items and actions the same scale, so that action weight
    lambda = 1 mixes equal shares of both.

    Args:
        inputs: Width of the input.
        width: Width of hidden layer and output.
    """
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.LayerNorm(width),
    )


class ItemNetwork(EmbeddingTables):
    """Embed items from concatenated and projected features (Sec. 2 of AttnMVP).

    The features of an item are the embedding of its id, its categories, its numbers and
    the projection of its text. Viewer-side categories and the log's custom features of
    the event are added to the concatenation.

    An item that is not in the catalogue has the unknown id, as an id dropped by
    `id_dropout`. A category value that the catalogue does not have is unknown too.
    """

    numbers: Tensor
    """(I, X) numbers of the catalogue's items."""
    categories: Tensor
    """(I, G) category codes of the catalogue's items."""
    text: Tensor
    """(I, W) text vectors of the catalogue's items."""
    catalogue_buffers = ("numbers", "categories")

    def __init__(self, catalogue: ActionsCatalogue, config: ActionsConfig) -> None:
        super().__init__()
        num_items, width = catalogue.num_items, config.width
        self.id_dropout, self.has_ids = config.id_dropout, config.item_ids != "none"
        for name in CONTENT_FIELDS:
            table = getattr(catalogue, name)
            self.register_buffer(
                name,
                table.clone().view(num_items, table.numel() // num_items),
                persistent=name != "text",
            )
        num_categories = self.categories.shape[1]
        table_sizes = [num_items] if self.has_ids else []
        table_sizes += [int(column.max()) + 1 for column in self.categories.T]
        table_sizes += [len(values) + 1 for values in catalogue.viewers.values()]
        self.viewers = len(catalogue.viewers)
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(
                torch.randn(size, width) * width**-0.5, freeze=False
            )
            for size in table_sizes
        )
        category_values: list[list[str] | None] = [
            values.to_pylist() for values in catalogue.attributes.categories.values()
        ]
        self.row_names = [
            *[None] * self.has_ids,
            *(category_values or [None] * num_categories),
            *catalogue.viewers.values(),
        ]
        for category in range(num_categories):
            table = cast(nn.Embedding, self.tables[self.has_ids + category])
            nn.init.zeros_(table.weight[0])
        if self.has_ids and self.id_dropout:
            self.new_items_are_zeros = True
            nn.init.zeros_(cast(nn.Embedding, self.tables[0]).weight)
        # entries of normalised vectors are small compared with standardised features
        self.gain = 1 / catalogue.text_size if catalogue.text_size > 0 else 1.0
        self.of_text = None
        if self.text.numel():
            self.of_text = nn.Linear(self.text.shape[1], width)
        self.own = None  # the name in checkpoints
        if catalogue.custom_features.names:
            self.own = CustomInputs(
                catalogue.custom_features, width, config.category_dropout
            )
        input_width = len(table_sizes) * width + self.numbers.shape[1]
        input_width += len(self.own.columns) if self.own else 0
        input_width += width if self.of_text else 0
        self.project = build_projection(input_width, width)

    def forward(
        self,
        item: Tensor,
        viewer: Tensor | None = None,
        custom: Tensor | None = None,
        new: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the embeddings (..., D) of items in the context of their events.

        Args:
            item: (...) int64 items; from I on they number the rows of `new`.
            viewer: (..., V) int64 viewer-side categories; None if all are unknown.
            custom: (..., X + G) the log's custom features, for a log that has some.
            new: (n, ...) content of new items, by the names of `CONTENT_FIELDS`.
        """
        num_items = len(self.numbers)
        if viewer is None:
            viewer = item.new_zeros(*item.shape, self.viewers)
        keys = []
        if self.has_ids:
            keys.append(item if new is None else item.clamp(max=num_items - 1))
        keys += [
            *self.gather_content("categories", item, new).unbind(-1),
            *viewer.unbind(-1),
        ]
        parts = [table(key) for table, key in zip(self.tables, keys, strict=True)]
        if self.has_ids and new is not None:
            parts[0] = parts[0] * (item < num_items).unsqueeze(-1)
        if self.has_ids and self.id_dropout and self.training:
            is_id_read = torch.rand(item.shape, device=item.device) >= self.id_dropout
            parts[0] = parts[0] * is_id_read.unsqueeze(-1)
        parts.append(self.gather_content("numbers", item, new))
        if self.of_text is not None:
            parts.append(
                self.of_text(self.gain * self.gather_content("text", item, new))
            )
        if self.own is not None:
            assert custom is not None, "the batch has no custom features"
            parts.append(self.own(custom))
        return self.project(torch.cat(parts, -1))

    def gather_content(
        self, name: str, item: Tensor, new: dict[str, Tensor] | None
    ) -> Tensor:
        """Return one kind of content (..., width) of items.

        Args:
            name: One of `CONTENT_FIELDS`.
            item: (...) items; from I on they number the rows of `new`.
            new: (n, width) content of new items by name, or None.
        """
        table = getattr(self, name)
        if new is None:
            return table[item]
        values = table[item.clamp(max=len(table) - 1)]
        new_row = item - len(table)
        is_new = new_row >= 0
        values[is_new] = new[name][new_row[is_new]]
        return values


class FusionModel(ActionsModel):
    """A trained actions model; subclasses define `encode`, the fusion of actions."""

    config: ActionsConfig
    history_targets = True
    """Whether context events are learned too; false if a context token holds its own
    label."""
    states_width = 1
    """Width S of the states, in multiples of D."""
    tokens = 1
    """Number of context positions per event."""
    is_strict = False
    """Whether positions of the Transformer do not attend to themselves."""

    def __init__(self, config: ActionsConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.labels, self.train_rates = catalogue.labels, catalogue.train_rates
        self.weights = resolve_weights(self.labels, config.label_weights)
        self.items = ItemNetwork(catalogue, config)
        self.actions = build_projection(len(catalogue.actions), config.width)
        self.features = Standardised(
            catalogue.feature_mean, catalogue.feature_std, catalogue.features
        )
        self.head = MMoE(
            self.states_width * config.width + len(catalogue.features),
            len(catalogue.labels),
            experts=config.experts,
            expert_width=config.expert_width,
            tower_width=config.tower_width,
            dropout=config.dropout,
        )
        if self.train_rates:
            # predict each task's rate at first, which has a normalised entropy of 1
            logits = torch.tensor(self.train_rates).logit(eps=1e-4)
            with torch.no_grad():
                self.head.bias.copy_(logits)
        self.build_fusion(config)

    def build_fusion(self, config: Any) -> None:
        """Add the parameters that `encode` reads."""
        self.transformer = self.build_blocks(strict=self.is_strict)
        self.norm = nn.LayerNorm(config.width)

    def transform(self, x: Tensor, layout: Layout, *added_values: Tensor) -> Tensor:
        """Run the blocks over `x` (B, L, D); see `CausalBlock` for `added_values`."""
        for block in self.transformer:
            x = block(x, layout, *added_values)
        return x

    def selection(self, catalogue: Any, split: str, **fields: Any) -> ActionsSelection:
        """Return the examples to load, with the overlap of training examples."""
        overlap = self.config.window_overlap
        return super().selection(catalogue, split, window_overlap=overlap, **fields)

    def build_blocks(self, *, strict: bool) -> nn.ModuleList:
        """Build `num_layers` Transformer blocks.

        Args:
            strict: Whether positions do not attend to themselves.
        """
        config = self.config
        return nn.ModuleList(
            CausalBlock(
                config.width,
                config.num_heads,
                config.ffn,
                config.dropout,
                strict=strict,
            )
            for _ in range(config.num_layers)
        )

    def layout(self, batch: ActionsBatch) -> Layout:
        """Return the layout of the batch's positions, for causal attention."""
        return Layout.build(
            batch.count_earlier(),
            batch.item.shape[1],
            self.config.width // self.config.num_heads,
            tied=batch.has_ties,
            tokens=self.tokens,
        )

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        """Encode context events and candidates.

        Args:
            items: (B, L, D) embeddings of the items of context, then candidates.
            actions: (B, T, D) embeddings of the actions of the context.
            layout: Positions of the batch.

        Returns:
            (B, L, S) states. A state depends only on the actions of strictly earlier
            events, except in models without `history_targets`.
        """
        raise NotImplementedError

    def logits(self, batch: ActionsBatch, *, history: bool) -> Tensor:
        """Return logits.

        Args:
            batch: Batch of users.
            history: Whether to return the logits of context events too.

        Returns:
            (B, L, K) of context, then candidates, or (B, C, K) of candidates alone.
        """
        new = None
        if batch.new_numbers is not None:
            new = {name: getattr(batch, f"new_{name}") for name in CONTENT_FIELDS}
        items = self.items(
            batch.join("item"),
            None if batch.viewer is None else batch.join("viewer"),
            None if batch.custom is None else batch.join("custom"),
            new,
        )
        states = self.encode(items, self.actions(batch.action), self.layout(batch))
        feature = batch.join("feature")
        if not history:
            states = states[:, batch.item.shape[1] :]
            feature = batch.candidate_feature
        return self.head(torch.cat([states, self.features(feature)], 2))

    def score(self, batch: ActionsBatch) -> Tensor:
        """Return (N, K) logits of the valid candidates of all users, row by row."""
        logits = self.logits(batch, history=False)
        return logits[batch.candidate_valid]

    def forward(self, batch: ActionsBatch) -> dict[str, Tensor]:
        """Return the loss of a batch.

        Returns:
            `loss`: weighted sum over tasks of the mean binary cross-entropy over the
            learned events. `padding`: share of the batch's positions without an event.
        """
        history = self.history_targets
        logits = self.logits(batch, history=history).flatten(0, 1)
        if history:
            label = batch.join("label")
            is_event_learned = torch.cat([batch.learn, batch.candidate_valid], 1)
        else:
            label = batch.candidate_label
            is_event_learned = batch.candidate_valid
        label = label.flatten(0, 1)
        # a mask and no selection, since the size of a selection would synchronise a GPU
        is_learned = is_event_learned.flatten()
        loss = label_loss(logits, label, self.weights, is_learned)
        is_event = torch.cat([batch.valid, batch.candidate_valid], 1)
        return {"loss": loss, "padding": 1 - is_event.float().mean()}
