"""A causal language model from `transformers` that reads a prompt with the history.

The codes of the history are additional tokens of the language model. The codes'
embeddings are always trained and saved, also with LoRA. Rows are padded on the right;
attention is causal, so no state depends on padding.

Shapes: `B` requests, `T` items and `S` tokens of the longest prompt, `L` levels (codes
of an item), `D` width, `V` words of the language model.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.dataset.batch import PAD
from models.retrieval.data import HistoryBatch
from models.retrieval.retriever import Backbone, History, Memory, SidTokens

Segment = tuple[Tensor, Tensor]
"""Tokens (B, n), and a mask (B, n) of the tokens that are not padding."""


def full_segment(tokens: Tensor) -> Segment:
    """Return a segment of tokens (B, n) without padding."""
    return tokens, torch.ones_like(tokens, dtype=torch.bool)


def concat_segments(segments: list[Segment]) -> Segment:
    """Concatenate segments and move all padding to the end of the rows.

    Returns:
        Tokens (B, S), 0 at padding, and the number of tokens of each row (B,).
    """
    tokens = torch.cat([tokens for tokens, _ in segments], 1)
    is_real = torch.cat([is_real for _, is_real in segments], 1)
    order = is_real.logical_not().long().argsort(dim=1, stable=True)
    tokens = torch.where(is_real, tokens, 0).gather(1, order)
    return tokens, is_real.sum(1)


class LmBackbone(Backbone):
    """A language model whose vocabulary of V words is extended by `SidTokens`."""

    before: Tensor
    """Words before a history."""
    between: Tensor
    """Words between two items of a history."""
    after: Tensor
    """Words after a history."""

    def __init__(
        self,
        tokens: SidTokens,
        lm: nn.Module,
        prompt: dict[str, list[int]],
        max_history: int,
    ) -> None:
        """Build the backbone.

        Args:
            tokens: Tokens of the semantic IDs.
            lm: Causal language model from `transformers`.
            prompt: Word tokens `before` and `after` a history and `between` its items.
            max_history: Most items of a history.
        """
        super().__init__()
        self.tokens = tokens
        self.lm = lm
        self.max_history = max_history
        words = self.words()
        self.vocabulary, width = words.weight.shape
        self.embedding = nn.Embedding(tokens.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # as in `transformers`
        for name in ("before", "between", "after"):
            self.register_buffer(
                name, torch.tensor(prompt[name], dtype=torch.long), persistent=False
            )

    def words(self) -> nn.Embedding:
        """Return the word embeddings (V, D)."""
        return cast(Any, self.lm).get_input_embeddings()

    def no_decay_parameters(self) -> list[nn.Parameter]:
        """Return the norms and biases, which have no weight decay in LC-Rec."""
        return [parameter for parameter in self.lm.parameters() if parameter.ndim == 1]

    def table(self) -> Tensor:
        """Return the embeddings (rows, D) of the tokens from V on."""
        return self.embedding.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (..., D) of words and codes (...)."""
        is_code = tokens >= self.vocabulary
        words = self.words()(tokens.clamp(max=self.vocabulary - 1))
        code = (tokens - self.vocabulary).clamp(min=0)
        codes = functional.embedding(code, self.table())
        return torch.where(is_code.unsqueeze(-1), codes, words)

    def item_tokens(self, items: Tensor) -> Tensor:
        """Return the tokens (..., L) of the codes of `items` (...)."""
        return self.vocabulary + self.tokens.items[items.clamp(min=0)]

    def surround(self, before: Tensor, middle: Segment, after: Tensor) -> list[Segment]:
        """Return the segments of a prompt with tokens (n,) around an input (B, m)."""
        rows = len(middle[0])
        before, after = before.expand(rows, -1), after.expand(rows, -1)
        return [full_segment(before), middle, full_segment(after)]

    def history_tokens(self, batch: HistoryBatch) -> Segment:
        """Return the codes of each history, with the tokens `between` items.

        With n tokens `between`, the segment is (B, T * (L + n)) for histories (B, T).
        The tokens after the last item are padding.
        """
        history = batch.history
        codes = self.item_tokens(history)  # (B, T, L)
        between = self.between.expand(*history.shape, -1)
        is_item = (history != PAD).unsqueeze(-1)  # (B, T, 1)
        has_next = functional.pad(is_item[:, 1:], (0, 0, 0, 1))
        tokens = torch.cat([codes, between], 2)
        is_real = torch.cat([is_item.expand_as(codes), has_next.expand_as(between)], 2)
        return tokens.flatten(1), is_real.flatten(1)

    def prompts(self, batch: HistoryBatch) -> list[Segment]:
        """Return the segments of the prompt of each request."""
        return self.surround(self.before, self.history_tokens(batch), self.after)

    def inputs(self, batch: HistoryBatch) -> Segment:
        """Return the tokens (B, S) of the prompts and their lengths (B,)."""
        tokens, lengths = concat_segments(self.prompts(batch))
        # `history_tokens` has words after the last item, too, which are always padding
        unused = len(self.between) if batch.history.shape[1] else 0
        return tokens[:, : tokens.shape[1] - unused], lengths

    def locate_history(self, history: History) -> tuple[slice, Tensor]:
        """Locate the codes of the history within the prompts.

        Returns:
            The slice of n positions between the prompt's first and last words, and a
            mask (B, n) of the codes among them.
        """
        end = history.states.shape[1] - len(self.after)
        index = torch.arange(end - len(self.before), device=history.lengths.device)
        lengths = history.lengths - len(self.before) - len(self.after)
        levels = self.tokens.levels
        is_code = index % (levels + len(self.between)) < levels
        inside = index < lengths.unsqueeze(1)
        return slice(len(self.before), end), is_code & inside

    def run(
        self, embedded: Tensor, memory: Memory | None = None, **options: Any
    ) -> tuple[Tensor, Memory]:
        """Run the language model.

        Args:
            embedded: (B, S, D) embedded tokens.
            memory: Keys and values of the tokens before `embedded`, or None.
            options: Further arguments of the language model.

        Returns:
            Last states (B, S, D), and the keys and values of each layer.
        """
        from transformers.cache_utils import DynamicCache, DynamicLayer

        # a pass creates new tensors for its keys and values, so many searches can start
        # from one prompt
        cache = DynamicCache()
        for keys, values in memory or ():
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        output = cast(Any, self.lm).base_model(
            inputs_embeds=embedded, past_key_values=cache, use_cache=True, **options
        )
        layers: Any = cache.layers
        return output.last_hidden_state, [
            (layer.keys, layer.values) for layer in layers
        ]

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states of the prompts with their keys and values.

        The query is the state of the last word.
        """
        tokens, lengths = self.inputs(batch)
        states, memory = self.run(self.embed(tokens))
        query = states.take_along_dim((lengths - 1)[:, None, None], 1)[:, 0]
        return History(states, lengths, query, memory)
