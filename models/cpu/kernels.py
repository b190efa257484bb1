"""What decoding does between its matrix products, compiled for this processor (`kernels.cpp`).

    kernels.ready(x) and kernels.packed_attention(...)

Small ragged work, for which PyTorch on a CPU needs padding and many passes: attention within histories of any
length, of a user's one query to them, of a beam to its few ancestors, norms, and the whole search of a student
through a trie. Built once with the machine's C++ compiler ($CXX, or c++), when first needed, and kept in the user's
cache folder. Without a compiler, on a GPU and in an exported program callers take PyTorch's way to the same results;
TRIELINE_KERNELS=0 asks for that. (`torch.utils.cpp_extension` would need ninja, waits for ever for a process that was
killed while it built, and takes a library that was built for another processor.)

Sizes and addresses are checked here. What a trie holds is its own affair (`trie.py`).

Shapes: `n` tokens of `B` users, `H` heads and `K` their width, `W` beams of a user, `N = B * W`, `V` vocabulary,
`L` levels and `C` codes of one, `M` hidden width of a student's head.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import warnings
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_float, c_int64, c_void_p
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from models.cpu.matmul import plain_inference

SOURCE = (
    resources.files("models.cpu") / "kernels.cpp"
)  # of a folder, or of the archive of a served model

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-march=native")

ARGUMENTS: dict[str, list[Any]] = {
    "packed_attention": [
        c_void_p,
        c_void_p,
        *[c_int64] * 3,
        c_void_p,
        c_int64,
        c_void_p,
    ],
    "packed_readout": [*[c_void_p] * 3, *[c_int64] * 3, c_void_p],
    "scaled_rows": [c_void_p, c_int64, c_int64, c_float, c_void_p],
    "beam_attention": [
        c_void_p,
        POINTER(c_void_p),
        POINTER(c_void_p),
        *[c_int64] * 4,
        c_void_p,
        c_void_p,
    ],
    "log_softmax_part": [c_void_p, *[c_int64] * 4, c_void_p],
    "beam_search": [
        c_void_p,
        POINTER(c_void_p),
        POINTER(c_int64),
        *[c_int64] * 3,
        c_float,
        c_int64,
        c_int64,
        c_bool,
        c_void_p,
        c_void_p,
    ],
}


def ready(*tensors: Tensor) -> bool:
    """Whether the kernels can take these tensors now: float32 on a CPU, no autocast, no gradients, no tracing."""
    return (
        all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)
        and plain_inference()
        and library() is not None
    )


def library() -> ctypes.CDLL | None:
    """The compiled kernels, built if need be; None, with a warning the first time, where they cannot be."""
    return (
        None
        if os.environ.get("TRIELINE_KERNELS") == "0"
        else _library(os.environ.get("CXX") or "c++")
    )


@cache
def _library(compiler: str) -> ctypes.CDLL | None:
    try:
        loaded = ctypes.CDLL(str(_built(compiler)))
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # of a command with half a quote, of a user without a home
        warnings.warn(
            f"decoding goes without its compiled kernels, slower: {error} (set TRIELINE_KERNELS=0 to silence this)",
            stacklevel=3,
        )
        return None
    for name, types in ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, None
    return loaded


def _built(compiler: str) -> Path:
    """The library in the user's cache folder, compiled there if need be.

    It is named after source, compiler and processor and moved into its place whole, so that processes that build at
    once do not disturb each other.
    """
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = [line for line in lines if line.startswith(("flags", "Features"))][
        :1
    ]  # of x86, of ARM
    source = SOURCE.read_text()
    about = repr((source, compiler, FLAGS, platform.machine(), features))
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trieline"
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (
        folder.lstat().st_uid != os.geteuid() or folder.lstat().st_mode & 0o022
    ):  # links have all bits
        raise OSError(
            f"{folder} is not a folder that this user alone can write in; set XDG_CACHE_HOME to another"
        )
    path = folder / f"kernels-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    command, *options = shlex.split(compiler)
    with TemporaryDirectory(dir=folder) as work:
        made, part = Path(work, "kernels.so"), f"{work}/kernels.o"
        for step in (
            ["-fopenmp", "-x", "c++", "-c", "-", "-o", part],
            # without -fopenmp: its functions are those that torch has loaded, so that there is one pool of threads
            ["-shared", part, "-o", str(made)],
        ):
            done = subprocess.run(
                [command, *FLAGS, *options, *step],
                input=source,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                why = done.stderr.strip().splitlines()[-1:]
                raise OSError(
                    " ".join([f"{compiler} ended with {done.returncode}", *why])
                )
        ctypes.CDLL(str(made))  # what cannot be loaded is not kept
        return made.replace(path)


def _checked(
    name: str, x: Tensor, *shape: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`x`, contiguous; a ValueError unless it is of this shape and type and on the CPU."""
    if x.shape != shape or x.dtype != dtype or x.device.type != "cpu":
        raise ValueError(
            f"{name} is {tuple(x.shape)}, {x.dtype} on {x.device}; give {shape}, {dtype} on the CPU"
        )
    return x.contiguous()


