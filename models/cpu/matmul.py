"""Matrix products on CPUs whose vendor's library is not the one torch takes for float32.

On AMD processors torch multiplies float32 with MKL, which leaves AVX-512 aside there; oneDNN, which comes
with torch as well, is 2.3 times faster on a Zen 5 (119 and 267 GFLOP/s a core). Torch hands float32 to
oneDNN only where bfloat16 may be used inside. Where the processor has no instructions for that, oneDNN
stays in float32 all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

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


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Meanwhile float32 is multiplied on a GPU in full (`highest`), or rounded to TF32 (`high`)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Packed:
    """A product with a fixed weight, laid out for oneDNN once, with the ReLU or the addition that follows it done
    while its results are at hand. Where oneDNN does not apply (a GPU, another precision, an exported program), or
    gradients are wanted, it is PyTorch's linear. Later changes of the weight are not seen."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` (out, in), `bias` (out,)."""
        self.weight, self.bias = (
            weight.detach(),
            None if bias is None else bias.detach(),
        )
        self.packed: Tensor | None = None
        on_cpu = (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
        )
        # oneDNN's ReLU makes 0 of NaN, and nobody would see that a weight is none
        if on_cpu and all(
            bool(part.isfinite().all())
            for part in (self.weight, self.bias)
            if part is not None
        ):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(
                self.weight.contiguous()
            )

    def __call__(
        self, x: Tensor, relu: bool = False, add: Tensor | None = None
    ) -> Tensor:
        """x W' + b (..., out) of x (..., in), then ReLU if `relu`, or plus `add` (..., out)."""
        if self.packed is None or x.dtype != torch.float32 or not plain_inference():
            y = functional.linear(x, self.weight, self.bias)
            y = y.relu() if relu else y
            return y if add is None else y + add
        if add is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, add, self.packed, self.bias, "add"
            )
        return torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "relu" if relu else "none", [], ""
        )


def plain_inference() -> bool:
    """Whether what is computed on a CPU now is float32 without gradients, and not being traced to be exported."""
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
    )
