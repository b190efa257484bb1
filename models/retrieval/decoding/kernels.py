"""What decoding does between its matrix products, compiled for this processor (`kernels.cpp`).

    kernels.ready(x) and kernels.packed_attention(...)

Small ragged work, for which PyTorch on a CPU needs padding and many passes: attention within histories of any
length, of a beam to its few ancestors, and the choice of the best children in a trie. Built once with the
machine's C++ compiler, when first needed, and kept in the user's cache folder. Without a compiler, on a GPU and
in an exported program callers take PyTorch's way to the same results; TRIELINE_KERNELS=0 asks for that.

Shapes: `n` tokens of `B` users, `H` heads and `K` their width, `W` beams of a user, `N = B * W`, `V` vocabulary.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import warnings
from ctypes import POINTER, c_bool, c_int64, c_void_p
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from models.matmul import plain_inference

SOURCE = Path(__file__).with_suffix(".cpp")

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC")

ARGUMENTS: dict[str, list[Any]] = {
    "packed_attention": [c_void_p, c_void_p, *[c_int64] * 3, c_void_p, c_int64, c_void_p],
    "beam_attention": [c_void_p, POINTER(c_void_p), POINTER(c_void_p), *[c_int64] * 4, c_void_p, c_void_p],
    "log_softmax_part": [c_void_p, *[c_int64] * 4, c_void_p],
    "best_children": [c_void_p, c_int64, *[c_void_p] * 5, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_bool,
                      *[c_void_p] * 3],
}  # fmt: skip


def ready(*tensors: Tensor) -> bool:
    """Whether the kernels can take these tensors now: float32 on a CPU, no autocast, no gradients, no tracing."""
    return (
        all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)
        and plain_inference()
        and library() is not None
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, built if need be; None, with a warning, where they cannot be."""
    if os.environ.get("TRIELINE_KERNELS") == "0":
        return None
    try:
        loaded = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"decoding goes without its compiled kernels, slower: {detail.strip().splitlines()[-1]} (set "
            f"TRIELINE_KERNELS=0 to silence this)",
            stacklevel=2,
        )
        return None
    for name, types in ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, None
    return loaded


def _built() -> Path:
    """The library for this source and processor in the user's cache folder; compiled there if absent."""
    cpu = Path("/proc/cpuinfo")
    flags = [line for line in cpu.read_text().splitlines() if line.startswith("flags")][:1] if cpu.exists() else []
    about = repr((SOURCE.read_bytes(), FLAGS, platform.machine(), flags))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trieline"
    path = folder / f"kernels-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise OSError("there is no C++ compiler")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as work:
        steps = [
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", f"{work}/kernels.o"],
            # without -fopenmp: its functions are those that torch has loaded, so that there is one pool of threads
            [compiler, "-shared", f"{work}/kernels.o", "-o", f"{work}/kernels.so"],
        ]
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=120)
        Path(work, "kernels.so").replace(path)  # at once, as other processes may be at it
    return path


def packed_attention(qkv: Tensor, begin: Tensor, bias: Tensor, heads: int) -> Tensor:
    """(n, H * K): attention within each user, without scaling, of `qkv` (n, 3 * H * K): queries, keys, values.

    The tokens of user u are rows `begin[u] : begin[u + 1]` (B + 1,); `bias` (H, S, S), S at least the longest,
    is added to the scores.
    """
    qkv, begin, bias = qkv.contiguous(), begin.contiguous(), bias.contiguous()
    inner = qkv.shape[1] // 3
    out = qkv.new_empty((len(qkv), inner))
    _call("packed_attention", qkv, begin, len(begin) - 1, heads, inner // heads, bias, bias.shape[-1], out)
    return out


def beam_attention(q: Tensor, codes: list[Tensor], places: list[Tensor], bias: Tensor, heads: int) -> Tensor:
    """(N, H * K): attention, without scaling, of the newest code of each beam, `q` (N, H * K), to all of its codes.

    `codes` has by level (n_t, 2 * H * K): keys and values of the codes that were there; `places` (N,) the row of
    each beam's own among them. `bias` (H, levels) is added to the scores.
    """
    codes, places = [x.contiguous() for x in codes], [x.contiguous() for x in places]
    q, bias = q.contiguous(), bias.contiguous()
    out = torch.empty_like(q)
    pointers = [(c_void_p * len(codes))(*(x.data_ptr() for x in tensors)) for tensors in (codes, places)]
    _call("beam_attention", q, *pointers, len(codes), len(q), heads, q.shape[1] // heads, bias, out)
    return out


def log_softmax_part(logits: Tensor, first: int, size: int) -> Tensor:
    """(N, size): log-softmax of `logits` (N, V), columns `first : first + size`."""
    logits = logits.contiguous()
    out = logits.new_empty((len(logits), size))
    _call("log_softmax_part", logits, len(logits), logits.shape[1], first, size, out)
    return out


def best_children(
    x: Tensor, head: nn.Linear | None, place: Tensor, node: Tensor, score: Tensor, offsets: Tensor, tokens: Tensor,
    keep: int, by_score: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(edges, their parents among the beams, scores), each (B, keep): the best continuations of the beams in a trie.

    Beams stand at the nodes `node` (B, W) of a level with scores `score` (B, W); `place` (B, W) is a beam's row of
    `x`, or -1 where its children have probability 1. With a `head` the logits are those that it makes of x (R, N),
    computed for valid children only and normalised over them; without, x (R, C) are the logits, normalised over all
    codes. Of equal scores the first are taken; `by_score` orders them by score, else they come in order of beam and
    edge. Where there are fewer the tail is edge 0 with -inf.
    """
    x, place, node, score = (given.contiguous() for given in (x, place, node, score))
    users, beams = node.shape
    edge, parent = node.new_empty((2, users, keep)).unbind(0)
    best = score.new_empty((users, keep))
    _call(
        "best_children", x, x.shape[-1], *((None, None) if head is None else (head.weight, head.bias)), place, node,
        score, users, beams, offsets, tokens, keep, by_score, edge, parent, best,
    )  # fmt: skip
    return edge, parent, best


def _call(name: str, *arguments: Any) -> None:
    """Calls a kernel; tensors go as their addresses and stay alive meanwhile, as the caller holds them."""
    getattr(library(), name)(*(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments))
