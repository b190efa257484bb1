"""Decoding through `transformers` generate, for comparison with `decoders/t5.py`.

The same model, trie and beam width; the library's own beam search, with its cache or without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.decoders.t5 import T5Decoder
from models.retrieval.search.topk import top_k
from models.retrieval.search.trie import Trie

DEAD = -1e8
"""The library starts all beams but one at -1e9; a score below this never came from the model."""


class TrieProcessor:
    """Sets the scores of tokens that do not continue a prefix of the catalogue to -inf."""

    def __init__(
        self, trie: Trie, first_token: list[int], allowed: Tensor | None
    ) -> None:
        self.trie, self.first_token, self.allowed = trie, first_token, allowed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`input_ids` (B * W, 1 + level): the start token and the codes so far; `scores` (B * W, V)."""
        trie, level = self.trie, input_ids.shape[1] - 1
        node = torch.zeros_like(input_ids[:, 0])
        for depth in range(level):
            node = trie.descend(
                depth, node, input_ids[:, 1 + depth] - self.first_token[depth]
            )
        edge, valid = trie.children_of(level, node.clamp(min=0))
        valid &= (node >= 0)[:, None]
        if self.allowed is not None:
            valid &= self.allowed.split(trie.edges)[level][edge]
        token = torch.where(
            valid, trie.tokens(level)[edge] + self.first_token[level], scores.shape[1]
        )
        allowed = scores.new_zeros(
            (len(scores), scores.shape[1] + 1), dtype=torch.bool
        ).scatter_(1, token, True)
        return scores.masked_fill(~allowed[:, :-1], -torch.inf)


def as_transformers(backbone: T5Backbone, decoder: T5Decoder) -> Any:
    """`transformers.T5ForConditionalGeneration` over these very parameters, in eval mode."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = backbone.sizes
    config = T5Config(  # type: ignore[call-arg]
        vocab_size=sizes.vocabulary,
        d_model=sizes.d_model,
        d_ff=sizes.d_ff,
        num_heads=sizes.num_heads,
        d_kv=sizes.d_kv,
        num_layers=sizes.num_encoder_layers,
        num_decoder_layers=sizes.num_decoder_layers,
        dropout_rate=sizes.dropout,
        relative_attention_num_buckets=sizes.buckets,
        relative_attention_max_distance=sizes.max_distance,
        layer_norm_epsilon=sizes.epsilon,
        feed_forward_proj="relu",
        tie_word_embeddings=True,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    weights = {
        f"encoder.{name}": value for name, value in backbone.encoder.named_parameters()
    }
    weights |= {
        f"decoder.{name}": value for name, value in decoder.stack.named_parameters()
    }
    tied = (
        "shared.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",
    )
    model.load_state_dict(
        weights | dict.fromkeys(tied, backbone.embedding.weight),
        strict=True,
        assign=True,
    )
    return model.eval()


def generate(
    model: Any,
    tokens: Tensor,
    attention_mask: Tensor,
    trie: Trie,
    first_token: list[int],
    k: int,
    beam: int,
    *,
    use_cache: bool,
    constrained: bool,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(items, scores), each (B, k), from a `transformers` encoder-decoder and its input (B, S).

    Unconstrained, any token of the vocabulary may come at any level, also one of another level; tuples of
    no item, or of one that is not `allowed`, are dropped in the end. Items beyond the beam are -1, and a beam of 1 is
    searched as one of 2.
    """
    from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessorList

    # the library makes a cache of as many layers as the encoder has, and the decoder may have more
    cache = (
        {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}
        if use_cache
        else {}
    )
    kept = max(beam, 2)  # generate returns no scores for a single one
    out = model.generate(
        input_ids=tokens,
        attention_mask=attention_mask,
        num_beams=kept,
        num_return_sequences=kept,
        max_new_tokens=trie.levels,
        do_sample=False,
        use_cache=use_cache,
        **cache,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
        logits_processor=LogitsProcessorList(
            [TrieProcessor(trie, first_token, allowed)] if constrained else []
        ),
    )
    first = torch.tensor(first_token, device=tokens.device)
    codes = out.sequences[:, 1:] - first  # without the start token
    in_level = (codes >= 0) & (
        codes < torch.tensor(trie.codebook_sizes, device=tokens.device)
    )
    item = trie.lookup(torch.where(in_level, codes, -1), allowed).view(
        len(tokens), kept
    )
    score = out.sequences_scores.view(len(tokens), kept)
    score = score.masked_fill(
        ((item < 0) | (score < DEAD)) & ~score.isnan(), -torch.inf
    )
    position, score = top_k(score, k)
    item = item.gather(1, position.clamp(min=0))
    return torch.where(score == -torch.inf, -1, item), score
