r"""SID-MLP (Guo et al., 2026): TIGER's decoder distilled into a readout and MLPs.

    python -m jobs.train --config jobs/configs/retrieval/sid_mlp.yaml --tables TABLES \
        --sids SIDS --storage runs --name sid_mlp --model.teacher runs/tiger

One attention readout per user and an MLP per level replace the decoder, which is in
`decoder.py`; the loss is in `distillation/student.py`.

Shapes: `B` requests.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from models.cpu import kernels
from models.cpu.weights import cache_until_changed
from models.model import check_finite
from models.retrieval.distillation.student import Student
from models.retrieval.options import Scores
from models.retrieval.retriever import History, Retriever
from models.retrieval.sid_mlp.decoder import SidMlpConfig, SidMlpDecoder


class SidMlp(Student):
    """SID-MLP and its ablations, with a fast search for the paper's main model."""

    name = "sid_mlp"
    config_class: ClassVar[type] = SidMlpConfig
    config: SidMlpConfig
    decoder: SidMlpDecoder

    @staticmethod
    def build_decoder(config: SidMlpConfig, teacher: Retriever) -> SidMlpDecoder:
        """Return SID-MLP's decoder on the teacher's backbone."""
        return SidMlpDecoder(config, teacher.backbone)

    def search(
        self,
        history: History,
        k: int,
        allowed: Tensor | None = None,
        beam: int | None = None,
        scores: Scores | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Search as `Retriever.search` does, on a CPU by one compiled call.

        The call keeps a hidden layer in the core's cache, and does not run the head of
        a prefix with a single child. Items and scores are equal up to rounding.
        """
        config, trie = self.config, self.trie
        is_main_model = (
            config.m == 0
            and config.prefix == "concat"
            and config.readout == "attention"
            and config.logits == "codebook"
            and config.context_ffn
        )
        if not is_main_model or not kernels.ready(history.states):
            return super().search(history, k, allowed, beam, scores)
        heads = cache_until_changed(
            self, "folded_heads", lambda: FoldedHeads(self.decoder)
        )
        z = cast(Tensor, self.decoder.context(history))
        hidden = functional.linear(z, heads.z_weight, heads.z_bias)  # (B, L * N)
        check_finite(hidden)  # the kernel's comparisons would ignore NaN
        node, score = kernels.beam_search(
            hidden,
            heads.levels,
            [(trie.offsets(level), trie.tokens(level)) for level in range(trie.levels)],
            self.tokens.sizes,
            heads.epsilon,
            beam or config.beam,
            k,
            self.normalizes_children(scores),
            () if allowed is None else allowed.split(trie.edges),
        )
        return torch.where(score == -torch.inf, -1, trie.leaves[node]), score


class FoldedHeads:
    """The heads' weights for the compiled search.

    The first layer of a head is the sum of a part that depends on z, computed once per
    user, and of a table row per earlier code:
    [z; e(c1); e(c2)] W + b = (z Wz + b) + T1[c1] + T2[c2].
    """

    @torch.no_grad()
    def __init__(self, decoder: SidMlpDecoder) -> None:
        tokens, embedding = decoder.tokens, decoder.table()
        dim = embedding.shape[1]
        # linear layer, norm, activation, dropout and output layer of each head
        heads: Any = list(decoder.heads)
        weights = [head[0].weight[:, :dim] for head in heads]
        self.z_weight = torch.cat(weights)  # (L * N, D)
        self.z_bias = torch.cat([head[0].bias for head in heads])
        codes = [
            embedding.narrow(0, first, size)
            for first, size in zip(tokens.first, tokens.sizes, strict=True)
        ]
        # the argument `heads` of `kernels.beam_search`
        self.levels: list[tuple[Tensor, ...]] = []
        for level, (layer, norm, *_, output) in enumerate(heads):
            parts = layer.weight.split(dim, 1)[1:]
            # (C_0 + ... + C_(l-1), N): contribution of each earlier code
            rows = [code @ w.T for code, w in zip(codes[:level], parts, strict=True)]
            table = torch.cat(rows) if rows else layer.weight.new_zeros(0)
            weights = [table, norm.weight, norm.bias, output.weight, output.bias]
            for weight in weights:
                check_finite(weight)
            self.levels.append(tuple(weights))
        self.epsilon: float = heads[0][1].eps
