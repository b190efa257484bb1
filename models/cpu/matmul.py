"""Matrix products by oneDNN, for CPUs on which PyTorch's default library is slow.

On AMD processors PyTorch multiplies float32 with MKL, which does not use AVX-512 there.
oneDNN, which PyTorch contains too, is 2.3 times faster on a Zen 5 (267 instead of 119
GFLOP/s per core). PyTorch uses oneDNN for float32 only if the precision of products may
be reduced to bfloat16. On processors without bfloat16 instructions, oneDNN computes in
float32 regardless.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

MAX_RELATIVE_ERROR = 1e-5
"""Maximum error of a float32 product, relative to its largest entry. The error of
bfloat16 is 2e-3."""


@cache
def use_exact_onednn() -> bool:
    """Use oneDNN for float32 products on the CPU if its results are float32.

    The test runs once per process. It compares a product with float64 and restores the
    setting if the error is too large for float32. It does not use the global random
    state. If there is a GPU, nothing is changed, since the setting would affect the
    GPU's products.

    Returns:
        Whether oneDNN is used.
    """
    if torch.cuda.is_available() or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    left = torch.randn((512, 512), generator=generator)
    right = torch.randn((512, 512), generator=generator)
    exact = left.double() @ right.double()
    previous_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    error = float((left @ right - exact).abs().max())
    if error > MAX_RELATIVE_ERROR * float(exact.abs().max()):
        torch.set_float32_matmul_precision(previous_precision)
        return False
    return True


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of float32 products on a GPU within the context.

    Args:
        precision: "highest" for float32, "high" for TF32.
    """
    previous_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous_precision)


class PackedLinear:
    """A linear layer with fixed weights packed for oneDNN, with fused ReLU or addition.

    PyTorch's linear is used if oneDNN does not apply (a GPU, another
    precision) or gradients are needed. Later changes of the weight have no effect.
    """

    def __init__(self, weight: Tensor) -> None:
        """Pack `weight` (out, in)."""
        self.weight = weight.detach()
        self.packed: Tensor | None = None
        on_cpu = (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
        )
        # oneDNN's ReLU turns NaN into 0, which would hide damaged weights
        if on_cpu and bool(self.weight.isfinite().all()):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(
                self.weight.contiguous()
            )

    def __call__(
        self, x: Tensor, relu: bool = False, add: Tensor | None = None
    ) -> Tensor:
        """Return x W' (..., out), followed by ReLU or the addition of `add`.

        Args:
            x: (..., in) inputs.
            relu: Whether to apply ReLU; not allowed with `add`.
            add: (..., out) added to the output, or None.
        """
        if self.packed is None or x.dtype != torch.float32 or not is_plain_inference():
            y = functional.linear(x, self.weight)
            if relu:
                y = y.relu()
            return y if add is None else y + add
        if add is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, add, self.packed, None, "add"
            )
        return torch.ops.mkldnn._linear_pointwise(
            x, self.packed, None, "relu" if relu else "none", [], ""
        )


def is_plain_inference() -> bool:
    """Return whether CPU operations run without gradients and autocast."""
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
