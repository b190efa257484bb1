"""Decoding by `generate` of `transformers`, to compare with `tiger/decoder.py`.

    library = to_transformers(tiger)
    items, scores = generate(tiger, library, batch, k=10, beam=50)

Weights, trie and number of beams are the same; beam search and cache are the library's.

Shapes: `B` requests, `W` beams, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.retrieval.data import HistoryBatch
from models.retrieval.retriever import real_positions
from models.retrieval.search import top_k
from models.retrieval.tiger.tiger import Tiger

MIN_MODEL_SCORE = -1e8
"""Lowest score that the model can give: the library starts all beams but one at
-1e9."""


def to_transformers(tiger: Tiger) -> Any:
    """Return a `transformers.T5ForConditionalGeneration` that shares the parameters."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = tiger.backbone.sizes
    config = T5Config(  # type: ignore[call-arg]
        vocab_size=tiger.tokens.vocabulary,
        d_model=sizes.d_model,
        d_ff=sizes.d_ff,
        num_heads=sizes.num_heads,
        d_kv=sizes.d_kv,
        num_layers=sizes.num_encoder_layers,
        num_decoder_layers=sizes.num_decoder_layers,
        dropout_rate=sizes.dropout,
        feed_forward_proj="relu",
        tie_word_embeddings=True,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    embedding = tiger.backbone.embedding.weight
    weights = {"shared.weight": embedding, "lm_head.weight": embedding}
    stacks = {"encoder": tiger.backbone.encoder, "decoder": tiger.decoder.stack}
    for prefix, stack in stacks.items():
        weights[f"{prefix}.embed_tokens.weight"] = embedding
        for name, value in stack.named_parameters():
            weights[f"{prefix}.{name}"] = value
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval()


def encoder_inputs(tiger: Tiger, batch: HistoryBatch) -> tuple[Tensor, Tensor]:
    """Return the tokens of the histories and an int64 mask of them, (B, S) both."""
    tokens, lengths = tiger.backbone.inputs(batch)
    return tokens, real_positions(lengths, tokens.shape[1]).long()


@torch.no_grad()
def generate(
    tiger: Tiger,
    library: Any,
    batch: HistoryBatch,
    k: int,
    beam: int,
    use_cache: bool = True,
) -> tuple[Tensor, Tensor]:
    """Recommend items with the library's beam search within the trie.

    At most `beam` items are found; the tail is item -1.

    Args:
        tiger: The model.
        library: Result of `to_transformers`.
        batch: Histories of B requests.
        k: Number of items.
        beam: Number of beams, at least 2: for one, `generate` returns no scores.
        use_cache: Whether to cache keys and values.

    Returns:
        Items and scores, (B, k) both.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    trie, first_token = tiger.trie, tiger.tokens.first

    def drop_other_tokens(input_ids: Tensor, scores: Tensor) -> Tensor:
        """Set the scores (B * W, V) of tokens that continue no prefix to -inf."""
        level = input_ids.shape[1] - 1  # input_ids start with T5's start token
        node = torch.zeros_like(input_ids[:, 0])
        for depth in range(level):
            code = input_ids[:, 1 + depth] - first_token[depth]
            node = trie.descend(depth, node, code)
        edge, valid = trie.get_children(level, node.clamp(min=0))
        valid &= (node >= 0)[:, None]
        token = trie.tokens(level)[edge] + first_token[level]
        # invalid edges mark an extra column
        token = torch.where(valid, token, scores.shape[1])
        is_child = torch.zeros_like(scores[:, :1], dtype=torch.bool)
        is_child = is_child.repeat(1, scores.shape[1] + 1).scatter_(1, token, True)
        return scores.masked_fill(~is_child[:, :-1], -torch.inf)

    cache = {}
    if use_cache:
        # the default cache has the encoder's number of layers, and the decoder may
        # have more
        layers = EncoderDecoderCache(DynamicCache(), DynamicCache())
        cache = {"past_key_values": layers}
    tokens, mask = encoder_inputs(tiger, batch)
    output = library.generate(
        input_ids=tokens,
        attention_mask=mask,
        num_beams=beam,
        num_return_sequences=beam,
        max_new_tokens=trie.levels,
        do_sample=False,
        use_cache=use_cache,
        **cache,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
        logits_processor=[drop_other_tokens],
    )
    codes = output.sequences[:, 1:] - torch.tensor(first_token, device=tokens.device)
    sizes = torch.tensor(trie.codebook_sizes, device=tokens.device)
    codes = torch.where((codes >= 0) & (codes < sizes), codes, -1)
    item = trie.lookup(codes).view(len(tokens), beam)
    score = output.sequences_scores.view(len(tokens), beam)
    score = score.masked_fill((item < 0) | (score < MIN_MODEL_SCORE), -torch.inf)
    position, score = top_k(score, k)
    item = item.gather(1, position.clamp(min=0))
    return torch.where(score == -torch.inf, -1, item), score
