"""What decoding does between its matrix products, compiled for this processor (`kernels.cpp`).

    kernels.ready(x) and kernels.packed_attention(...)

Small ragged work, for which PyTorch on a CPU needs padding and many passes: attention within histories of any
length, of a user's one query to them, of a beam to its few ancestors, norms, and the whole search of a student
through a trie. Built once with the machine's C++ compiler, when first needed, and kept in the user's cache folder.
Without a compiler, on a GPU and in an exported program callers take PyTorch's way to the same results;
TRIELINE_KERNELS=0 asks for that.

Shapes: `n` tokens of `B` users, `H` heads and `K` their width, `W` beams of a user, `N = B * W`, `V` vocabulary,
`L` levels and `C` codes of one, `M` hidden width of a student's head.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from models.matmul import plain_inference

SOURCE = Path(__file__).with_suffix(".cpp")

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC")

ARGUMENTS: dict[str, list[Any]] = {
    "packed_attention": [c_void_p, c_void_p, *[c_int64] * 3, c_void_p, c_int64, c_void_p],
    "packed_readout": [*[c_void_p] * 3, *[c_int64] * 3, c_void_p],
    "scaled_rows": [c_void_p, c_int64, c_int64, c_float, c_void_p],
    "beam_attention": [c_void_p, POINTER(c_void_p), POINTER(c_void_p), *[c_int64] * 4, c_void_p, c_void_p],
    "log_softmax_part": [c_void_p, *[c_int64] * 4, c_void_p],
    "walk": [c_void_p, POINTER(c_void_p), POINTER(c_int64), *[c_int64] * 3, c_float, c_int64, c_int64, c_bool,
             c_void_p, c_void_p],
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
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))][:1]  # of x86, of ARM
    command, *options = shlex.split(os.environ.get("CXX") or "c++")
    about = repr((SOURCE.read_bytes(), FLAGS, command, options, platform.machine(), flags))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trieline"
    path = folder / f"kernels-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    compiler = shutil.which(command)
    if compiler is None:
        raise OSError("there is no C++ compiler")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as work:
        steps = [
            [compiler, *options, *FLAGS, "-c", str(SOURCE), "-o", f"{work}/kernels.o"],
            # without -fopenmp: its functions are those that torch has loaded, so that there is one pool of threads
            [compiler, *options, "-shared", f"{work}/kernels.o", "-o", f"{work}/kernels.so"],
        ]
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=120)
        ctypes.CDLL(f"{work}/kernels.so")  # what cannot be loaded is not kept
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


def packed_readout(asked: Tensor, states: Tensor, begin: Tensor) -> Tensor:
    """(B, H, D): each query of a user, `asked` (B, H, D), attends to the user's states without scaling.

    The states of user u are rows `begin[u] : begin[u + 1]` (B + 1,) of `states` (n, D).
    """
    asked, states, begin = asked.contiguous(), states.contiguous(), begin.contiguous()
    out = torch.empty_like(asked)
    _call("packed_readout", asked, states, begin, *asked.shape, out)
    return out


def scaled_rows(x: Tensor, epsilon: float) -> Tensor:
    """(n, D): the rows of `x` (n, D) over their root mean square, to the mean square of which `epsilon` is added."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _call("scaled_rows", x, *x.shape, epsilon, out)
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


def walk(
    hidden: Tensor, heads: Sequence[tuple[Tensor, ...]], trie: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int],
    epsilon: float, beam: int, keep: int, children: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(nodes, scores), each (B, keep): the leaves that a student's beam search finds, best first; 0 and -inf past them.

    By level, `heads` has the table (rows, M) of what codes before add to the hidden layer, a row per code of the
    levels before, end to end; scale and shift (M,) of the norm, whose `epsilon` it is; weight (C, M) and bias (C,) of
    the outputs. `trie` has offsets and tokens, `sizes` are the C. `hidden` (B, L * M) is z's part of the hidden layers.
    With `children` scores are normalised over the valid children past the first level, and only these are computed;
    else over all codes. Of equal scores the first are taken.
    """
    hidden = hidden.contiguous()
    levels = [x for head, edges in zip(heads, trie, strict=True) for x in (*head, *edges)]
    node = torch.empty((len(hidden), keep), dtype=torch.long)
    score = torch.empty((len(hidden), keep))
    _call(
        "walk", hidden, (c_void_p * len(levels))(*(x.data_ptr() for x in levels)), (c_int64 * len(sizes))(*sizes),
        len(sizes), len(hidden), hidden.shape[1] // len(sizes), epsilon, beam, keep, children, node, score,
    )  # fmt: skip
    return node, score


def _call(name: str, *arguments: Any) -> None:
    """Calls a kernel; tensors go as their addresses and stay alive meanwhile, as the caller holds them."""
    getattr(library(), name)(*(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments))
