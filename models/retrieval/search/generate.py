"""Decoding through `transformers` generate, as a baseline of `decoders/t5.py`.

Same model, trie and beam width, with the library's beam search and cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.decoders.t5 import T5Decoder
from models.retrieval.search.topk import top_k
from models.retrieval.search.trie import Trie

MIN_MODEL_SCORE = -1e8
"""Scores below are not from the model: the library starts all beams but one at -1e9."""


class TrieProcessor:
    """Set scores of tokens that continue no prefix of the catalogue to -inf."""

    def __init__(
        self, trie: Trie, first_token: list[int], allowed: Tensor | None
    ) -> None:
        self.trie, self.first_token, self.allowed = trie, first_token, allowed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask the scores of the next token.

        Args:
            input_ids: (B * W, 1 + level) start token and codes so far.
            scores: (B * W, V) scores of the next token.
        """
        trie, level = self.trie, input_ids.shape[1] - 1
        node = torch.zeros_like(input_ids[:, 0])
        for depth in range(level):
            node = trie.descend(
                depth, node, input_ids[:, 1 + depth] - self.first_token[depth]
            )
        edge, valid = trie.get_children(level, node.clamp(min=0))
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


def to_transformers(backbone: T5Backbone, decoder: T5Decoder) -> Any:
    """Return a `transformers.T5ForConditionalGeneration` that shares the parameters.

    The model is in eval mode.
    """
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
    """Recommend items with the library's beam search.

    Without constraints, any token of the vocabulary may come at any level; tuples
    without an (allowed) item are dropped at the end. Items beyond the beam are -1, and
    a beam of 1 is searched as a beam of 2.

    Args:
        model: Encoder-decoder from `to_transformers`.
        tokens: (B, S) input tokens.
        attention_mask: (B, S) mask of real tokens.
        trie: Trie of the catalogue.
        first_token: First token of each level.
        k: Number of items.
        beam: Number of beams.
        use_cache: Whether to cache keys and values.
        constrained: Whether to follow the trie.
        allowed: As in `beam_search`.

    Returns:
        Items and scores, (B, k) both.
    """
    from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessorList

    cache = {}
    if use_cache:
        # the default cache has the encoder's number of layers; the decoder may have
        # more
        layers = EncoderDecoderCache(DynamicCache(), DynamicCache())
        cache = {"past_key_values": layers}
    num_beams = max(beam, 2)  # generate returns no scores for a single beam
    out = model.generate(
        input_ids=tokens,
        attention_mask=attention_mask,
        num_beams=num_beams,
        num_return_sequences=num_beams,
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
        len(tokens), num_beams
    )
    score = out.sequences_scores.view(len(tokens), num_beams)
    score = score.masked_fill(
        ((item < 0) | (score < MIN_MODEL_SCORE)) & ~score.isnan(), -torch.inf
    )
    position, score = top_k(score, k)
    item = item.gather(1, position.clamp(min=0))
    return torch.where(score == -torch.inf, -1, item), score
