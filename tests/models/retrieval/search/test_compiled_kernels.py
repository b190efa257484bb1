"""The compiled kernels equal PyTorch, and results do not depend on them."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from models.cpu import kernels
from models.cpu.matmul import MAX_RELATIVE_ERROR, PackedLinear
from models.dataset.encoding import PAD
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.search.beam import beam_search
from models.retrieval.search.trie import Trie
from models.retrieval.tiger import Tiger, TigerConfig
from tests.fixtures.search_problems import catalogues, draw_subset

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
    """A source of empty kernels, which compiles quickly, in place of the real one."""
    source = tmp_path_factory.mktemp("source") / "kernels.cpp"
    functions = [f'extern "C" void {name}() {{}}' for name in kernels.ARGUMENTS]
    source.write_text("\n".join(functions))
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
@in_both_builds
@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=9),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 16, 40, 128]),
    st.sampled_from([0.01, 1.0, 20.0]),
)
def test_packed_readout_equals_attention_in_float64(lengths, heads, width, scale):
    queries = draw_normal(len(lengths), heads, width, scale=scale)
    states = draw_normal(sum(lengths), width, seed=1)

    mixed = kernels.packed_readout(queries, states, lengths_to_offsets(lengths))

    rows = states.double().split(lengths)
    for query, row, row_mixed in zip(queries.double(), rows, mixed, strict=True):
        expected = (query @ row.T).softmax(-1) @ row
        torch.testing.assert_close(
            row_mixed.double(), expected, rtol=1e-3, atol=1e-4 * max(1.0, scale)
        )


@needs_compiler
@in_both_builds
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (200, 128)])
def test_scaled_rows_equal_rms_norm(rows, width):
    x = draw_normal(rows, width)
    x[0] = 0.0
    expected = functional.rms_norm(x.double(), (width,), eps=1e-6)
    torch.testing.assert_close(
        kernels.scaled_rows(x, 1e-6).double(), expected, rtol=1e-5, atol=1e-6
    )


@needs_compiler
@in_both_builds
@pytest.mark.parametrize("levels", [1, 2, 4, 19])
@pytest.mark.parametrize("width", [5, 64])
def test_beam_attention_equals_attention_over_gathered_rows(levels, width):
    heads, rows = 3, 40
    generator = torch.Generator().manual_seed(0)
    q = draw_normal(rows, heads * width, seed=99)
    bias = draw_normal(heads, levels)
    codes = [draw_normal(7 + t, 2 * heads * width, seed=t) for t in range(levels)]
    code_rows = [torch.randint(0, len(x), (rows,), generator=generator) for x in codes]

    mixed = kernels.beam_attention(q, codes, code_rows, bias, heads)

    gathered = torch.stack(
        [x[index] for x, index in zip(codes, code_rows, strict=True)]
    )
    k, v = gathered.unflatten(2, (2, heads, width)).unbind(2)  # (levels, rows, H, K)
    scores = torch.einsum("nhk,tnhk->nht", q.unflatten(1, (heads, width)), k) + bias
    expected = torch.einsum("nht,tnhk->nhk", scores.softmax(-1), v).flatten(1)
    torch.testing.assert_close(mixed, expected, rtol=1e-4, atol=1e-5)


@needs_compiler
@in_both_builds
@pytest.mark.parametrize("width", [1, 15, 16, 17, 100])
def test_log_softmax_part_equals_columns_of_the_log_softmax(width):
    logits = draw_normal(6, width, scale=30.0)
    logits[0, 0] = -torch.inf
    logits[1] = 500.0
    first = width // 3

    part = kernels.log_softmax_part(logits, first, width - first)

    if width > 1:
        expected = logits.log_softmax(1)[:, first:]
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)
    else:
        assert part[1:].tolist() == [[0.0]] * 5


Head = tuple[Tensor, ...]
"""Table of earlier codes, scale and shift of the norm, weight and bias of a level."""


def build_heads(
    sizes: tuple[int, ...], width: int, seed: int, uniform: bool
) -> list[Head]:
    """Return the random head of each level; with `uniform`, all codes score alike."""
    heads = []
    for level, size in enumerate(sizes):
        # equal outputs of two levels would tie codes in either order
        level_seed = seed + 100 * level
        table = draw_normal(sum(sizes[:level]), width, seed=level_seed)
        scale = draw_normal(width, seed=level_seed + 10)
        shift = draw_normal(width, seed=level_seed + 20)
        weight = draw_normal(size, width, seed=level_seed + 30)
        bias = draw_normal(size, seed=level_seed + 40)
        if uniform:
            weight, bias = weight * 0, bias * 0
        heads.append((table, scale, shift, weight, bias))
    return heads


class Float64Scorer:
    """A `Scorer` that computes the heads of `build_heads` in float64."""

    def __init__(
        self, hidden: Tensor, heads: list[Head], sizes: tuple[int, ...]
    ) -> None:
        self.hidden = hidden.double().chunk(len(sizes), 1)
        self.heads = [[part.double() for part in head] for head in heads]
        self.first_rows = [sum(sizes[:level]) for level in range(len(sizes))]
        self.rows = torch.zeros(len(hidden), 1, 0, dtype=torch.long)

    def start(self) -> Tensor:
        """Return the log-probabilities (B, C_0) of the first code."""
        self.rows = self.rows.new_zeros((len(self.rows), 1, 0))
        return self.score()[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (B, W, C_l) of the next code of each beam."""
        level = self.rows.shape[2]
        parent_index = parents.unsqueeze(-1).expand(-1, -1, level)
        parent_rows = self.rows.gather(1, parent_index)
        new_rows = tokens + self.first_rows[level]
        self.rows = torch.cat([parent_rows, new_rows.unsqueeze(-1)], -1)
        return self.score()

    def score(self) -> Tensor:
        """Return the log-probabilities (B, W, C_l) after the rows of each beam."""
        level = self.rows.shape[2]
        table, scale, shift, weight, bias = self.heads[level]
        x = self.hidden[level].unsqueeze(1) + table[self.rows].sum(2)  # (B, W, M)
        x = functional.layer_norm(x, (x.shape[-1],), scale, shift, 1e-5)
        return (functional.gelu(x) @ weight.T + bias).log_softmax(-1)


