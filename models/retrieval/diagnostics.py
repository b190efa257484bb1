"""Two looks inside of retrievers of semantic IDs: where an encoder attends, and what decoding without the trie loses.

Shapes: `B` requests, `S` tokens of a history, `W` beams, `L` levels (codes of an item).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.parts import Scorer, padding_mask, real_positions
from models.retrieval.search.topk import select
from models.retrieval.search.trie import Trie


@torch.no_grad()
def attention_received(backbone: T5Backbone, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(layers, B, S): the share of a layer's attention that each position receives, the mean over heads and over all
    positions that ask, 0 at padding; and (B,) how many positions there are (Appendix D.3 of SID-MLP)."""
    tokens, lengths = backbone.inputs(batch)
    real = real_positions(lengths, tokens.shape[1]).unsqueeze(-1)  # (B, S, 1)
    bias = backbone.encoder.position_bias(tokens.shape[1])
    padding = padding_mask(lengths, tokens.shape[1], bias.dtype)
    bias = bias if padding is None else bias + padding
    x, found = functional.embedding(tokens, backbone.table()), []
    for block in backbone.encoder.blocks:
        q, k = block.attention.project(block.norm(0, x), "qk")
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1).mean(1)  # (B, S, S)
        found.append((weights * real).sum(1) / lengths.unsqueeze(1))
        x = block(x, bias, 0.0)
    return torch.stack(found), lengths


@torch.no_grad()
def lost_without_trie(scorer: Scorer, trie: Trie, beam: int) -> Tensor:
    """(B, L) float64: the share of valid codes that a search loses at each level where the catalogue is asked after
    the top `beam` are taken, as by NEZHA's hash set, and not before.

    The beams that stand for a prefix of an item have valid children, of which `beam`, or all where they are fewer,
    could be kept. Those that are not have been displaced by codes that lead to no item. With no such beam left it is 1.
    """
    log_probs = scorer.start().unsqueeze(1)  # (B, W, C_l)
    score = log_probs.new_zeros(log_probs.shape[:2])
    node = torch.zeros_like(score, dtype=torch.long)  # (B, W): where each beam stands in the trie, -1 outside of it
    lost = []
    for level in range(trie.levels):
        offsets = trie.offsets(level)
        children = (offsets[node.clamp(min=0) + 1] - offsets[node.clamp(min=0)]).masked_fill(node < 0, 0).sum(1)
        scores = (score.unsqueeze(-1) + log_probs).flatten(1)
        position = select(scores, min(beam, scores.shape[1]))
        parents, token = position // log_probs.shape[-1], position % log_probs.shape[-1]
        score, node = scores.gather(1, position), trie.descend(level, node.gather(1, parents), token)
        could = children.clamp(max=beam).double()
        kept = (node >= 0).sum(1) / could.clamp(min=1)
        lost.append(1 - kept)
        if level < trie.levels - 1:
            log_probs = scorer.step(parents, token)
    return torch.stack(lost, 1)
