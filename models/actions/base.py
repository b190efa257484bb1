"""What all seven models of the family share: item and action networks, sizes, late fusion, MMoE head, the loss.

    model = AttnMVP(AttnMVPConfig(), catalogue)
    model(batch)["loss"]; model.score(batch)      # a batch as models/actions/batch.py says

A model is an `encode`: how actions meet items (`fusions.py`). All else is the same, so
that only the fusion differs.

Shapes: `B` users, `T` context events, `C` candidates, `L` = T + C, `D` width, `A` kinds
of action, `K` tasks, `F` features, `S` width of the states that a model gives to its
head.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from models.actions.batch import ActionsBatch
from models.actions.catalogue import ActionsCatalogue
from models.actions.model import ActionsModel
from models.config import check_choices, check_dropout, check_positive
from models.label_loss import (
    LabelOptions,
    label_loss,
    resolve_masks,
    resolve_weights,
    sample_learned,
)
from models.layers.causal_attention import CausalBlock, Layout
from models.layers.mmoe import MMoE
from models.layers.standardised import Standardised
from models.own_features import OwnInputs
from models.warm_start import EmbeddingTables


@dataclass
class ActionsConfig(LabelOptions):
    """Sizes that all models of the family share."""

    max_history: int = 1024
    """Latest events of a user that are read (Sec. 3)."""
    window_overlap: float = 0.5
    """Share of `max_history` by which the rows of a longer user overlap in training:
    what is learned from reads that much of history at least, except at the user's
    beginning. 0: each event is read in one row."""
    width: int = 128
    """D, width of item and action embeddings and of all states (the paper names
    none)."""
    num_layers: int = 12
    """Transformer blocks (Sec. 2)."""
    num_heads: int = 4
    """Attention heads (the paper names none)."""
    ffn: int = 512
    """Inner width of a feed-forward block (the paper names none)."""
    experts: int = 4
    """Experts of the MMoE head (the paper names none)."""
    expert_width: int = 128
    """Width of an expert's output."""
    tower_width: int = 64
    """Inner width of a task's tower."""
    dropout: float = 0.1
    """Dropout in blocks and head."""
    item_ids: Literal["learned", "hashed", "none"] = "learned"
    """Whether an item has a vector of its own beside its attributes, one of
    `id_buckets` that it shares with others, or none: a feed of fresh items has nothing
    to learn it from (the paper lists features, Sec. 2, and no id)."""
    id_buckets: int = 4096
    """Vectors of hashed ids."""
    id_dropout: float = 0.0
    """Share of the events whose id counts as unknown in training, a vector of zeros.
    Above 0 all ids begin there, so that items which training has not seen are unknown,
    and are told by their attributes."""
    category_dropout: float = 0.02
    """Share of the values of the log's own categories that count as unknown in
    training, so that values which training has not seen mean something."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = "max_history width num_layers num_heads ffn experts expert_width tower_width id_buckets"
        check_positive(self, sizes.split())
        check_choices(self)
        check_dropout(
            self, "dropout", "category_dropout", "id_dropout", "window_overlap"
        )
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width {self.width} is not a multiple of twice num_heads {self.num_heads}; change either "
                "(rotary positions turn pairs of a head's channels)"
            )


def projection(inputs: int, width: int) -> nn.Sequential:
    """A projection network; the norm puts items and actions on one scale, so that lambda = 1 means as much of each."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.LayerNorm(width),
    )