def mark_unambiguous(scores: Tensor) -> Tensor:
    """Return a mask (B, K) of the ranks whose item does not depend on rounding.

    Neighbouring scores that are nearly equal may swap, and the last item of the beam
    may tie with an item that the beam dropped.

    Args:
        scores: (B, K) scores, best first, -inf where there is no item.
    """
    has_gap = scores.diff().abs() > 1e-3
    has_gap = functional.pad(has_gap, (1, 1), value=True)  # (B, K + 1)
    num_items = (scores > -torch.inf).sum(1, keepdim=True)
    is_before_last = torch.arange(scores.shape[1]) < num_items - 1
    return has_gap[:, 1:] & has_gap[:, :-1] & is_before_last


@needs_compiler
@in_both_builds
@settings(max_examples=100)
@given(
    catalogues(),
    st.booleans(),
    st.integers(1, 12),
    st.integers(1, 7),
    st.sampled_from([1, 15, 16, 37]),
    st.booleans(),
    st.integers(0, 5),
    st.booleans(),
)
def test_the_compiled_beam_search_equals_the_one_of_pytorch_in_float64(
    catalogue, children, keep, beam, width, uniform, seed, restricted
):
    """Heads that are `uniform` give many tied scores, which go to the lower codes."""
    sizes, codes = catalogue
    trie, users = Trie(torch.tensor(codes), sizes), 3
    heads = build_heads(sizes, width, seed, uniform)
    hidden = draw_normal(users, len(sizes) * width, seed=seed + 50)
    allowed = None
    allowed_by_level: tuple[Tensor, ...] = ()
    if restricted:
        allowed = trie.mark_edges(draw_subset(codes, seed)[0])
        allowed_by_level = allowed.split(trie.edges)
    edges = [(trie.offsets(level), trie.tokens(level)) for level in range(trie.levels)]

    node, scores = kernels.beam_search(
        hidden, heads, edges, list(sizes), 1e-5, beam, keep, children, allowed_by_level
    )
    items = torch.where(scores == -torch.inf, -1, trie.leaves[node])

    scorer = Float64Scorer(hidden, heads, sizes)
    expected_items, expected = beam_search(scorer, trie, keep, beam, children, allowed)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-4)
    unambiguous = mark_unambiguous(expected)
    assert torch.equal(items[unambiguous], expected_items[unambiguous])


