"""Compiled CPU kernels for decoding (`kernels.cpp`), and their loader.

    if kernels.ready(x):
        y = kernels.packed_attention(...)

The kernels compute small ragged operations for which PyTorch needs padding and many
passes on a CPU: attention within histories, and from a beam to its ancestors; norms;
and the whole search of a student through a trie.

The library is built on first use with the machine's C++ compiler ($CXX, or c++) and
stored in the user's cache folder. Without a compiler, callers compute the same results
with PyTorch, as they do on a GPU.
`torch.utils.cpp_extension` is not used because it needs ninja, waits forever for a
build that was killed, and loads libraries built for other processors.

Sizes are asserted here, the contents of a trie are checked by `Trie`; spans and rows
come from the callers.

Shapes: `n` tokens of `B` users, `H` heads of width `K`, `W` beams of a user, `N` =
B * W, `V` vocabulary, `L` levels, `C` codes of a level, `M` hidden width of a student's
head.
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
from ctypes import c_bool, c_float, c_int64, c_void_p
from functools import cache
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from models.cpu.weights import is_plain_inference

# read at once, as the archive of a served model may be removed after it is loaded
SOURCE = (resources.files(__package__) / "kernels.cpp").read_text()

C_TYPES: dict[type, Any] = {bool: c_bool, int: c_int64, float: c_float}
"""C types of the kernels' numbers; other arguments are addresses."""

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-march=native")


def ready(*tensors: Tensor) -> bool:
    """Return whether the kernels can take these tensors now.

    The kernels need float32 on a CPU without autocast, gradients or tracing.
    """
    return (
        all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)
        and is_plain_inference()
        and library() is not None
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, built on first use.

    Returns:
        The library, or None if the build fails, which is reported by a warning.
    """
    try:
        loaded = ctypes.CDLL(str(_build_library()))
    # ValueError: unbalanced quotes in $CXX; RuntimeError: a user without a home
    except (OSError, ValueError, RuntimeError) as error:
        warnings.warn(
            f"decoding is slower, as its kernels cannot be compiled: {error}",
            stacklevel=3,
        )
        return None
    return loaded


def _build_library() -> Path:
    """Return the library in the user's cache folder, compiled if it is missing."""
    compiler = os.environ.get("CXX") or "c++"
    # the processor's instruction sets: flags on x86, Features on ARM
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    build = repr((SOURCE, compiler, FLAGS, platform.machine(), features))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "trieline"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()  # a symbolic link has all permission bits
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise OSError(
            f"{folder} is not a folder that only this user can write to; set "
            f"XDG_CACHE_HOME to another folder"
        )
    path = folder / f"kernels-{hashlib.sha256(build.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    command, *options = shlex.split(compiler)
    with TemporaryDirectory(dir=folder) as work:
        object_file, linked = f"{work}/kernels.o", Path(work, "kernels.so")
        steps = (
            ["-fopenmp", "-x", "c++", "-c", "-", "-o", object_file],
            # Linked without -fopenmp, so that the kernels use the OpenMP library that
            # PyTorch has loaded, and its thread pool.
            ["-shared", object_file, "-o", str(linked)],
        )
        for step in steps:
            result = subprocess.run(
                [command, *FLAGS, *options, *step],
                input=SOURCE,
                capture_output=True,
                text=True,
            )
            if result.returncode:
                reason = result.stderr.strip().splitlines()[-1:]
                message = f"{compiler} ended with {result.returncode}"
                raise OSError(" ".join([message, *reason]))
        ctypes.CDLL(str(linked))  # fails before the library is stored
        return linked.replace(path)


