"""Curves of a run: stored in its checkpoints, and logged as a CSV file and a plot."""

from __future__ import annotations

import json
import tempfile

from core.files import join, read_json
from core.schemas import RunRef
from pipelines.tracking.runs import log_text
from pipelines.tracking.store import connect

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


def log_curves(run: RunRef, curves: Curves) -> None:
    """Log the metrics of training and validation as `curves.csv` and `curves.png`."""
    curves = {
        name: points
        for name, points in sorted(curves.items())
        if name.startswith(("train/", "val/"))
    }
    if not curves:
        return
    lines = ["metric,step,value"]
    for name, points in curves.items():
        lines += [f"{name},{step},{value}" for step, value, _ in points]
    log_text(run, "\n".join(lines) + "\n", "curves.csv")
    draw_curves(run, curves)


def draw_curves(run: RunRef, curves: Curves) -> None:
    """Log a plot of the training loss and of the metrics at rank 10 on validation."""
    from pipelines.figures import label_axes, new_figure

    figure, panels = new_figure(2, width=5.5, height=4)
    at_10 = [
        name for name in curves if name.startswith("val/") and name.endswith("@10")
    ]
    for axes, names in zip(panels, (["train/loss"], at_10), strict=True):
        available = [name for name in names if name in curves]
        for name in available:
            steps, values, _ = zip(*curves[name], strict=True)
            axes.plot(steps, values, label=name, marker=".")
        label_axes(axes, "optimizer step", "", legend=bool(available))
    with tempfile.TemporaryDirectory() as folder:
        figure.savefig(f"{folder}/curves.png", dpi=110)
        connect(run.uri).log_artifact(run.run_id, f"{folder}/curves.png")
