"""A causal language model of `transformers` as a backbone: it reads an instruction prompt with the history's codes.

The codes are tokens beside the words of the language model, with embeddings of their own, which are trained and saved
whatever of the language model itself is. Rows are padded behind: as attention is causal, no state depends on padding.

Shapes: `B` requests, `T` items and `S` tokens of the longest prompt, `L` levels (codes of an item), `D` width,
`V` words of the language model.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.retrieval.data import PAD
from models.retrieval.parts import Backbone, History, Memory, SidTokens

Segment = tuple[Tensor, Tensor]
"""((B, n) tokens, (B, n) which of them are there)."""


def joined(segments: list[Segment]) -> Segment:
    """((B, S) the segments' tokens one after the other, 0 behind them; (B,) their number)."""
    tokens, there = (torch.cat(parts, 1) for parts in zip(*segments, strict=True))
    order = there.logical_not().long().argsort(dim=1, stable=True)
    tokens = torch.where(there, tokens, 0).gather(1, order)
    return tokens, there.sum(1)


class LmBackbone(Backbone):
    """The language model with the semantic IDs' tokens. Token t of `SidTokens` is `V + t` beside the words."""

    gives_query = True
    before: Tensor
    between: Tensor
    after: Tensor

    def __init__(
        self,
        tokens: SidTokens,
        lm: nn.Module,
        prompt: dict[str, list[int]],
        max_history: int,
    ) -> None:
        """`lm` is a causal language model of `transformers`; `prompt` has the words before and after a history and
        between its items."""
        super().__init__()
        self.tokens, self.lm, self.max_history = tokens, lm, max_history
        words = self.words()
        self.vocabulary, width = words.weight.shape
        self.embedding = nn.Embedding(tokens.vocabulary, width)
        nn.init.normal_(
            self.embedding.weight, std=0.02
        )  # as `transformers` starts its own
        for name in ("before", "between", "after"):
            self.register_buffer(
                name, torch.tensor(prompt[name], dtype=torch.long), persistent=False
            )

    def words(self) -> nn.Embedding:
        """(V, D): embeddings of the words."""
        return cast(Any, self.lm).get_input_embeddings()

    def no_decay_parameters(self) -> list[nn.Parameter]:
        """Norms and biases of the language model, whose weights LC-Rec's training does not decay (`transformers`)."""
        return [parameter for parameter in self.lm.parameters() if parameter.ndim == 1]

    def table(self) -> Tensor:
        """Embeddings of the tokens beside the words."""
        return self.embedding.weight

    def shape(self) -> tuple[int, int]:
        """(layers, width of the keys of all heads)."""
        with torch.no_grad():
            memory = self.run(self.words().weight[:1].unsqueeze(0))[1]
        return len(memory), memory[0][0].shape[1] * memory[0][0].shape[3]

    def embed(self, tokens: Tensor) -> Tensor:
        """(..., D) of words and codes."""
        of_words = self.words()(tokens.clamp(max=self.vocabulary - 1))
        of_codes = functional.embedding(
            (tokens - self.vocabulary).clamp(min=0), self.table()
        )
        return torch.where(
            (tokens >= self.vocabulary).unsqueeze(-1), of_codes, of_words
        )

    def item_tokens(self, items: Tensor) -> Tensor:
        """(..., L): tokens of the items' codes."""
        return self.vocabulary + self.tokens.items[items.clamp(min=0)]

    def response(self, items: Tensor) -> Segment:
        """The codes of `items` (B,) as they are read or written one by one."""
        tokens = self.item_tokens(items)
        return tokens, torch.ones_like(tokens, dtype=torch.bool)

    def constant(self, words: Tensor, like: Tensor) -> Segment:
        """The same words in each row of a batch as large as `like` (B, ...)."""
        tokens = words.expand(len(like), -1)
        return tokens, torch.ones_like(tokens, dtype=torch.bool)

    def history_tokens(self, batch: dict[str, Tensor]) -> Segment:
        """The codes of each history, item after item, with what stands between them."""
        history = batch["history"]
        codes = self.item_tokens(history)  # (B, T, L)
        between = self.between.expand(*history.shape, -1)
        there = (history != PAD).unsqueeze(-1)
        another = functional.pad(there[:, 1:], (0, 0, 0, 1))  # whether an item follows
        tokens = torch.cat([codes, between], 2).flatten(1)
        real = torch.cat(
            [there.expand_as(codes), another.expand_as(between)], 2
        ).flatten(1)
        return tokens, real

    def prompts(self, batch: dict[str, Tensor]) -> list[Segment]:
        """The prompt of each request."""
        history = batch["history"]
        return [
            self.constant(self.before, history),
            self.history_tokens(batch),
            self.constant(self.after, history),
        ]

    def inputs(self, batch: dict[str, Tensor]) -> Segment:
        """((B, S) tokens of the prompts, (B,) how many of each)."""
        tokens, lengths = joined(self.prompts(batch))
        behind = (
            len(self.between) if batch["history"].shape[1] else 0
        )  # nothing stands behind the last item
        return tokens[:, : tokens.shape[1] - behind], lengths

    def of_history(self, history: History) -> tuple[slice, Tensor]:
        """Positions of prompts among which those of the history are, and (B, n) which of them are its codes."""
        longest = history.states.shape[1] - len(self.after)
        place = torch.arange(longest - len(self.before), device=history.lengths.device)
        lengths = history.lengths - len(self.before) - len(self.after)
        code = place % (self.tokens.levels + len(self.between)) < self.tokens.levels
        return slice(len(self.before), longest), code & (place < lengths.unsqueeze(1))

    def run(
        self, embedded: Tensor, memory: Memory | None = None, **given: Any
    ) -> tuple[Tensor, Memory]:
        """((B, S, D) last states, keys and values of each layer) of `embedded` (B, S, D), which goes on from
        `memory`."""
        from models.retrieval.backbones.lm_cache import (
            cache_of,
            memory_of,
        )  # loads transformers

        cache = cache_of(memory)
        found = cast(Any, self.lm).base_model(
            inputs_embeds=embedded, past_key_values=cache, use_cache=True, **given
        )
        return found.last_hidden_state, memory_of(cache)

    def encode(self, batch: dict[str, Tensor]) -> History:
        """States (B, S, D) of the prompts, the last one's as query."""
        tokens, lengths = self.inputs(batch)
        states, memory = self.run(self.embed(tokens))
        query = states.take_along_dim((lengths - 1)[:, None, None], 1)[:, 0]
        return History(states, lengths, query, memory)
