"""Curves of a run, which its checkpoints store."""

from __future__ import annotations

import json

from core.files import join, read_json

Curves = dict[str, list[tuple[int, float, int]]]
"""Points of each metric: step, value and time in milliseconds."""

CURVES = "curves.json"
"""Name of the file in a checkpoint with the curves of its run up to the checkpoint."""


def curves_to_bytes(curves: Curves) -> bytes:
    """Return the content of the file `CURVES`."""
    return json.dumps(curves).encode()


def read_curves(checkpoint: str) -> Curves:
    """Return the curves in a checkpoint, or {} if it has no file `CURVES`."""
    content = read_json(join(checkpoint, CURVES)) or {}
    return {
        name: [tuple(point) for point in points] for name, points in content.items()
    }