def _spans(begin: Tensor, rows: int) -> tuple[Tensor, int]:
    """(`begin`, the most rows of a user) of what cuts `rows` rows into those of each user."""
    begin = _checked("begin", begin, len(begin), dtype=torch.long)
    edges = begin.tolist()
    sizes = [after - before for before, after in pairwise(edges)]
    if not edges or edges[0] != 0 or edges[-1] != rows or min(sizes, default=0) < 0:
        raise ValueError(
            f"begin {edges[:5]} ... {edges[-1:]} does not rise from 0 to the {rows} rows"
        )
    return begin, max(sizes, default=0)


def packed_attention(qkv: Tensor, begin: Tensor, bias: Tensor, heads: int) -> Tensor:
    """(n, H * K): attention within each user, without scaling, of `qkv` (n, 3 * H * K): queries, keys, values.

    The tokens of user u are rows `begin[u] : begin[u + 1]` (B + 1,); `bias` (H, S, S), S at least the longest,
    is added to the scores.
    """
    inner = qkv.shape[1] // 3 // heads * heads
    qkv = _checked("qkv", qkv, len(qkv), 3 * inner)
    begin, longest = _spans(begin, len(qkv))
    bias = _checked(
        "bias", bias, heads, max(longest, bias.shape[-1]), max(longest, bias.shape[-1])
    )
    out = qkv.new_empty((len(qkv), inner))
    _call(
        "packed_attention",
        qkv,
        begin,
        len(begin) - 1,
        heads,
        inner // heads,
        bias,
        bias.shape[-1],
        out,
    )
    return out


def packed_readout(query: Tensor, states: Tensor, begin: Tensor) -> Tensor:
    """(B, H, D): each query of a user, `query` (B, H, D), attends to the user's states without scaling. The states of
    user u are rows `begin[u] : begin[u + 1]` (B + 1,) of `states` (n, D)."""
    begin, _ = _spans(begin, len(states))
    query = _checked(
        "query", query, len(begin) - 1, *query.shape[1:2], states.shape[-1]
    )
    states = _checked("states", states, len(states), query.shape[-1])
    out = torch.empty_like(query)
    _call("packed_readout", query, states, begin, *query.shape, out)
    return out


def scaled_rows(x: Tensor, epsilon: float) -> Tensor:
    """(n, D): the rows of `x` (n, D) over their root mean square, to the mean square of which `epsilon` is added."""
    x = _checked("x", x, len(x), x.shape[-1])
    out = torch.empty_like(x)
    _call("scaled_rows", x, *x.shape, epsilon, out)
    return out


