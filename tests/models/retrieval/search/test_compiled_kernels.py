"""The compiled kernels equal PyTorch, and results do not depend on them."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.cpu import kernels
from models.cpu.matmul import MAX_RELATIVE_ERROR, PackedLinear

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None,
    reason="there is no C++ compiler to build the kernels with",
)


HAS_AVX2 = platform.machine() == "x86_64" and torch.cpu._is_avx2_supported()

BUILDS = ["c++", *(["c++ -march=x86-64-v3"] if HAS_AVX2 else [])]
"""Compilers of kernels for this processor and for one without AVX-512."""


@pytest.fixture(params=BUILDS, scope="module")
def compiled_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels of one compiler of `BUILDS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", request.param)
        kernels.library.cache_clear()
        assert kernels.library() is not None
        yield
    kernels.library.cache_clear()


in_both_builds = pytest.mark.usefixtures("compiled_kernels")


def load_library() -> CDLL | None:
    """Load the kernels as a new process does."""
    return kernels.library.__wrapped__()


@pytest.fixture
def small_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A source of an empty kernel, which compiles quickly, in place of the real one."""
    source = tmp_path_factory.mktemp("source") / "kernels.cpp"
    source.write_text('extern "C" void scaled_rows() {}')
    monkeypatch.setattr(kernels, "SOURCE", source)
    return source


def draw_normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return normally distributed numbers with a standard deviation of `scale`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def lengths_to_offsets(lengths: list[int]) -> Tensor:
    """Return the offsets (B + 1,) of rows that are packed one after another."""
    return torch.tensor([0, *lengths]).cumsum(0)


@needs_compiler
@in_both_builds
@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=9),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 8, 16, 40, 64]),
    st.sampled_from([0.01, 1.0, 20.0]),
)
def test_packed_attention_equals_float64_up_to_rounding(lengths, heads, width, scale):
    """Attention weights range from even ones to one position that takes all.

    Float32 rounds a score in proportion to the sum of its absolute terms. An attention
    weight, a quotient of two exponentials, is off by twice this proportion of itself,
    and a mixed value by the same proportion of the values' weighted absolute sum.
    """
    longest = max(lengths) + 2
    qkv = draw_normal(sum(lengths), 3 * heads * width, scale=scale**0.5)
    bias = draw_normal(heads, longest, longest, seed=1)

    mixed = kernels.packed_attention(qkv, lengths_to_offsets(lengths), bias, heads)

    eps = torch.finfo(torch.float32).eps
    for row, row_mixed in zip(qkv.split(lengths), mixed.split(lengths), strict=True):
        row_heads = row.double().unflatten(1, (3, heads, width)).permute(1, 2, 0, 3)
        q, k, v = row_heads.unbind(0)  # (H, S, K)
        row_bias = bias[:, : len(row), : len(row)].double()
        weights = (q @ k.transpose(1, 2) + row_bias).softmax(-1)
        terms = q.abs() @ k.abs().transpose(1, 2) + row_bias.abs()
        largest_term = terms.amax(-1, keepdim=True)  # (H, S, 1)
        bound = 4 * eps * (1 + largest_term) * (weights @ v.abs())
        by_head = row_mixed.double().unflatten(1, (heads, width)).transpose(0, 1)
        error = (by_head - weights @ v).abs()
        worst = float((error / bound).max())
        assert (error <= bound).all(), f"off by {worst:.2f} times the rounding bound"


@needs_compiler
def test_the_library_is_built_once(small_source, monkeypatch, tmp_path):
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


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_linear_layer_equals_the_product_and_has_its_gradient(with_bias):
    weight = draw_normal(30, 20)
    bias = draw_normal(30, seed=1) if with_bias else None
    packed = PackedLinear(weight, bias)
    x, other = draw_normal(4, 7, 20, seed=2), draw_normal(4, 7, 30, seed=3)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias)
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
