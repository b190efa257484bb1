"""The item tower of HLLM where it is trained: the text encoder itself, over the tokens of documents.

Of a batch each distinct document is encoded once, in pieces of documents of like length. With several pieces their
activations are made again in the backward pass, so that memory holds those of one piece at a time.

Shapes: `I` documents, `U` distinct ones, `S` tokens of the longest in a piece, `W` width.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from models.cpu.derived import derived
from models.search.data import SearchCatalogue
from models.tables import UserError
from models.text_encoder import load_encoder, without_pooler

PIECE = 16_384
"""Most tokens of a piece, padding included (or one document)."""


class ItemTower(nn.Module):
    """A `transformers` encoder of `model` (see `encoder_model`) over the catalogue's documents."""

    tokens: Tensor
    begin: Tensor

    def __init__(self, model: dict[str, Any], catalogue: SearchCatalogue) -> None:
        """Raises UserError where the text has no tokens, or those of an encoder that this one cannot stand for."""
        super().__init__()
        from transformers import AutoConfig, AutoModel

        documents = catalogue.documents
        if documents is None:
            raise UserError(
                "the text has no tokens for an item tower to read; run jobs.encode again with the same options, "
                "with a transformers encoder, or leave model.item_tower out"
            )
        config = AutoConfig.for_model(**model)
        lengths = documents.begin.diff()
        wanted = {"vocab_size": int(documents.tokens.max()) + 1, "max_position_embeddings": int(lengths.max())}
        known = {name: getattr(config, name, None) or number for name, number in wanted.items()}
        if catalogue.items.shape[1] != config.hidden_size or any(known[name] < wanted[name] for name in wanted):
            raise UserError(
                f"the text needs width {catalogue.items.shape[1]} and at least {wanted}, the item tower has width "
                f"{config.hidden_size} and {known}; give the encoder of jobs.encode as model.item_tower"
            )
        self.encoder = without_pooler(AutoModel.from_config(config))
        self.pooling, self.normalize = documents.pooling, documents.normalize
        self.register_buffer("tokens", documents.tokens, persistent=False)
        self.register_buffer("begin", documents.begin, persistent=False)
        self.lengths = lengths  # (I,), on the CPU, where pieces are cut

    def forward(self, item: Tensor) -> Tensor:
        """(..., W): embeddings of documents as jobs.encode makes them, by the weights as they are.

        Without gradients all documents are encoded once, in the weights' own precision, and kept until weights change.
        """
        if not torch.is_grad_enabled():
            everything = torch.arange(len(self.lengths), device=item.device)
            return derived(self, "documents", lambda: self.encode(everything))[item]
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
            states.append(checkpoint(self.states, *piece, use_reentrant=False) if again else self.states(*piece))
        return torch.cat(states)[order.argsort().to(item.device)]

    def states(self, item: Tensor, longest: int) -> Tensor:
        """(U, W) of the documents `item` (U,) of at most `longest` tokens."""
        begin, place = self.begin[item], torch.arange(longest, device=item.device)
        inside = place < (self.begin[item + 1] - begin)[:, None]  # (U, S)
        tokens = self.tokens[torch.where(inside, begin[:, None] + place, 0)].long()
        states = self.encoder(input_ids=tokens, attention_mask=inside.long()).last_hidden_state.float()  # (U, S, W)
        if self.pooling == "cls":
            pooled = states[:, 0]
        else:
            pooled = (states * inside[..., None]).sum(1) / inside.sum(1, keepdim=True)
        return functional.normalize(pooled, dim=-1) if self.normalize else pooled


def encoder_model(path: str) -> dict[str, Any]:
    """What makes an encoder like the pretrained one at `path` again: its kind, and what differs from its defaults."""
    found = load_encoder(path).config.to_diff_dict()
    return {
        name: value for name, value in found.items() if name not in ("architectures", "dtype", "transformers_version")
    }
