"""Decoding by `generate` of `transformers`, as a baseline for `decoders/t5.py`.

Model, trie and number of beams are the same; beam search and cache are the library's.

Shapes: `B` requests, `W` beams, `S` tokens of a history, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.decoders.t5 import T5Decoder
from models.retrieval.search.topk import top_k
from models.retrieval.search.trie import Trie

MIN_MODEL_SCORE = -1e8
"""Lowest score that the model can give: the library starts all beams but one at
-1e9."""


class TrieProcessor:
    """A logits processor that keeps decoding within the trie of the catalogue."""

    def __init__(
        self, trie: Trie, first_token: list[int], allowed: Tensor | None
    ) -> None:
        """Build the processor; the arguments are as in `generate`."""
        self.trie = trie
        self.first_token = first_token
        self.allowed = allowed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Set the scores of tokens that continue no prefix of the catalogue to -inf.

        Args:
            input_ids: (B * W, 1 + level) start token and codes so far.
            scores: (B * W, V) scores of the next token.
        """
        trie, level = self.trie, input_ids.shape[1] - 1
        rows, vocabulary = scores.shape
        node = torch.zeros_like(input_ids[:, 0])
        for depth in range(level):
            code = input_ids[:, 1 + depth] - self.first_token[depth]
            node = trie.descend(depth, node, code)
        edge, valid = trie.get_children(level, node.clamp(min=0))
        valid &= (node >= 0)[:, None]
        if self.allowed is not None:
            valid &= self.allowed.split(trie.edges)[level][edge]
        token = trie.tokens(level)[edge] + self.first_token[level]
        # invalid edges mark an extra column
        token = torch.where(valid, token, vocabulary)
        is_child = scores.new_zeros((rows, vocabulary + 1), dtype=torch.bool)
        is_child.scatter_(1, token, True)
        return scores.masked_fill(~is_child[:, :-1], -torch.inf)


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


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `generate`."""

    k: int
    """Number of items."""
    beam: int
    """Number of beams."""
    use_cache: bool
    """Whether to cache keys and values."""
    constrained: bool
    """Whether beams stay within the trie."""
    allowed: Tensor | None = None
    """Mask (E,) of the edges that lead to allowed items, as in `beam_search`."""


def generate(
    model: Any,
    tokens: Tensor,
    attention_mask: Tensor,
    trie: Trie,
    first_token: list[int],
    options: GenerateOptions,
) -> tuple[Tensor, Tensor]:
    """Recommend items with the library's beam search.

    If not `constrained`, every level may generate any token of the vocabulary, and
    tuples without an (allowed) item are dropped at the end. At most `beam` items are
    found; the tail is item -1. One beam is searched as two.

    Args:
        model: Encoder-decoder from `to_transformers`.
        tokens: (B, S) input tokens.
        attention_mask: (B, S) mask of real tokens.
        trie: Trie of the catalogue.
        first_token: First token of each level.
        options: Options of the search.

    Returns:
        Items and scores, (B, k) both.
    """
    from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessorList

    cache = {}
    if options.use_cache:
        # the default cache has the encoder's number of layers, and the decoder may
        # have more
        layers = EncoderDecoderCache(DynamicCache(), DynamicCache())
        cache = {"past_key_values": layers}
    processors = []
    if options.constrained:
        processors.append(TrieProcessor(trie, first_token, options.allowed))
    num_beams = max(options.beam, 2)  # generate returns no scores for a single beam
    output = model.generate(
        input_ids=tokens,
        attention_mask=attention_mask,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=trie.levels,
        do_sample=False,
        use_cache=options.use_cache,
        **cache,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
        logits_processor=LogitsProcessorList(processors),
    )
    first = torch.tensor(first_token, device=tokens.device)
    sizes = torch.tensor(trie.codebook_sizes, device=tokens.device)
    codes = output.sequences[:, 1:] - first  # without the start token
    codes = torch.where((codes >= 0) & (codes < sizes), codes, -1)
    item = trie.lookup(codes, options.allowed).view(len(tokens), num_beams)
    score = output.sequences_scores.view(len(tokens), num_beams)
    is_dropped = (item < 0) | (score < MIN_MODEL_SCORE)
    # NaN stays visible
    score = score.masked_fill(is_dropped & ~score.isnan(), -torch.inf)
    position, score = top_k(score, options.k)
    item = item.gather(1, position.clamp(min=0))
    return torch.where(score == -torch.inf, -1, item), score
