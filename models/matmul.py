"""Matrix products on CPUs whose vendor's library is not the one torch takes for float32.

On AMD processors torch multiplies float32 with MKL, which leaves AVX-512 aside there; oneDNN, which comes
with torch as well, is 2.3 times faster on a Zen 5 (119 and 267 GFLOP/s a core). Torch hands float32 to
oneDNN only where bfloat16 may be used inside. Where the processor has no instructions for that, oneDNN
stays in float32 all the same.
"""

from __future__ import annotations

from functools import cache

import torch

TOLERANCE = 1e-5
"""Largest error of a product, relative to its largest entry, that counts as float32 (bfloat16: 2e-3)."""


@cache
def use_exact_onednn() -> bool:
    """Turns oneDNN on for float32 products on the CPU if its results are those of float32.

    Tried once per process: a product is compared with float64, and the setting put back if bfloat16
    shows. Draws from no global random state. Does nothing where there is a GPU, whose products the setting
    would change too. Returns whether it is on.
    """
    if torch.cuda.is_available() or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn((512, 512), generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    error = float((left @ right - exact).abs().max())
    if error > TOLERANCE * float(exact.abs().max()):
        torch.set_float32_matmul_precision(before)
        return False
    return True
