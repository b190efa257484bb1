"""The compiled kernels equal PyTorch, and results do not depend on them."""

from __future__ import annotations

import shutil
from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from models.cpu import kernels
from models.cpu.weights import MAX_RELATIVE_ERROR, PackedLinear

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None,
    reason="there is no C++ compiler to build the kernels with",
)


def load_library() -> CDLL | None:
    """Load the kernels as a new process does."""
    return kernels.library.__wrapped__()


def draw_normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return normally distributed numbers with a standard deviation of `scale`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@needs_compiler
def test_the_library_is_built_once(monkeypatch, tmp_path):
    # an empty kernel, which compiles quickly
    monkeypatch.setattr(kernels, "SOURCE", 'extern "C" void scaled_rows() {}')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_library() is not None
    (library,) = (tmp_path / "trieline").iterdir()
    assert (tmp_path / "trieline").stat().st_mode & 0o777 == 0o700

    monkeypatch.setenv("PATH", "")
    assert load_library() is not None
    assert list((tmp_path / "trieline").iterdir()) == [library]

    (tmp_path / "trieline").chmod(0o777)
    with pytest.warns(UserWarning, match="only this user can write to"):
        assert load_library() is None


@pytest.mark.parametrize(
    "command", ["/nonexistent/x", '"unbalanced', shutil.which("false")]
)
def test_a_broken_compiler_gives_a_warning_of_one_line(command, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", command)
    with pytest.warns(UserWarning, match="kernels cannot be compiled: .+"):
        assert load_library() is None
    assert list((tmp_path / "trieline").iterdir()) == []


def test_a_packed_linear_layer_equals_the_product_and_has_its_gradient():
    weight = draw_normal(30, 20)
    packed = PackedLinear(weight)
    x, other = draw_normal(4, 7, 20, seed=2), draw_normal(4, 7, 30, seed=3)
    exact = x.double() @ weight.double().T
    for context in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with context:
            for product, expected in (
                (packed(x), exact),
                (packed(x, relu=True), exact.relu()),
                (packed(x, add=other), exact + other),
            ):
                assert product.shape == (4, 7, 30)
                error = (product - expected).abs().max()
                assert error < MAX_RELATIVE_ERROR * expected.abs().max()

    x.requires_grad_()
    packed(x, add=other).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x))