def _lay_out(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `x`, which must have this shape and type, as a contiguous tensor."""
    assert (x.shape, x.dtype, x.device.type) == (shape, dtype, "cpu")
    return x.contiguous()


def packed_attention(qkv: Tensor, begin: Tensor, bias: Tensor, heads: int) -> Tensor:
    """Compute unscaled attention within the tokens of each user.

    Args:
        qkv: (n, 3 * H * K) queries, keys and values.
        begin: (B + 1,) offsets: user u has the rows `begin[u] : begin[u + 1]`.
        bias: (H, S, S) added to the scores; S is at least the longest history.
        heads: Number of heads H.

    Returns:
        (n, H * K)
    """
    inner = qkv.shape[1] // 3 // heads * heads
    qkv = _lay_out(qkv, len(qkv), 3 * inner)
    begin = _lay_out(begin, len(begin), dtype=torch.long)
    span = bias.shape[-1]
    bias = _lay_out(bias, heads, span, span)
    out = qkv.new_empty((len(qkv), inner))
    _call(
        "packed_attention",
        qkv,
        begin,
        len(begin) - 1,
        heads,
        inner // heads,
        bias,
        span,
        out,
    )
    return out


def scaled_rows(x: Tensor, epsilon: float) -> Tensor:
    """Divide the rows of `x` (n, D) by sqrt(mean square + epsilon)."""
    x = _lay_out(x, len(x), x.shape[-1])
    out = torch.empty_like(x)
    _call("scaled_rows", x, *x.shape, epsilon, out)
    return out


def beam_attention(
    q: Tensor, codes: list[Tensor], code_rows: list[Tensor], bias: Tensor, heads: int
) -> Tensor:
    """Attend from the newest code of each beam to all codes of the beam, unscaled.

    Args:
        q: (N, H * K) queries of the newest codes.
        codes: Keys and values (n_t, 2 * H * K) of the codes of each level t.
        code_rows: (N,) row of each beam's code among the codes of each level.
        bias: (H, levels) added to the scores.
        heads: Number of heads H.

    Returns:
        (N, H * K)
    """
    num_beams = len(q)
    inner = q.shape[-1] // heads * heads
    q = _lay_out(q, num_beams, inner)
    bias = _lay_out(bias, heads, len(codes))
    codes = [_lay_out(x, len(x), 2 * inner) for x in codes]
    code_rows = [_lay_out(x, num_beams, dtype=torch.long) for x in code_rows]
    out = torch.empty_like(q)
    _call(
        "beam_attention",
        q,
        _addresses(codes),
        _addresses(code_rows),
        len(codes),
        num_beams,
        heads,
        inner // heads,
        bias,
        out,
    )
    return out


def log_softmax_part(logits: Tensor, first: int, size: int) -> Tensor:
    """Return columns `first : first + size` of the log-softmax of logits (N, V)."""
    logits = _lay_out(logits, len(logits), logits.shape[-1])
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
    """Run the whole beam search of a student.

    Of equal scores, the first edge is better.

    Args:
        hidden: (B, L * M) contribution of z to the hidden layers of all heads.
        heads: Five tensors per level. The table (rows, M) has the contribution of each
            code of all earlier levels. Scale (M,) and shift (M,) belong to the norm,
            weight (C, M) and bias (C,) to the output layer.
        trie: Offsets and tokens of each level.
        sizes: Number of codes C of each level.
        epsilon: Epsilon of the norms.
        beam: Number of beams.
        keep: Number of leaves to return.
        children: Whether scores after the first level are normalised over the valid
            children, so that only scores of valid children are computed; otherwise
            over all codes.
        allowed: (E_l,) bool of each level, true for edges that beams may take; empty to
            allow all edges.

    Returns:
        Leaves and scores, (B, keep) both, best first, padded with 0 and -inf.
    """
    width = hidden.shape[-1] // len(sizes)
    hidden = _lay_out(hidden, len(hidden), len(sizes) * width)
    # the fields of `Level` in kernels.cpp, level after level
    fields: list[Tensor | None] = []
    num_nodes = 1
    for level, (head, edges, size) in enumerate(zip(heads, trie, sizes, strict=True)):
        table, scale, shift, weight, bias = head
        offsets, tokens = edges
        if level:
            table = _lay_out(table, sum(sizes[:level]), width)
        level_allowed = None
        if allowed:
            level_allowed = _lay_out(allowed[level], len(tokens), dtype=torch.bool)
        fields += [
            table,
            _lay_out(scale, width),
            _lay_out(shift, width),
            _lay_out(weight, size, width),
            _lay_out(bias, size),
            _lay_out(offsets, num_nodes + 1, dtype=torch.long),
            _lay_out(tokens, len(tokens), dtype=torch.long),
            level_allowed,
        ]
        num_nodes = len(tokens)
    node = torch.empty((len(hidden), keep), dtype=torch.long)
    score = torch.empty((len(hidden), keep))
    _call(
        "beam_search",
        hidden,
        _addresses(fields),
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


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    """Return a C array of the tensors' addresses, null for None."""
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    return (c_void_p * len(addresses))(*addresses)


def _call(name: str, *arguments: Any) -> None:
    """Call a kernel with the addresses of tensors, which the caller keeps alive."""
    function = getattr(library(), name)
    function.restype = None
    values = []
    for x in arguments:
        if isinstance(x, Tensor):
            values.append(c_void_p(x.data_ptr()))
        else:
            to_c = C_TYPES.get(type(x))
            values.append(to_c(x) if to_c else x)
    function(*values)
