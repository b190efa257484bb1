"""The compiled kernels equal PyTorch, and results do not depend on them."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_beam import subset
from test_trie import catalogues
from torch import Tensor
from torch.nn import functional

from models.cpu import kernels
from models.cpu.matmul import MAX_RELATIVE_ERROR, PackedLinear
from models.dataset.encoding import PAD
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.search.beam import beam_search
from models.retrieval.search.trie import Trie
from models.retrieval.tiger import Tiger, TigerConfig

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None,
    reason="there is no C++ compiler to build the kernels with",
)


HAS_AVX2 = platform.machine() == "x86_64" and torch.cpu._is_avx2_supported()

BUILDS = ["c++", *(["c++ -march=x86-64-v3"] if HAS_AVX2 else [])]
"""This processor's kernels, and those of one without AVX-512."""


@pytest.fixture(params=BUILDS, scope="module")
def build(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", request.param)
        assert kernels.library() is not None
        yield


in_both_builds = pytest.mark.usefixtures("build")


def fresh() -> CDLL | None:
    """Load the kernels as a new process does."""
    return kernels._library.__wrapped__(os.environ.get("CXX") or "c++")


@pytest.fixture
def small_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Replace the source by kernels that do nothing, which compile quickly."""
    source = tmp_path_factory.mktemp("source") / "kernels.cpp"
    source.write_text(
        "\n".join(f'extern "C" void {name}() {{}}' for name in kernels.ARGUMENTS)
    )
    monkeypatch.setattr(kernels, "SOURCE", source)
    return source


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@needs_compiler
@in_both_builds
@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=9),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 8, 16, 40, 64]),
    st.sampled_from([0.01, 1.0, 20.0]),
)
def test_packed_attention(lengths, heads, width, scale):
    """`scale` takes the scores from even ones to one taking all.

    Float32 rounds a score in proportion to the sum of its absolute terms, and a share,
    a quotient of two exponentials, by twice as much of itself; so a mixed value is off
    by as much of the values' weighted absolute sum.
    """
    qkv, span = (
        numbers(sum(lengths), 3 * heads * width, scale=scale**0.5),
        max(lengths) + 2,
    )
    bias, begin = (
        numbers(heads, span, span, seed=1),
        torch.tensor([0, *lengths]).cumsum(0),
    )
    found = kernels.packed_attention(qkv, begin, bias, heads)
    for own, mixed in zip(qkv.split(lengths), found.split(lengths), strict=True):
        q, k, v = (
            own.double().unflatten(1, (3, heads, width)).permute(1, 2, 0, 3).unbind(0)
        )  # (H, S, K)
        own_bias = bias[:, : len(own), : len(own)].double()
        shares = (q @ k.transpose(1, 2) + own_bias).softmax(-1)
        terms = (q.abs() @ k.abs().transpose(1, 2) + own_bias.abs()).amax(
            -1, keepdim=True
        )  # (H, S, 1)
        bound = 4 * torch.finfo(torch.float32).eps * (1 + terms) * (shares @ v.abs())
        error = (
            mixed.double().unflatten(1, (heads, width)).transpose(0, 1) - shares @ v
        ).abs()
        assert (error <= bound).all(), (
            f"off by {float((error / bound).max()):.2f} of what rounding explains"
        )


@needs_compiler
@in_both_builds
@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=9),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 16, 40, 128]),
    st.sampled_from([0.01, 1.0, 20.0]),
)
def test_packed_readout(lengths, heads, width, scale):
    asked, states = (
        numbers(len(lengths), heads, width, scale=scale),
        numbers(sum(lengths), width, seed=1),
    )
    found = kernels.packed_readout(asked, states, torch.tensor([0, *lengths]).cumsum(0))
    for query, own, mixed in zip(
        asked.double(), states.double().split(lengths), found, strict=True
    ):
        expected = (query @ own.T).softmax(-1) @ own
        torch.testing.assert_close(
            mixed.double(), expected, rtol=1e-3, atol=1e-4 * max(1.0, scale)
        )


@needs_compiler
@in_both_builds
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (200, 128)])
def test_scaled_rows(rows, width):
    x = numbers(rows, width)
    x[0] = 0.0
    expected = functional.rms_norm(x.double(), (width,), eps=1e-6)
    torch.testing.assert_close(
        kernels.scaled_rows(x, 1e-6).double(), expected, rtol=1e-5, atol=1e-6
    )


@needs_compiler
@in_both_builds
@pytest.mark.parametrize("levels", [1, 2, 4, 19])
@pytest.mark.parametrize("width", [5, 64])
def test_beam_attention(levels, width):
    heads, rows = 3, 40
    q, codes = (
        numbers(rows, heads * width, seed=99),
        [numbers(7 + t, 2 * heads * width, seed=t) for t in range(levels)],
    )
    generator = torch.Generator().manual_seed(0)
    places = [torch.randint(0, len(x), (rows,), generator=generator) for x in codes]
    bias = numbers(heads, levels)
    seen = torch.stack(
        [x[place] for x, place in zip(codes, places, strict=True)]
    ).unflatten(2, (2, heads, width))
    k, v = seen.unbind(2)  # (levels, rows, heads, width)
    share = (
        torch.einsum("nhk,tnhk->nht", q.unflatten(1, (heads, width)), k) + bias
    ).softmax(-1)
    expected = torch.einsum("nht,tnhk->nhk", share, v).flatten(1)
    found = kernels.beam_attention(q, codes, places, bias, heads)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_compiler
@in_both_builds
@pytest.mark.parametrize("width", [1, 15, 16, 17, 100])
def test_log_softmax_part(width):
    logits = numbers(6, width, scale=30.0)
    logits[0, 0] = -torch.inf
    logits[1] = 500.0
    first = width // 3
    found = kernels.log_softmax_part(logits, first, width - first)
    if width > 1:
        torch.testing.assert_close(
            found, logits.log_softmax(1)[:, first:], rtol=1e-5, atol=1e-5
        )
    else:
        assert found[1:].tolist() == [[0.0]] * 5


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
def test_the_compiled_beam_search_is_that_of_pytorch(
    catalogue, children, keep, beam, width, even, seed, some
):
    """Compare with the definition in float64; with `even`, many scores tie."""
    sizes, codes = catalogue
    trie, users = Trie(torch.tensor(codes), sizes), 3
    heads, layers = [], []
    for level, size in enumerate(sizes):
        own = (
            seed + 100 * level
        )  # outputs that two levels share would tie codes in either order
        table = numbers(sum(sizes[:level]), width, seed=own)
        scale, shift = numbers(width, seed=own + 10), numbers(width, seed=own + 20)
        weight, bias = numbers(size, width, seed=own + 30), numbers(size, seed=own + 40)
        heads.append((table, scale, shift, weight * (not even), bias * (not even)))
        layers.append([x.double() for x in heads[-1]])
    hidden = numbers(users, len(sizes) * width, seed=seed + 50)

    class Heads:
        """A `Scorer` over heads in float64."""

        def start(self) -> Tensor:
            self.rows = torch.zeros(users, 1, 0, dtype=torch.long)
            return self.score()[:, 0]

        def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
            before = self.rows.gather(
                1, parents.unsqueeze(-1).expand(-1, -1, self.rows.shape[2])
            )
            rows = tokens + sum(sizes[: self.rows.shape[2]])
            self.rows = torch.cat([before, rows.unsqueeze(-1)], -1)
            return self.score()

        def score(self) -> Tensor:
            level = self.rows.shape[2]
            table, scale, shift, weight, bias = layers[level]
            own = hidden.double().chunk(len(sizes), 1)[level].unsqueeze(1)
            given = own + table[self.rows].sum(2)  # (B, W, M)
            x = functional.gelu(
                functional.layer_norm(given, (width,), scale, shift, 1e-5)
            )
            return (x @ weight.T + bias).log_softmax(-1)

    edges = [(trie.offsets(level), trie.tokens(level)) for level in range(trie.levels)]
    kept = trie.mark_edges(subset(codes, seed)[0]) if some else None
    by_level = () if kept is None else kept.split(trie.edges)
    node, scores = kernels.beam_search(
        hidden, heads, edges, list(sizes), 1e-5, beam, keep, children, by_level
    )
    items, expected = beam_search(Heads(), trie, keep, beam, children, kept)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-4)
    found = torch.where(scores == -torch.inf, -1, trie.leaves[node])
    apart = functional.pad(expected.diff().abs() > 1e-3, (1, 1), value=True)
    # the last one that the beam has kept may tie with one that it has not
    alone = (
        apart[:, 1:]
        & apart[:, :-1]
        & (torch.arange(keep) < (expected > -torch.inf).sum(1, keepdim=True) - 1)
    )
    assert torch.equal(found[alone], items[alone])
    if (
        even and not some
    ):  # Sums in float32 and in float64 may break the tie of 1/2 * 1/3 and 1/3 * 1/2, each by its own rounding.
        logs = {
            size: functional.log_softmax(torch.zeros(size, dtype=torch.float64), 0)[0]
            for size in range(1, 5)
        }
        assert (
            items.tolist()
            == [search_by_definition(sizes, codes, logs, beam, keep, children)] * users
        )
        logs = {
            size: kernels.log_softmax_part(torch.zeros(1, size), 0, size)[0, 0]
            for size in range(1, 5)
        }
        assert (
            found.tolist()
            == [search_by_definition(sizes, codes, logs, beam, keep, children)] * users
        )


def search_by_definition(
    sizes: tuple[int, ...],
    codes: list[tuple[int, ...]],
    logs: dict[int, Tensor],
    beam: int,
    keep: int,
    children: bool,
) -> list[int]:
    """Return the items of a beam search with equally likely codes per prefix.

    `logs` are the logarithms by number of codes. Ties go to lower codes.
    """
    beams = {(): torch.zeros_like(logs[1])}
    for level, size in enumerate(sizes):
        scores = {}
        for prefix, score in beams.items():
            following = {code[: level + 1] for code in codes if code[:level] == prefix}
            log = logs[len(following) if children and level else size]
            scores |= dict.fromkeys(following, score + log)
        best = sorted(scores, key=lambda prefix: (-scores[prefix], prefix))
        beams = {
            prefix: scores[prefix]
            for prefix in best[: keep if level == len(sizes) - 1 else beam]
        }
    return [codes.index(code) for code in beams] + [-1] * (keep - len(beams))


def test_without_a_compiler_a_warning_says_so_and_results_stay(monkeypatch, tmp_path):
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
    with pytest.warns(
        UserWarning, match=r"No such file or directory: 'c\+\+'.*TRIELINE_KERNELS=0"
    ):
        assert fresh() is None
    monkeypatch.setenv("TRIELINE_KERNELS", "0")
    assert kernels.library() is None
    monkeypatch.setattr(kernels, "library", lambda: None)
    found, others = tiger.recommend(batch, 5)
    assert found.tolist() == items.tolist()
    torch.testing.assert_close(others, scores, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_not_kept(
    small_source, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wrong = tmp_path / "wrong"
    wrong.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo nothing > "$2"\n'
    )
    wrong.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrong))
    with pytest.warns(UserWarning, match="kernels cannot be compiled"):
        assert fresh() is None
    assert list((tmp_path / "cache" / "trieline").iterdir()) == []
    monkeypatch.setenv("CXX", "c++ -g")  # a command with options
    assert fresh() is not None


@needs_compiler
def test_the_library_is_built_once(small_source, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fresh() is not None
    (built,) = (tmp_path / "trieline").iterdir()
    assert (tmp_path / "trieline").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("PATH", "")
    assert fresh() is not None
    assert list((tmp_path / "trieline").iterdir()) == [built]


@needs_compiler
def test_processes_that_build_at_once_do_not_disturb_each_other(
    small_source, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        (path,) = set(pool.map(lambda _: kernels._build_library("c++"), range(4)))
    assert list((tmp_path / "trieline").iterdir()) == [path]  # nothing half-made


@needs_compiler
@pytest.mark.parametrize(
    "kind",
    ["others can write", "link", "of another user", "a file in its way", "no home"],
)
def test_nothing_is_loaded_from_a_folder_that_is_not_the_users_own(
    kind, small_source, monkeypatch, tmp_path
):
    planted = tmp_path / "cache" / "trieline"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert fresh() is not None
    if kind == "others can write":
        planted.chmod(0o777)
    elif kind == "link":
        planted.rename(tmp_path / "elsewhere")
        planted.symlink_to(tmp_path / "elsewhere")
    elif kind == "of another user":
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    elif kind == "a file in its way":
        shutil.rmtree(planted.parent)
        planted.parent.write_text("")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(Path, "home", no_home)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.warns(
        UserWarning, match="kernels cannot be compiled: .+TRIELINE_KERNELS=0"
    ):
        assert fresh() is None
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def no_home() -> Path:
    raise RuntimeError(
        "Could not determine home directory."
    )  # as where a user is in no list of users


@pytest.mark.parametrize(
    "command", ["/nonexistent/x", '"unbalanced', " ", shutil.which("false"), "echo"]
)
def test_a_broken_compiler_is_one_line(command, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", command)
    with pytest.warns(
        UserWarning, match="kernels cannot be compiled: .+TRIELINE_KERNELS=0"
    ) as warned:
        assert fresh() is None
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)
    assert list((tmp_path / "trieline").iterdir()) == []


@needs_compiler
def test_no_address_goes_to_a_kernel_unchecked():
    """Each case has one wrong argument with which a kernel would leave its memory."""
    begin = torch.tensor([0, 2, 5])
    qkv, bias = numbers(5, 24), numbers(2, 3, 3)
    for edges in ([0, 2, 6], [1, 2, 5], [0, 6, 5], [0, 2, 4], []):
        with pytest.raises(ValueError, match="begin"):
            kernels.packed_attention(
                qkv, torch.tensor(edges, dtype=torch.long), bias, 2
            )
    for wrong in (
        {"qkv": qkv.double()},
        {"qkv": numbers(5, 25)},
        {"begin": begin.int()},
        {"bias": numbers(2, 2, 2)},
        {"bias": numbers(1, 3, 3)},
        {"bias": numbers(2, 3, 4)},
    ):
        with pytest.raises(ValueError, match="; give"):
            kernels.packed_attention(
                **{"qkv": qkv, "begin": begin, "bias": bias, "heads": 2, **wrong}
            )
    for query in (numbers(3, 2, 4), numbers(2, 2, 5), numbers(2, 4)):
        with pytest.raises(ValueError, match="query"):
            kernels.packed_readout(query, numbers(5, 4), begin)
    q, codes, bias = numbers(3, 8), [numbers(2, 16)], numbers(2, 1)
    for places in (
        torch.tensor([0, 1, 2]),
        torch.tensor([0, -1, 0]),
        torch.tensor([0, 1]),
    ):
        with pytest.raises(ValueError, match="code_rows"):
            kernels.beam_attention(q, codes, [places], bias, 2)
    with pytest.raises(ValueError, match="columns 2 to 6"):
        kernels.log_softmax_part(numbers(2, 5), 2, 4)


def a_search(users: int = 2) -> dict[str, object]:
    trie, width = Trie(torch.tensor([[0, 1], [1, 0], [1, 2]]), (2, 3)), 5
    return {
        "hidden": numbers(users, 2 * width),
        "heads": [
            (
                numbers(level * 2, width),
                numbers(width),
                numbers(width),
                numbers(size, width),
                numbers(size),
            )
            for level, size in enumerate((2, 3))
        ],
        "trie": [(trie.offsets(level), trie.tokens(level)) for level in range(2)],
        "sizes": [2, 3],
        "epsilon": 1e-5,
        "beam": 2,
        "keep": 3,
        "children": True,
    }


@needs_compiler
def test_a_search_of_what_does_not_fit_is_refused():
    whole = a_search()
    kernels.beam_search(**whole)
    heads, trie = whole["heads"], whole["trie"]
    wrong = [
        {"beam": 0},
        {"keep": 0},
        {"sizes": [], "heads": [], "trie": []},
        {"sizes": [2, 4]},
        {"hidden": numbers(2, 9)},
    ]
    wrong += [
        {"heads": [heads[0], (*heads[1][:part], numbers(1), *heads[1][part + 1 :])]}
        for part in range(5)
    ]
    wrong += [
        {"trie": [trie[0], (trie[1][0][:-1], trie[1][1])]},
        {"trie": [trie[0], (trie[1][0].int(), trie[1][1])]},
    ]
    for other in wrong:
        with pytest.raises(ValueError, match=r"give|at least 1"):
            kernels.beam_search(**{**whole, **other})


@needs_compiler
def test_of_no_users_there_is_nothing():
    nobody = torch.zeros(1, dtype=torch.long)
    assert kernels.packed_attention(
        numbers(0, 24), nobody, numbers(2, 0, 0), 2
    ).shape == (0, 8)
    assert kernels.packed_readout(numbers(0, 2, 4), numbers(0, 4), nobody).shape == (
        0,
        2,
        4,
    )
    assert kernels.scaled_rows(numbers(0, 4), 1e-6).shape == (0, 4)
    assert kernels.log_softmax_part(numbers(0, 4), 1, 2).shape == (0, 2)
    found = kernels.beam_attention(
        numbers(0, 8), [numbers(2, 16)], [nobody[:0]], numbers(2, 1), 2
    )
    assert found.shape == (0, 8)
    node, score = kernels.beam_search(**a_search(users=0))
    assert node.shape == score.shape == (0, 3)


@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_products(with_bias):
    weight, bias = numbers(30, 20), numbers(30, seed=1) if with_bias else None
    packed = PackedLinear(weight, bias)
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
                assert (
                    found - expected
                ).abs().max() < MAX_RELATIVE_ERROR * expected.abs().max()
    given_grad = x.clone().requires_grad_()
    packed(given_grad, add=other).sum().backward()
    torch.testing.assert_close(given_grad.grad, weight.sum(0).expand_as(x))