def beam_attention(
    q: Tensor, codes: list[Tensor], places: list[Tensor], bias: Tensor, heads: int
) -> Tensor:
    """(N, H * K): attention, without scaling, of the newest code of each beam, `q` (N, H * K), to all of its codes.

    `codes` has by level (n_t, 2 * H * K): keys and values of the codes that were there; `places` (N,) the row of
    each beam's own among them. `bias` (H, levels) is added to the scores.
    """
    rows, inner = len(q), q.shape[-1] // heads * heads
    q, bias = _checked("q", q, rows, inner), _checked("bias", bias, heads, len(codes))
    codes = [_checked("codes", x, len(x), 2 * inner) for x in codes]
    places = [_checked("places", x, rows, dtype=torch.long) for x in places]
    for x, place in zip(codes, places, strict=True):
        least, most = (int(end) for end in place.aminmax()) if rows else (0, -1)
        if least < 0 or most >= len(x):
            raise ValueError(
                f"places from {least} to {most} are not rows of {len(x)} codes"
            )
    out = torch.empty_like(q)
    pointers = [
        (c_void_p * len(codes))(*(x.data_ptr() for x in tensors))
        for tensors in (codes, places)
    ]
    _call(
        "beam_attention",
        q,
        *pointers,
        len(codes),
        rows,
        heads,
        inner // heads,
        bias,
        out,
    )
    return out


def log_softmax_part(logits: Tensor, first: int, size: int) -> Tensor:
    """(N, size): log-softmax of `logits` (N, V), columns `first : first + size`."""
    logits = _checked("logits", logits, len(logits), logits.shape[-1])
    if not 0 <= first <= first + size <= logits.shape[1]:
        raise ValueError(
            f"columns {first} to {first + size} are not among {logits.shape[1]}"
        )
    out = logits.new_empty((len(logits), size))
    _call("log_softmax_part", logits, len(logits), logits.shape[1], first, size, out)
    return out


def beam_search(
    hidden: Tensor,
    heads: Sequence[tuple[Tensor, ...]],
    trie: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[int],
    epsilon: float,
    beam: int,
    keep: int,
    children: bool,
    allowed: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """(nodes, scores), each (B, keep): the leaves that a student's beam search finds, best first; 0 and -inf past them.

    By level, `heads` has the table (rows, M) of what codes before add to the hidden layer, a row per code of the
    levels before, end to end; scale and shift (M,) of the norm, whose `epsilon` it is; weight (C, M) and bias (C,) of
    the outputs. `trie` has offsets and tokens, `sizes` are the C. `hidden` (B, L * M) is z's part of the hidden layers.
    With `children` scores are normalised over the valid children past the first level, and only these are computed;
    else over all codes. Of equal scores the first are taken. `allowed` has by level which edges beams may take,
    (E_l,) bool; empty: all.
    """
    if not sizes or min(sizes) < 1 or beam < 1 or keep < 1:
        raise ValueError(
            f"sizes {list(sizes)}, beam {beam} and keep {keep} need to be there and at least 1"
        )
    width = hidden.shape[-1] // len(sizes)
    hidden = _checked("hidden", hidden, len(hidden), len(sizes) * width)
    levels, nodes = [], 1
    for level, (head, (offsets, tokens), size) in enumerate(
        zip(heads, trie, sizes, strict=True)
    ):
        table, scale, shift, weight, bias = head
        levels += [
            _checked("table", table, sum(sizes[:level]), width) if level else table,
            _checked("scale", scale, width),
            _checked("shift", shift, width),
            _checked("weight", weight, size, width),
            _checked("bias", bias, size),
            _checked("offsets", offsets, nodes + 1, dtype=torch.long),
            _checked("tokens", tokens, len(tokens), dtype=torch.long),
            _checked("allowed", allowed[level], len(tokens), dtype=torch.bool)
            if allowed
            else None,
        ]
        nodes = len(tokens)
    node = torch.empty((len(hidden), keep), dtype=torch.long)
    score = torch.empty((len(hidden), keep))
    _call(
        "beam_search",
        hidden,
        (c_void_p * len(levels))(*(x if x is None else x.data_ptr() for x in levels)),
        (c_int64 * len(sizes))(*sizes),
        len(sizes),
        len(hidden),
        width,
        epsilon,
        beam,
        keep,
        children,
        node,
        score,
    )
    return node, score


def _call(name: str, *arguments: Any) -> None:
    """Calls a kernel; tensors go as their addresses and stay alive meanwhile, as the caller holds them."""
    getattr(library(), name)(
        *(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
    )
