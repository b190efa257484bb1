"""The per-digit MLP heads of SID-MLP (equation 2), and the other ways to show them the prefix (Table 5, G1).

Shapes: `B` users, `W` prefixes of a user, `D` width, `N` hidden width of a head, `C` outputs.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from models.retrieval.sid_mlp_config import SidMlpConfig


def make_heads(config: SidMlpConfig, sizes: list[int], dim: int, vocabulary: int) -> nn.ModuleList:
    """f_t of each digit (with `shared_head` the same one), none where the teacher generates the digit."""

    def make(level: int) -> nn.Sequential:
        inputs = {
            "concat": (level + 1) * dim,
            "none": dim,
            "sum": 2 * dim,
            "cascade": dim + config.head_width if level else dim,
        }[config.prefix]
        outputs = max(sizes) if config.shared_head else sizes[level]
        return nn.Sequential(
            nn.Linear(inputs, config.head_width),
            nn.LayerNorm(config.head_width),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.head_width, vocabulary if config.logits == "vocabulary" else outputs),
        )

    if config.shared_head:
        return nn.ModuleList([make(0)] * len(sizes))
    return nn.ModuleList(nn.Identity() if level < config.m else make(level) for level in range(len(sizes)))


def predict(heads: nn.ModuleList, prefix: str, z: Tensor, given: Tensor) -> Tensor:
    """(B, W, C): outputs of the next digit's head for z (B, W, D) and the embedded prefix `given` (B, W, t, D), which
    it is shown as `prefix` says (`SidMlpConfig.prefix`)."""
    level = given.shape[2]
    if prefix == "concat":
        z = torch.cat([z, given.flatten(2)], -1)
    elif prefix == "sum":
        z = torch.cat([z, given.sum(2)], -1)
    elif prefix == "cascade":  # (B, W, N + D) after the first digit: the last hidden activation, the newest code
        for head, newest in zip(list(heads)[:level], given.unbind(2), strict=True):
            z = torch.cat([cast(nn.Sequential, head)[:-1](z), newest], -1)
    return heads[level](z)
