"""HLLM (Chen et al., 2024) as the QGS paper compares with it: a tower over the text of items, a tower over users.

    python -m jobs.train --config jobs/configs/qgs.yaml --config jobs/configs/search/hllm.yaml ...

The item tower is the pretrained text encoder and a trained projection. The paper trains
the encoder too: so it is with `item_tower`; without, it is frozen, and its output comes
with the catalogue. The user tower is a causal BERT that starts from `pretrained` where
that is given. A token carries text alone, no features. What the head reads of a
candidate is the text of jobs.encode, as in every model here; `match` takes its document
from the item tower.

Of a batch the item tower encodes each distinct document once, in pieces of documents of
like length. With several pieces their activations are made again in the backward pass,
so that memory holds those of one piece at a time.

Shapes: `I` documents, `U` distinct ones, `S` tokens of the longest in a piece, `W`
width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from models.cpu.derived import cache_until_changed
from models.search.catalogue import SearchCatalogue
from models.search.qgs import QGS, QGSConfig
from models.storage.tables import UserError
from models.text.text_encoder import load_encoder, remove_pooler

PIECE = 16_384
"""Most tokens of a piece, padding included (or one document)."""


class ItemTower(nn.Module):
    """A `transformers` encoder of `model` (see `encoder_model`) over the catalogue's documents."""

    tokens: Tensor
    begin: Tensor

    def __init__(self, model: dict[str, Any], catalogue: SearchCatalogue) -> None:
        """Load the encoder of documents.

        Raises:
            UserError: if the tables have no tokens, or tokens of an incompatible
                encoder.
        """
        super().__init__()
        from transformers import AutoConfig, AutoModel

        documents = catalogue.text.documents
        if documents is None:
            raise UserError(
                "the text has no tokens for an item tower to read; run jobs.encode again with the same options, "
                "with a transformers encoder, or leave model.item_tower out"
            )
        config = AutoConfig.for_model(**model)
        lengths = documents.begin.diff()
        wanted = {
            "vocab_size": int(documents.tokens.max()) + 1,
            "max_position_embeddings": int(lengths.max()),
        }
        known = {
            name: getattr(config, name, None) or number
            for name, number in wanted.items()
        }
        if catalogue.text.width != config.hidden_size or any(
            known[name] < wanted[name] for name in wanted
        ):
            raise UserError(
                f"the text needs width {catalogue.text.width} and at least {wanted}, the item tower has width "
                f"{config.hidden_size} and {known}; give the encoder of jobs.encode as model.item_tower"
            )
        self.encoder = remove_pooler(AutoModel.from_config(config))
        self.pooling, self.normalize = documents.pooling, documents.normalize
        self.register_buffer("tokens", documents.tokens, persistent=False)
        self.register_buffer("begin", documents.begin, persistent=False)
        self.lengths = lengths  # (I,), on the CPU, where pieces are cut

    def forward(self, item: Tensor) -> Tensor:
        """(..., W): embeddings of documents as jobs.encode makes them, by the weights as they are. Without gradients
        all documents are encoded once, in the weights' own precision, and kept until weights change."""
        if not torch.is_grad_enabled():
            everything = torch.arange(len(self.lengths), device=item.device)
            return cache_until_changed(
                self, "documents", lambda: self.encode(everything)
            )[item]
        distinct, index = item.unique(return_inverse=True)
        return self.encode(distinct)[index]

    def encode(self, item: Tensor) -> Tensor:
        """(U, W) of the documents `item` (U,)."""
        lengths, order = self.lengths[item.cpu()].sort(descending=True, stable=True)
        longest, pieces = lengths.tolist(), [0]
        while pieces[-1] < len(longest):
            pieces.append(pieces[-1] + max(1, PIECE // longest[pieces[-1]]))
        again = torch.is_grad_enabled() and len(pieces) > 2
        ordered, states = item[order.to(item.device)], []
        for begin, end in itertools.pairwise(pieces):
            piece = (ordered[begin:end], longest[begin])
            states.append(
                checkpoint(self.states, *piece, use_reentrant=False)
                if again
                else self.states(*piece)
            )
        return torch.cat(states)[order.argsort().to(item.device)]

    def states(self, item: Tensor, longest: int) -> Tensor:
        """(U, W) of the documents `item` (U,) of at most `longest` tokens."""
        begin, place = self.begin[item], torch.arange(longest, device=item.device)
        inside = place < (self.begin[item + 1] - begin)[:, None]  # (U, S)
        tokens = self.tokens[torch.where(inside, begin[:, None] + place, 0)].long()
        states = self.encoder(
            input_ids=tokens, attention_mask=inside.long()
        ).last_hidden_state.float()  # (U, S, W)
        if self.pooling == "cls":
            pooled = states[:, 0]
        else:
            pooled = (states * inside[..., None]).sum(1) / inside.sum(1, keepdim=True)
        return functional.normalize(pooled, dim=-1) if self.normalize else pooled


def encoder_model(path: str) -> dict[str, Any]:
    """Return the kind and the non-default settings of the pretrained encoder at `path`."""
    found = load_encoder(path).config.to_diff_dict()
    return {
        name: value
        for name, value in found.items()
        if name not in ("architectures", "dtype", "transformers_version")
    }


@dataclass
class HLLMConfig(QGSConfig):
    """Settings of HLLM (Sec. 4.1 of QGS: 12 layers, 12 heads, 768)."""

    encoder: Literal["linear_hstu", "hstu", "transformer"] = "transformer"
    """The user tower."""
    width: int = 768
    """Width of the user tower."""
    num_heads: int = 12
    """Heads of the user tower."""
    ffn: int = 3072
    """Inner width of its feed-forward blocks."""
    token: Literal["pair", "item"] = "item"
    """Text of a behaviour: the document alone."""
    context_features: bool = False
    """No features in a token."""
    group_attention: bool = False
    """No HFG-Attention."""
    query_condition: Literal["query", "joint", "none"] = "none"
    """The next item is predicted from the past alone."""
    item_tower: str = field(default="", metadata={"names": "encoder"})
    """The encoder of jobs.encode (folder, name, or `minilm`), to be trained further as
    item tower; read in training only. Empty: documents keep the embeddings that it gave
    them."""
    item_model: dict[str, Any] = field(default_factory=dict)
    """Sizes of the item tower, taken from it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.item_tower and self.token != "item":
            raise ValueError(
                f"item_tower is '{self.item_tower}', which token '{self.token}' does not read; use item"
            )


class HLLM(QGS):
    """See the module."""

    name = "hllm"
    config_class = HLLMConfig
    config: HLLMConfig

    def __init__(self, config: HLLMConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(config, catalogue)
        self.item_tower = (
            ItemTower(config.item_model, catalogue) if config.item_model else None
        )

    @classmethod
    def resolve_config(cls, config: Any, catalogue: Any) -> Any:
        """Return the config with the sizes of the pretrained encoders that it names."""
        config = super().resolve_config(config, catalogue)
        if not config.item_tower:
            return config
        return replace(config, item_model=encoder_model(config.item_tower))

    def prepare_training(
        self, catalogue: Any, datasets: Mapping[str, Any]
    ) -> list[str]:
        """Load the pretrained weights that the config names into the towers."""
        messages = super().prepare_training(catalogue, datasets)
        if self.config.item_tower:
            tower = load_encoder(self.config.item_tower)
            cast(ItemTower, self.item_tower).encoder.load_state_dict(tower.state_dict())
        return messages

    def document(self, item: Tensor) -> Tensor:
        if self.item_tower is None:
            return super().document(item)
        return self.text.document(self.text.gain * self.item_tower(item.clamp(min=0)))
