"""Weights prepared for fast inference: cached folded matrices, and products by oneDNN.

On AMD processors PyTorch multiplies float32 with MKL, which does not use AVX-512 there.
oneDNN, which PyTorch contains too, is 2.3 times faster on a Zen 5 (267 instead of 119
GFLOP/s per core). PyTorch uses oneDNN for float32 only if the precision of products may
be reduced to bfloat16. On processors without bfloat16 instructions, oneDNN computes in
float32 regardless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

T = TypeVar("T")

# each parameter, its storage, and its version (the number of in-place changes)
Weights = list[tuple[Tensor, Tensor, int]]

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


class DerivedCache(nn.Module):
    """Cached values of a module, with no parameters and an empty state dict.

    Copies and pickles of the module are empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, tuple[Weights, Any]] = {}

    def train(self, mode: bool = True) -> Self:
        """Clear the cache.

        PyTorch counts in-place changes of a tensor, but not changes by a fused
        optimizer. Training calls this method after each such change.
        """
        self.entries = {}
        return super().train(mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> DerivedCache:
        return DerivedCache()

    def __reduce__(self) -> tuple[type[DerivedCache], tuple[()]]:
        return DerivedCache, ()


def cache_until_changed(
    owner: nn.Module, name: str, make: Callable[[], T], *others: nn.Module
) -> T:
    """Return the result of `make`, cached in `owner` until a parameter changes.

    The value is computed again after a call of `owner.train()` or `owner.eval()`, and
    after a parameter of `owner` or `others` was changed in place or moved. Other
    changes need such a call: changes that PyTorch does not count (by a fused optimizer
    or through `.data`), and the replacement of a parameter.

    Args:
        owner: Module that the value belongs to.
        name: Name of the value.
        make: Function that computes the value from the weights.
        others: Other modules whose parameters the value depends on.
    """
    if "derived" not in owner._modules:
        owner.add_module("derived", DerivedCache())
    entries = cast(DerivedCache, owner.derived).entries
    # versions of parameters cannot be traced
    if torch.compiler.is_compiling() and name in entries:
        return cast(T, entries[name][1])
    if name not in entries or _have_changed(entries[name][0]):
        # the entry keeps the storage alive, so that no new parameter reuses its address
        weights: Weights = []
        for module in (owner, *others):
            weights += [(p, p.detach(), _version(p)) for p in module.parameters()]
        # models fitted by counting have no parameters
        device = weights[0][0].device.type if weights else "cpu"
        precision = matmul_precision("highest") if device == "cuda" else nullcontext()
        # cached values have the precision of the weights
        with torch.autocast(device, enabled=False), precision:
            entries[name] = weights, make()
    return cast(T, entries[name][1])


def _have_changed(weights: Weights) -> bool:
    """Return whether a parameter was changed or moved since `weights` was recorded."""
    return any(
        p.data_ptr() != storage.data_ptr() or not 0 <= version == _version(p)
        for p, storage, version in weights
    )


def _version(parameter: Tensor) -> int:
    """Return the number of in-place changes, or -1 for an inference tensor."""
    return -1 if parameter.is_inference() else parameter._version
