"""TIGER (Rajput et al., 2023): a T5 encoder-decoder that writes the next item's semantic ID.

Input `[user, C codes per item for the latest items, end]`, output the C codes of the next item, found by
beam search within the trie of the catalogue. Sizes are those of the public code behind the SID-MLP paper.

Shapes: `B` requests, `T` items and `S = 2 + C * T` tokens of a history, `C` codes of an item.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.retrieval.data import PAD, Catalogue
from models.retrieval.decoding.beam import beam_search, unconstrained_beam_search
from models.retrieval.decoding.encoder import packed_encoder
from models.retrieval.decoding.generate import generate
from models.retrieval.decoding.shared_kv import SharedKV
from models.retrieval.recommend import recommender
from models.retrieval.t5 import T5, T5Sizes
from models.tables import UserError

Decoder = Literal["shared_kv", "hf", "hf_nocache"]


@dataclass
class TigerConfig:
    """Sizes of TIGER; the defaults are those of the public code behind the SID-MLP paper."""

    d_model: int = 128
    """Width of token embeddings and states."""
    d_ff: int = 1024
    """Inner width of the feed-forward layers."""
    num_heads: int = 6
    """Attention heads."""
    d_kv: int = 64
    """Width of a head."""
    num_encoder_layers: int = 4
    """Encoder blocks (Sec. 4.1 of SID-MLP: a four-layer T5)."""
    num_decoder_layers: int = 4
    """Decoder blocks."""
    dropout: float = 0.1
    """Dropout on embeddings, attention and blocks."""
    n_user_tokens: int = 1
    """Tokens that users are hashed to (TIGER has 2000; 1 in the code behind SID-MLP)."""
    max_history: int = 20
    """Latest items read."""
    beam: int = 50
    """Beams when recommending (Sec. 4.1 of SID-MLP)."""
    decoder: Decoder = "shared_kv"
    """`shared_kv` is ours; `hf` and `hf_nocache` are `transformers` generate, for comparison."""
    constrained: bool = True
    """Whether decoding keeps to the trie; without it, tuples of no item are dropped in the end."""

    def __post_init__(self) -> None:
        positive = ("d_model", "d_ff", "num_heads", "d_kv", "num_encoder_layers", "num_decoder_layers")
        for name in (*positive, "n_user_tokens", "max_history", "beam"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1; give a positive number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout} is not in [0, 1); give a share")
        _check_decoder(self.decoder)


def _check_decoder(decoder: str) -> None:
    if decoder not in ("shared_kv", "hf", "hf_nocache"):
        raise ValueError(f"decoder '{decoder}' is unknown; choose shared_kv, hf or hf_nocache")


class Tiger(nn.Module):
    """Tokens: 0 padding and start, then the codes level after level, then users, then the end."""

    sids: Tensor

    def __init__(self, config: TigerConfig, catalogue: Catalogue) -> None:
        super().__init__()
        if catalogue.sids is None or catalogue.trie is None:
            raise UserError("the model 'tiger' needs semantic IDs; give --sids with what jobs.tokenize made")
        self.config = config
        self.trie = catalogue.trie
        self.sizes = list(catalogue.codebook_sizes)
        self.first_token = list(itertools.accumulate(self.sizes[:-1], initial=1))
        """Token of code 0 at each level."""
        self.first_user = 1 + sum(self.sizes)
        self.end = self.first_user + config.n_user_tokens
        tokens = catalogue.sids + torch.tensor(self.first_token)
        self.register_buffer("sids", tokens, persistent=False)  # (N, C) tokens of each item
        self.t5 = T5(
            T5Sizes(
                vocabulary=self.end + 1,
                d_model=config.d_model,
                d_ff=config.d_ff,
                num_heads=config.num_heads,
                d_kv=config.d_kv,
                num_encoder_layers=config.num_encoder_layers,
                num_decoder_layers=config.num_decoder_layers,
                dropout=config.dropout,
            )
        )
        self._transformers: tuple | None = None  # made when asked for, and no submodule: its weights are these

    def tokens(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(tokens, real), each (B, S): the encoder's input, and which positions are not padding."""
        history = batch["history"]
        rows, items = history.shape
        codes = torch.where((history == PAD).unsqueeze(-1), 0, self.sids[history.clamp(min=0)])  # (B, T, C)
        user = self.first_user + batch["user"] % self.config.n_user_tokens
        tokens = torch.cat([user.unsqueeze(1), codes.flatten(1), history.new_zeros((rows, 1))], 1)
        end = 1 + len(self.sizes) * batch["history_length"].unsqueeze(1)
        tokens = tokens.scatter(1, end, self.end)
        place = torch.arange(2 + items * len(self.sizes), device=history.device)
        return tokens, place <= end

    def encode(self, batch: dict[str, Tensor], share: float = 0.0) -> tuple[Tensor, Tensor | None]:
        """(states (B, S, D), padding (B, 1, 1, S) of 0 and -inf or None where nothing is padded)."""
        tokens, real = self.tokens(batch)
        padding = None
        if tokens.device.type != "cpu" or not bool(real.all()):  # the check would wait for a GPU
            zero = torch.zeros(real.shape, device=real.device, dtype=self.t5.shared.weight.dtype)
            padding = zero.masked_fill(~real, -torch.inf)[:, None, None]
        return self.t5.encode(tokens, padding, share), padding

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Mean cross-entropy over the C codes of each target, given those before (unit `request`)."""
        share = self.config.dropout if self.training else 0.0
        source, padding = self.encode(batch, share)
        target = self.sids[batch["target"]]  # (B, C)
        given = functional.pad(target[:, :-1], (1, 0))  # the start token, then all codes but the last
        logits = self.t5.decode(given, source, padding, share)  # (B, C, V)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), target.flatten())}

    @recommender
    def recommend(
        self,
        batch: dict[str, Tensor],
        k: int,
        beam: int | None = None,
        decoder: Decoder | None = None,
        constrained: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(items, scores), each (B, k): items by falling log-probability of their codes.

        Options left out are the config's. Every item can come up: those that the user knows are not
        excluded, as in the papers that this is compared with. Where fewer than k items are found the
        tail is item -1 with score -inf.
        """
        beam = self.config.beam if beam is None else beam
        constrained = self.config.constrained if constrained is None else constrained
        decoder = self.config.decoder if decoder is None else decoder
        _check_decoder(decoder)
        if decoder == "shared_kv":
            tokens, real = self.tokens(batch)
            states, padding = packed_encoder(self.t5)(tokens, real.sum(1))
            scorer = SharedKV(self.t5, states, padding, self.first_token, self.sizes)
            search = beam_search if constrained else unconstrained_beam_search
            return search(scorer, self.trie, k, beam)
        if self._transformers is None:
            self._transformers = (self.t5.as_transformers(),)
        tokens, real = self.tokens(batch)
        return generate(
            self._transformers[0],
            tokens,
            real.long(),
            self.trie,
            self.first_token,
            k,
            beam,
            use_cache=decoder == "hf",
            constrained=constrained,
        )