def test_a_missing_compiler_gives_a_warning_and_the_same_results(monkeypatch, tmp_path):
    torch.manual_seed(0)
    codes = torch.cartesian_prod(torch.arange(4), torch.arange(4), torch.arange(2))
    config = TigerConfig(
        d_model=16,
        d_ff=24,
        num_heads=2,
        d_kv=8,
        num_encoder_layers=2,
        num_decoder_layers=2,
    )
    tiger = Tiger(config, Catalogue.from_codes(codes, (4, 4, 2))).eval()
    batch = HistoryBatch(
        history=torch.tensor([[5, 3, PAD], [7, 9, 1], [2, PAD, PAD]]),
        history_length=torch.tensor([2, 3, 1]),
        user=torch.tensor([4, 2, 1]),
    )
    items, scores = tiger.recommend(batch, 5)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(UserWarning, match="kernels cannot be compiled"):
        assert load_library() is None

    monkeypatch.setattr(kernels, "library", lambda: None)
    pytorch_items, pytorch_scores = tiger.recommend(batch, 5)
    assert pytorch_items.tolist() == items.tolist()
    torch.testing.assert_close(pytorch_scores, scores, rtol=1e-5, atol=1e-5)


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


@needs_compiler
def test_packed_attention_rejects_arguments_beyond_its_memory():
    begin = torch.tensor([0, 2, 5])
    qkv, bias = draw_normal(5, 24), draw_normal(2, 3, 3)
    for offsets in ([0, 2, 6], [1, 2, 5], [0, 6, 5]):
        with pytest.raises(ValueError, match="begin"):
            kernels.packed_attention(qkv, torch.tensor(offsets), bias, 2)
    with pytest.raises(ValueError, match="bias"):
        kernels.packed_attention(qkv, begin, bias[:, :2, :2], 2)


def build_search_arguments(users: int = 2) -> dict[str, Any]:
    """Return valid arguments of `kernels.beam_search`, codebooks of 2 and 3 codes."""
    trie, width = Trie(torch.tensor([[0, 1], [1, 0], [1, 2]]), (2, 3)), 5
    heads = []
    for level, size in enumerate((2, 3)):
        table = draw_normal(level * 2, width)
        scale, shift = draw_normal(width), draw_normal(width)
        weight, bias = draw_normal(size, width), draw_normal(size)
        heads.append((table, scale, shift, weight, bias))
    return {
        "hidden": draw_normal(users, 2 * width),
        "heads": heads,
        "trie": [(trie.offsets(level), trie.tokens(level)) for level in range(2)],
        "sizes": [2, 3],
        "epsilon": 1e-5,
        "beam": 2,
        "keep": 3,
        "children": True,
    }


@needs_compiler
def test_an_empty_batch_gives_empty_results():
    begin = torch.zeros(1, dtype=torch.long)
    no_rows = begin[:0]
    mixed = kernels.packed_attention(draw_normal(0, 24), begin, draw_normal(2, 0, 0), 2)
    assert mixed.shape == (0, 8)
    mixed = kernels.packed_readout(draw_normal(0, 2, 4), draw_normal(0, 4), begin)
    assert mixed.shape == (0, 2, 4)
    mixed = kernels.beam_attention(
        draw_normal(0, 8), [draw_normal(2, 16)], [no_rows], draw_normal(2, 1), 2
    )
    assert mixed.shape == (0, 8)
    assert kernels.scaled_rows(draw_normal(0, 4), 1e-6).shape == (0, 4)
    assert kernels.log_softmax_part(draw_normal(0, 4), 1, 2).shape == (0, 2)
    node, score = kernels.beam_search(**build_search_arguments(users=0))
    assert node.shape == score.shape == (0, 3)


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
