"""Rotary position embedding (RoPE, Su et al., 2023): pairs of channels turn by an angle that grows with the position.

    rope = rotary(position, width)        # once per batch
    q, k = rotate(q, rope), rotate(k, rope)

The product of a turned query and a turned key depends on how far apart they are, not on where they are.

Shapes: `B` rows, `L` positions, `H` heads, `d` width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000.0
"""Channel pair j turns by BASE ** (-2 j / d) radians per position (Sec. 3.3 of RoFormer)."""


def rotary(position: Tensor, width: int) -> Tensor:
    """(2, B, 1, L, d / 2) fp32 cosines and sines for heads of an even `width` = d at `position` (B, L), integers."""
    speed = BASE ** (-torch.arange(0, width, 2, device=position.device, dtype=torch.float32) / width)
    angle = position[:, None, :, None].float() * speed
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """(B, H, L, d) turned by `rope` of `rotary`, in the dtype of `x`; channel j is paired with channel j + d / 2."""
    cosine, sine = rope
    left, right = x.chunk(2, -1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1).to(x.dtype)
