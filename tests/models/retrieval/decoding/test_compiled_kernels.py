"""The compiled kernels do what PyTorch does, and their absence changes no result."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trie import catalogues
from torch import Tensor
from torch.nn import functional

from models.matmul import TOLERANCE, Packed
from models.retrieval.data import PAD, Catalogue
from models.retrieval.decoding import kernels
from models.retrieval.decoding.beam import beam_search
from models.retrieval.decoding.trie import Trie
from models.retrieval.tiger import Tiger, TigerConfig

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="there is no C++ compiler to build the kernels with"
)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=9), st.sampled_from([1, 3]), st.sampled_from([1, 8, 16, 40, 64]),
    st.sampled_from([0.01, 1.0, 20.0]),
)  # fmt: skip
def test_packed_attention(lengths, heads, width, scale):
    """`scale` takes the scores from even ones to one taking all.

    Float32 rounds a score in proportion to the sum of its absolute terms, and a share, a quotient of two exponentials,
    by twice as much of itself; so a mixed value is off by as much of the values' weighted absolute sum.
    """
    qkv, span = numbers(sum(lengths), 3 * heads * width, scale=scale**0.5), max(lengths) + 2
    bias, begin = numbers(heads, span, span, seed=1), torch.tensor([0, *lengths]).cumsum(0)
    found = kernels.packed_attention(qkv, begin, bias, heads)
    for own, mixed in zip(qkv.split(lengths), found.split(lengths), strict=True):
        q, k, v = own.double().unflatten(1, (3, heads, width)).permute(1, 2, 0, 3).unbind(0)  # (H, S, K)
        own_bias = bias[:, : len(own), : len(own)].double()
        shares = (q @ k.transpose(1, 2) + own_bias).softmax(-1)
        terms = (q.abs() @ k.abs().transpose(1, 2) + own_bias.abs()).amax(-1, keepdim=True)  # (H, S, 1)
        bound = 4 * torch.finfo(torch.float32).eps * (1 + terms) * (shares @ v.abs())
        error = (mixed.double().unflatten(1, (heads, width)).transpose(0, 1) - shares @ v).abs()
        assert (error <= bound).all(), f"off by {float((error / bound).max()):.2f} of what rounding explains"


@needs_compiler
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=9), st.sampled_from([1, 3]), st.sampled_from([1, 16, 40, 128]),
    st.sampled_from([0.01, 1.0, 20.0]),
)  # fmt: skip
def test_packed_readout(lengths, heads, width, scale):
    asked, states = numbers(len(lengths), heads, width, scale=scale), numbers(sum(lengths), width, seed=1)
    found = kernels.packed_readout(asked, states, torch.tensor([0, *lengths]).cumsum(0))
    for query, own, mixed in zip(asked.double(), states.double().split(lengths), found, strict=True):
        expected = (query @ own.T).softmax(-1) @ own
        torch.testing.assert_close(mixed.double(), expected, rtol=1e-3, atol=1e-4 * max(1.0, scale))


@needs_compiler
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (200, 128)])
def test_scaled_rows(rows, width):
    x = numbers(rows, width)
    x[0] = 0.0
    expected = functional.rms_norm(x.double(), (width,), eps=1e-6)
    torch.testing.assert_close(kernels.scaled_rows(x, 1e-6).double(), expected, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("levels", [1, 2, 4, 19])
@pytest.mark.parametrize("width", [5, 64])
def test_beam_attention(levels, width):
    heads, rows = 3, 40
    q, codes = numbers(rows, heads * width, seed=99), [numbers(7 + t, 2 * heads * width, seed=t) for t in range(levels)]
    generator = torch.Generator().manual_seed(0)
    places = [torch.randint(0, len(x), (rows,), generator=generator) for x in codes]
    bias = numbers(heads, levels)
    seen = torch.stack([x[place] for x, place in zip(codes, places, strict=True)]).unflatten(2, (2, heads, width))
    k, v = seen.unbind(2)  # (levels, rows, heads, width)
    share = (torch.einsum("nhk,tnhk->nht", q.unflatten(1, (heads, width)), k) + bias).softmax(-1)
    expected = torch.einsum("nht,tnhk->nhk", share, v).flatten(1)
    found = kernels.beam_attention(q, codes, places, bias, heads)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("width", [1, 15, 16, 17, 100])
def test_log_softmax_part(width):
    logits = numbers(6, width, scale=30.0)
    logits[0, 0] = -torch.inf
    logits[1] = 500.0
    first = width // 3
    found = kernels.log_softmax_part(logits, first, width - first)
    if width > 1:
        torch.testing.assert_close(found, logits.log_softmax(1)[:, first:], rtol=1e-5, atol=1e-5)
    else:
        assert found[1:].tolist() == [[0.0]] * 5


@needs_compiler
@settings(max_examples=100, deadline=None)
@given(
    catalogues(), st.booleans(), st.integers(1, 12), st.integers(1, 7), st.sampled_from([1, 15, 16, 37]),
    st.booleans(), st.integers(0, 5),
)  # fmt: skip
def test_the_walk_is_a_beam_search(catalogue, children, keep, beam, width, even, seed):
    """Against the definition of beam search over heads in float64; with `even` outputs many scores are equal."""
    sizes, codes = catalogue
    trie, users = Trie.from_codes(torch.tensor(codes), sizes), 3
    heads, layers = [], []
    for level, size in enumerate(sizes):
        table = numbers(sum(sizes[:level]), width, seed=seed + level)
        scale, shift = numbers(width, seed=seed + 10), numbers(width, seed=seed + 20)
        weight, bias = numbers(size, width, seed=seed + 30), numbers(size, seed=seed + 40)
        heads.append((table, scale, shift, weight * (not even), bias * (not even)))
        layers.append([x.double() for x in heads[-1]])
    hidden = numbers(users, len(sizes) * width, seed=seed + 50)

    class Heads:
        """A `Scorer`."""

        def start(self) -> Tensor:
            self.rows = torch.zeros(users, 1, 0, dtype=torch.long)
            return self.score()[:, 0]

        def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
            before = self.rows.gather(1, parents.unsqueeze(-1).expand(-1, -1, self.rows.shape[2]))
            rows = tokens + sum(sizes[: self.rows.shape[2]])
            self.rows = torch.cat([before, rows.unsqueeze(-1)], -1)
            return self.score()

        def score(self) -> Tensor:
            level = self.rows.shape[2]
            table, scale, shift, weight, bias = layers[level]
            own = hidden.double().chunk(len(sizes), 1)[level].unsqueeze(1)
            given = own + table[self.rows].sum(2)  # (B, W, M)
            x = functional.gelu(functional.layer_norm(given, (width,), scale, shift, 1e-5))
            return (x @ weight.T + bias).log_softmax(-1)

    edges = [(trie.offsets(level), trie.tokens(level)) for level in range(trie.levels)]
    node, scores = kernels.walk(hidden, heads, edges, list(sizes), 1e-5, beam, keep, children)
    items, expected = beam_search(Heads(), trie, keep, beam, children)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-4)
    found = torch.where(scores == -torch.inf, -1, trie.leaves[node])
    apart = functional.pad(expected.diff().abs() > 1e-3, (1, 1), value=True)
    alone = apart[:, 1:] & apart[:, :-1] & (torch.arange(keep) < keep - 1)
    assert torch.equal(found[alone], items[alone])
    if even and children:  # scores are sums of logarithms of whole numbers, in the same order in both
        assert [sorted(row) for row in found.tolist()] == [sorted(row) for row in items.tolist()]


def test_without_a_compiler_a_warning_says_so_and_results_stay(monkeypatch, tmp_path):
    torch.manual_seed(0)
    codes = torch.cartesian_prod(torch.arange(4), torch.arange(4), torch.arange(2))
    config = TigerConfig(d_model=16, d_ff=24, num_heads=2, d_kv=8, num_encoder_layers=2, num_decoder_layers=2)
    tiger = Tiger(config, Catalogue.from_codes(codes, (4, 4, 2))).eval()
    batch = {
        "history": torch.tensor([[5, 3, PAD], [7, 9, 1], [2, PAD, PAD]]),
        "history_length": torch.tensor([2, 3, 1]),
        "user": torch.tensor([4, 2, 1]),
    }
    items, scores = tiger.recommend(batch, 5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(UserWarning, match=r"there is no C\+\+ compiler.*TRIELINE_KERNELS=0"):
        assert kernels.library.__wrapped__() is None
    monkeypatch.setenv("TRIELINE_KERNELS", "0")
    assert kernels.library.__wrapped__() is None
    monkeypatch.setattr(kernels, "library", lambda: None)
    found, others = tiger.recommend(batch, 5)
    assert found.tolist() == items.tolist()
    torch.testing.assert_close(others, scores, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_broken_source_names_the_compilers_complaint(monkeypatch, tmp_path):
    source = tmp_path / "kernels.cpp"
    source.write_text("int main( {")
    monkeypatch.setattr(kernels, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match="without its compiled kernels"):
        assert kernels.library.__wrapped__() is None
    assert list((tmp_path / "cache" / "trieline").iterdir()) == []  # nothing half-made


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_not_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wrong = tmp_path / "wrong"
    wrong.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo nothing > "$2"\n')
    wrong.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrong))
    with pytest.warns(UserWarning, match="without its compiled kernels"):
        assert kernels.library.__wrapped__() is None
    assert list((tmp_path / "cache" / "trieline").iterdir()) == []
    monkeypatch.setenv("CXX", "c++ -g")  # a command with options
    assert kernels.library.__wrapped__() is not None


@needs_compiler
def test_the_library_is_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels.library.__wrapped__() is not None
    (built,) = (tmp_path / "trieline").iterdir()
    monkeypatch.setenv("PATH", "")
    assert kernels.library.__wrapped__() is not None
    assert list((tmp_path / "trieline").iterdir()) == [built]


@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_products(with_bias):
    weight, bias = numbers(30, 20), numbers(30, seed=1) if with_bias else None
    packed = Packed(weight, bias)
    x, other = numbers(4, 7, 20, seed=2), numbers(4, 7, 30, seed=3)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias)
    for context in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with context:
            for found, expected in (
                (packed(x), exact),
                (packed(x, relu=True), exact.relu()),
                (packed(x, add=other), exact + other),
            ):
                assert found.shape == (4, 7, 30)
                assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()
    given_grad = x.clone().requires_grad_()
    packed(given_grad, add=other).sum().backward()
    torch.testing.assert_close(given_grad.grad, weight.sum(0).expand_as(x))
