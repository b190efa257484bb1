"""Throughput and memory by batch and by beams (Fig. 3b, c of SID-MLP), from the JSON lines of jobs.benchmark.

python -m jobs.benchmark decode --json decode.jsonl
python -m jobs.compare --experiment retrieval/DATASET --benchmark decode.jsonl --html page.html
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.tables import UserError
from pipelines.comparison.run_plots import Drawn
from pipelines.figures import COLOURS, logarithmic, new_figure

MARKS = "os^D"
"""Of the first seven variants, the next seven and so on, whose colours are the same."""

LINE = {"benchmark", "variant", "params", "median_s", "items_per_s"}
"""What a line of jobs.benchmark has."""


def read_lines(path: str) -> list[dict[str, Any]]:
    """The lines of a file that jobs.benchmark wrote; UserError for another file."""
    try:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); check --benchmark") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON lines ({error}); give a file that jobs.benchmark --json wrote") from error
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not line.keys() >= LINE:
            raise UserError(f"line {number} of {path} is none of jobs.benchmark; give a file that its --json wrote")
    return lines


def sizes(lines: Sequence[dict[str, Any]]) -> list[Drawn]:
    """A plot per benchmark and numeric parameter that takes several values: items per second, and peak memory."""
    drawn: list[Drawn] = []
    for benchmark in dict.fromkeys(line["benchmark"] for line in lines):
        own = [line for line in lines if line["benchmark"] == benchmark]
        for parameter in own[0]["params"]:
            series = varied(own, parameter)
            if not series:
                continue
            with_memory = [line for points in series.values() for line in points if line.get("peak_memory_mb")]
            columns = 2 if with_memory else 1
            figure, panels = new_figure(columns, width=4.6 + 1.6 / columns, height=max(3.2, 0.5 + 0.18 * len(series)))
            for axes, key, label in zip(
                panels, ("items_per_s", "peak_memory_mb"), ("per second", "peak MB"), strict=False
            ):
                for place, (name, points) in enumerate(series.items()):
                    x = [line["params"][parameter] for line in points]
                    y = [line.get(key, math.nan) for line in points]
                    axes.plot(x, y, marker=MARKS[place // 7 % 4], ms=4, color=COLOURS[place % 7], label=name)
                axes.set_xscale("log", base=2)
                axes.set_xticks(
                    values := sorted({line["params"][parameter] for line in own}), [f"{v:,}" for v in values]
                )
                axes.minorticks_off()
                logarithmic(axes, x=False)
                axes.set_xlabel(parameter)
                axes.set_ylabel(label)
                axes.grid(alpha=0.15)
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
            caption = "Medians of one interleaved run, both axes logarithmic (SID-MLP, Figure 3b and c)."
            drawn.append((f"{benchmark}-{parameter}", f"Benchmark {benchmark} by {parameter}", caption, figure))
    return drawn


def varied(lines: Sequence[dict[str, Any]], parameter: str) -> dict[str, list[dict[str, Any]]]:
    """For each variant the lines that differ in the parameter alone, at the other parameters' values with the most
    points; none where no variant has two."""
    if not all(isinstance(line["params"].get(parameter), int | float) for line in lines):
        return {}
    groups: dict[tuple, dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        others = tuple(sorted((k, str(v)) for k, v in line["params"].items() if k != parameter))
        groups.setdefault(others, {}).setdefault(line["variant"], []).append(line)
    for group in groups.values():
        for points in group.values():
            points.sort(key=lambda line: line["params"][parameter])
    best = max(groups.values(), key=lambda group: sum(len(points) for points in group.values()))
    several = {variant: points for variant, points in best.items() if len(points) > 1}
    return best if several else {}
