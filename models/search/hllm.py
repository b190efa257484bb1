"""HLLM (Chen et al., 2024), a baseline of QGS: an item tower and a user tower.

    python -m jobs.train --config jobs/configs/search/qgs.yaml
        --config jobs/configs/search/ablations/hllm.yaml ...

The item tower is the pretrained text encoder with a trained projection. The paper
trains the encoder too, which the option `item_tower` does. Without this option the
encoder is frozen, and its output is part of the catalogue. The user tower is a causal
BERT, initialised from `pretrained` if this option is set. A token carries the text of
a document and no features. As in every search model, the prediction head reads the
candidate's text from jobs.encode; the similarity of the option `match` uses the
document vector of the item tower.

The item tower encodes each distinct document of a batch once, in chunks of documents
of similar length. With several chunks, activations are recomputed in the backward pass,
so that memory holds the activations of one chunk at a time.

Shapes: `I` documents, `U` distinct documents, `S` tokens of the longest document of a
chunk, `W` width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, ClassVar, cast

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from core.errors import UserError
from core.options import STRICT
from models.cpu.weights import cache_until_changed
from models.search.catalogue import SearchCatalogue
from models.search.qgs import QGS, BehaviourText, Encoder, QGSConfig, QueryText
from models.text.pretrained import (
    EncoderPath,
    load_encoder,
    pretrained_config,
    remove_pooler,
)

MAX_CHUNK_TOKENS = 16_384
"""Maximum number of tokens of a chunk of several documents, padding included."""


class ItemTower(nn.Module):
    """A trainable `transformers` encoder over the documents of the catalogue."""

    tokens: Tensor
    """Tokens of all documents, end to end (`DocumentTokens.tokens`)."""
    begin: Tensor
    """(I + 1,) index of each document's first token."""

    def __init__(self, model: dict[str, Any], catalogue: SearchCatalogue) -> None:
        """Build the encoder without pretrained weights.

        Args:
            model: Settings of the encoder, from `pretrained_config`.
            catalogue: Catalogue whose documents are encoded.
        """
        super().__init__()
        from transformers import AutoConfig, AutoModel

        documents = catalogue.text.documents
        if documents is None:
            raise UserError("the text has no tokens for an item tower to read")
        config = AutoConfig.for_model(**model)
        if catalogue.text.width != config.hidden_size:
            raise UserError(
                f"the text has width {catalogue.text.width}, the item tower "
                f"{config.hidden_size}"
            )
        self.encoder = remove_pooler(AutoModel.from_config(config))
        self.pooling = documents.pooling
        self.register_buffer("tokens", documents.tokens, persistent=False)
        self.register_buffer("begin", documents.begin, persistent=False)
        self.lengths = (
            documents.begin.diff()
        )  # (I,), on the CPU, where chunk boundaries are computed

    def forward(self, item: Tensor) -> Tensor:
        """Return the embeddings (..., W) of the documents of `item` (...).

        Without gradients, all documents are encoded once, in the precision of the
        weights, and cached until the weights change.
        """
        if not torch.is_grad_enabled():
            all_items = torch.arange(len(self.lengths), device=item.device)
            documents = cache_until_changed(
                self, "documents", lambda: self.encode(all_items)
            )
            return documents[item]
        distinct, index = item.unique(return_inverse=True)
        return functional.embedding(index, self.encode(distinct))

    def encode(self, item: Tensor) -> Tensor:
        """Return the embeddings (U, W) of the documents of `item` (U,)."""
        sorted_lengths, order = self.lengths[item.cpu()].sort(
            descending=True, stable=True
        )
        lengths = sorted_lengths.tolist()
        edges = [0]
        while edges[-1] < len(lengths):
            longest = lengths[edges[-1]]
            edges.append(edges[-1] + max(1, MAX_CHUNK_TOKENS // longest))
        recompute = torch.is_grad_enabled() and len(edges) > 2
        sorted_items = item[order.to(item.device)]
        embeddings = []
        for begin, end in itertools.pairwise(edges):
            chunk = (sorted_items[begin:end], lengths[begin])
            embeddings.append(
                checkpoint(self.encode_chunk, *chunk, use_reentrant=False)
                if recompute
                else self.encode_chunk(*chunk)
            )
        return functional.embedding(
            order.argsort().to(item.device), torch.cat(embeddings)
        )

    def encode_chunk(self, item: Tensor, longest: int) -> Tensor:
        """Return the embeddings (U, W) of documents with at most `longest` tokens."""
        begin = self.begin[item]
        position = torch.arange(longest, device=item.device)
        inside = position < (self.begin[item + 1] - begin)[:, None]  # (U, S)
        tokens = self.tokens[torch.where(inside, begin[:, None] + position, 0)].long()
        states = self.encoder(
            input_ids=tokens, attention_mask=inside.long()
        ).last_hidden_state.float()  # (U, S, W)
        if self.pooling == "cls":
            pooled = states[:, 0]
        else:
            pooled = (states * inside[..., None]).sum(1) / inside.sum(1, keepdim=True)
        return functional.normalize(pooled, dim=-1)


@dataclass(config=STRICT)
class HLLMConfig(QGSConfig):
    """Settings of HLLM (Sec. 4.1 of QGS: 12 layers, 12 heads, 768)."""

    encoder: Encoder = "transformer"
    """Encoder of the user tower."""
    width: PositiveInt = 768
    """Width of the user tower."""
    num_heads: PositiveInt = 12
    """Heads of the user tower."""
    ffn: PositiveInt = 3072
    """Inner width of the user tower's feed-forward blocks."""
    token: BehaviourText = "item"
    """Text of a behaviour: the document alone."""
    context_features: bool = False
    """Whether a behaviour's token has its features; HLLM has none."""
    group_attention: bool = False
    """HFG-Attention over groups of features; HLLM has none."""
    query_condition: QueryText = "none"
    """Inputs of the prediction head about the next query: none in HLLM."""
    item_tower: EncoderPath = ""
    """Encoder of jobs.encode (folder, name, or `minilm`) that is fine-tuned as the item
    tower; read in training only. Empty: documents keep the embeddings of
    jobs.encode."""
    item_model: dict[str, Any] = field(default_factory=dict)
    """Settings of the item tower, read from `item_tower`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.item_tower and self.token != "item":
            raise ValueError(
                f"item_tower is '{self.item_tower}', which token '{self.token}' does "
                "not read"
            )


class HLLM(QGS):
    """A user tower over the document vectors of an item tower (see the module)."""

    name = "hllm"
    config_class = HLLMConfig
    extra_inputs: ClassVar[Mapping[str, bool]] = {"text": True}
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
        return replace(config, item_model=pretrained_config(config.item_tower))

    def prepare_training(self, catalogue: Any) -> list[str]:
        """Load the pretrained weights that the config names into the towers."""
        messages = super().prepare_training(catalogue)
        if self.config.item_tower:
            pretrained = load_encoder(self.config.item_tower)
            item_tower = cast(ItemTower, self.item_tower)
            item_tower.encoder.load_state_dict(pretrained.state_dict())
        return messages

    def embed_documents(self, item: Tensor) -> Tensor:
        """Return the reduced vectors (..., E) of documents.

        They come from the item tower, or from the embeddings of jobs.encode if the
        model has none. Arguments are the same as of `QGS.embed_documents`.
        """
        if self.item_tower is None:
            return super().embed_documents(item)
        return self.text.document(self.text.gain * self.item_tower(item.clamp(min=0)))