class ItemNetwork(EmbeddingTables):
    """Item features, concatenated and projected (Sec. 2): the id's own embedding or that of its hash, categories,
    numbers, the text's projection; and viewer-side categories and the log's own features of the event.

    An item that is not in the catalogue is told by its content alone: its id is
    unknown, as those that `id_dropout` drops are, and so is a category's value that the
    catalogue does not have."""

    numbers: Tensor
    categories: Tensor
    text: Tensor
    catalogue_buffers = ("numbers", "categories")

    def __init__(self, catalogue: ActionsCatalogue, config: ActionsConfig) -> None:
        super().__init__()
        items, width = catalogue.num_items, config.width
        self.buckets = config.id_buckets if config.item_ids == "hashed" else 0
        self.id_dropout, self.has_ids = config.id_dropout, config.item_ids != "none"
        for name in CONTENT:
            table = getattr(catalogue, name)
            self.register_buffer(
                name,
                table.clone().view(items, table.numel() // items),
                persistent=name != "text",
            )
        sizes = [self.buckets or items] if self.has_ids else []
        sizes += [int(column.max()) + 1 for column in self.categories.T]
        sizes += [len(values) + 1 for values in catalogue.viewers.values()]
        self.viewers = len(catalogue.viewers)
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(
                torch.randn(size, width) * width**-0.5, freeze=False
            )
            for size in sizes
        )
        of_items = (
            list(catalogue.attributes.categories.values())
            or [None] * self.categories.shape[1]
        )
        of_items = [
            None if values is None else values.to_pylist() for values in of_items
        ]
        self.row_names = [
            *[None] * self.has_ids,
            *of_items,
            *catalogue.viewers.values(),
        ]
        for place in range(self.categories.shape[1]):
            nn.init.zeros_(
                cast(nn.Embedding, self.tables[self.has_ids + place]).weight[0]
            )
        if self.has_ids and self.id_dropout:
            nn.init.zeros_(cast(nn.Embedding, self.tables[0]).weight)
        # normalised vectors of W numbers are small beside features
        self.gain = 1 / catalogue.text_size if catalogue.text_size > 0 else 1.0
        self.of_text = (
            nn.Linear(self.text.shape[1], width) if self.text.numel() else None
        )
        self.own = (
            OwnInputs(catalogue.own, width, config.category_dropout)
            if catalogue.own.names
            else None
        )
        wide = (
            len(sizes) * width
            + self.numbers.shape[1]
            + (len(self.own.columns) if self.own else 0)
        )
        wide += width if self.of_text else 0
        self.project = projection(wide, width)

    def forward(
        self,
        item: Tensor,
        viewer: Tensor | None = None,
        own: Tensor | None = None,
        new: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """(..., D) of `item` (...) and `viewer` (..., V), both int64, and `own` (..., X + G); without `viewer` nothing
        is known of it. `new` (n, ...) by name is the content of items from I on."""
        viewer = item.new_zeros(*item.shape, self.viewers) if viewer is None else viewer
        keys = (
            [
                self.hash_ids(
                    item if new is None else item.clamp(max=len(self.numbers) - 1)
                )
            ]
            if self.has_ids
            else []
        )
        keys += [*self.content("categories", item, new).unbind(-1), *viewer.unbind(-1)]
        parts = [table(key) for table, key in zip(self.tables, keys, strict=True)]
        if self.has_ids and new is not None:
            parts[0] = parts[0] * (item < len(self.numbers)).unsqueeze(-1)
        if self.has_ids and self.id_dropout and self.training:
            parts[0] = parts[0] * (
                torch.rand(item.shape, device=item.device) >= self.id_dropout
            ).unsqueeze(-1)
        parts.append(self.content("numbers", item, new))
        if self.of_text is not None:
            parts.append(self.of_text(self.gain * self.content("text", item, new)))
        if self.own is not None:
            assert own is not None, "a batch of a log with own features has them"
            parts.append(self.own(own))
        return self.project(torch.cat(parts, -1))

    def content(self, name: str, item: Tensor, new: dict[str, Tensor] | None) -> Tensor:
        """Return the (..., width) catalogue values of `item` (...); rows from I on come
        from `new`.
        """
        table = getattr(self, name)
        if new is None:
            return table[item]
        place = item - len(table)
        found = table[item.clamp(max=len(table) - 1)]
        found[place >= 0] = new[name][place[place >= 0]]
        return found

    def hash_ids(self, item: Tensor) -> Tensor:
        """Return the bucket of each hashed id, or the item itself without buckets."""
        return (item * 0x9E3779B1 & 0xFFFFFFFF) % self.buckets if self.buckets else item


class FusionModel(ActionsModel):
    """Logits of every task for context events and candidates; a subclass gives `encode`."""

    config: ActionsConfig
    history_targets = True
    """Whether context events are learned from; not where a context token holds its own
    label."""
    states_width = 1
    """S in units of D."""
    tokens = 1
    """Positions of the context to an event."""

    def __init__(self, config: ActionsConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.labels, self.train_rates = catalogue.labels, catalogue.train_rates
        self.weights = resolve_weights(self.labels, config.label_weights)
        self.masks = resolve_masks(self.labels, config.label_masks)
        self.correction = config.correction
        self.items = ItemNetwork(catalogue, config)
        self.wants_ids = self.items.has_ids and not config.id_dropout
        self.actions = projection(len(catalogue.actions), config.width)
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
        if self.train_rates:  # a model starts by predicting each task's rate: at a normalised entropy of 1
            with torch.no_grad():
                self.head.bias.copy_(
                    torch.tensor(self.train_rates).logit(eps=1e-4) - config.correction
                )

    def blocks(self, *, strict: bool) -> nn.ModuleList:
        c = self.config
        return nn.ModuleList(
            CausalBlock(c.width, c.num_heads, c.ffn, c.dropout, strict=strict)
            for _ in range(c.num_layers)
        )

    def layout(self, batch: ActionsBatch) -> Layout:
        """Return the positions that each event of the batch reads.

        A context event has `tokens` positions.
        """
        context, width = (
            batch.item.shape[1],
            self.config.width // self.config.num_heads,
        )
        return Layout.build(
            batch.count_earlier(),
            context,
            width,
            tied=batch.has_ties,
            tokens=self.tokens,
        )

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        """(B, L, S) states of context events, then candidates, from `items` (B, L, D) and the context's `actions`
        (B, T, D). A state may depend on the actions of events that are strictly earlier, as `layout` says."""
        raise NotImplementedError

    def logits(self, batch: ActionsBatch, *, history: bool) -> Tensor:
        """(B, L, K), or (B, C, K) of the candidates alone where not `history`; before the correction for
        `negative_rate`."""
        items = self.items(
            batch.join("item"),
            None if batch.viewer is None else batch.join("viewer"),
            None if batch.own is None else batch.join("own"),
            new_items(batch),
        )
        states = self.encode(items, self.actions(batch.action), self.layout(batch))
        feature = batch.join("feature")
        if not history:
            states = states[:, batch.item.shape[1] :]
            feature = batch.candidate_feature
        return self.head(torch.cat([states, self.features(feature)], 2))

    def score(self, batch: ActionsBatch) -> Tensor:
        """(N, K) logits of the N candidates of all users, row by row, padding left out."""
        return (
            self.logits(batch, history=False)[batch.candidate_valid] + self.correction
        )

    def forward(self, batch: ActionsBatch) -> dict[str, Tensor]:
        """`loss`: per task the mean binary cross-entropy over events that are learned from, summed over tasks;
        `padding`: the share of the batch's positions that hold no event."""
        history = self.history_targets
        learned = batch.candidate_valid
        if history:
            learned = torch.cat([batch.learn, learned], 1)
        logits = self.logits(batch, history=history).flatten(0, 1)
        label = batch.join("label") if history else batch.candidate_label
        label = label.flatten(0, 1)
        kept = learned.flatten()[:, None].expand_as(
            label
        )  # no selection, for whose size a GPU would have to wait
        some = sample_learned(label, self.masks, self.config.negative_rate)
        loss = label_loss(
            logits, label, self.weights, kept if some is None else kept & some
        )
        events = torch.cat([batch.valid, batch.candidate_valid], 1)
        return {"loss": loss, "padding": 1 - events.float().mean()}

    def parameter_counts(self) -> dict[str, int]:
        """Count parameters by part: items, actions, head, the fusion's parts, and
        `total`.
        """
        counts: Counter[str] = Counter()
        for name, parameter in self.named_parameters():
            counts[name.split(".")[0]] += parameter.numel()
        return {**counts, "total": sum(counts.values())}


CONTENT = ("numbers", "categories", "text")
"""What is known of an item beside its id."""


def new_items(batch: ActionsBatch) -> dict[str, Tensor] | None:
    """Return the content of the items that a served request brings, by name; None without new items."""
    if batch.new_numbers is None:
        return None
    return {name: getattr(batch, f"new_{name}") for name in CONTENT}
