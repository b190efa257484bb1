"""T5's decoder: TIGER's, and with one layer the student of Tables 1, 2, 8 and 9 of SID-MLP.

Shapes: `B` requests, `L` levels, `D` width, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from models.cpu.derived import derived
from models.layers.t5 import Stack, T5Sizes
from models.retrieval.decoders.t5_scorer import PackedDecoder, SharedKV
from models.retrieval.parts import Decoder, History, SidTokens


class T5Decoder(Decoder):
    """Blocks over the embeddings of the tokens, which are the output layer too and belong to the backbone."""

    def __init__(
        self, tokens: SidTokens, sizes: T5Sizes, embedding: nn.Embedding, *, layers: int | None = None,
        self_attention: bool = True, cross_attention: bool = True, codebook_logits: bool = False,
        codebook_scores: bool = False,
    ) -> None:  # fmt: skip
        """`layers` in place of those of `sizes`; each attention can be left out; with `codebook_logits` the logits of a
        level are of its codes, else of the whole vocabulary; with `codebook_scores` log-probabilities in search are
        normalised over the level's codes, else over the whole vocabulary, as `transformers` does."""
        super().__init__()
        self.tokens = tokens
        self.stack = Stack(sizes if layers is None else replace(sizes, num_decoder_layers=layers), decoder=True)
        for block in self.stack.blocks:
            block.drop(not self_attention, not cross_attention)
        self.codebook_logits, self.codebook_scores, self.hidden_width = codebook_logits, codebook_scores, sizes.d_model
        self._embedding = (embedding,)  # the backbone's, no submodule here

    @property
    def embedding(self) -> nn.Embedding:
        return self._embedding[0]

    def span(self, level: int) -> tuple[int, int]:
        return super().span(level) if self.codebook_logits else (0, self.tokens.vocabulary)

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """(B, L, D): states of the decoder, all codes at once."""
        return self.states(history, self.tokens.started(codes))

    def states(self, history: History, given: Tensor) -> Tensor:
        """(B, T, D): states of the decoder after the tokens `given` (B, T)."""
        bias = self.stack.position_bias(given.shape[1]) if self.stack.blocks[0].has_attention else None
        dropout_p = self.stack.sizes.dropout if self.training else 0.0
        return self.stack(self.embedding(given), bias, dropout_p, history.states, history.padding)

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        """Scaled as T5 does where embeddings are tied."""
        scaled = hidden * self.stack.sizes.d_model**-0.5
        if not self.codebook_logits:
            return functional.linear(scaled, self.embedding.weight).unbind(1)
        spans = map(self.span, range(self.tokens.levels))
        return [
            functional.linear(scaled[:, level], self.embedding.weight.narrow(0, *span))
            for level, span in enumerate(spans)
        ]

    def packed(self) -> PackedDecoder:
        """The weights as they are now, kept until they change."""
        return derived(self, "packed_decoder", lambda: PackedDecoder(self.embedding, self.stack), self.embedding)

    def scorer(self, history: History) -> SharedKV:
        return SharedKV(self.packed(), history, self.tokens, vocabulary=not self.codebook_scores)
