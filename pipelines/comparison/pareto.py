"""Accuracy against requests per second, as a picture: who is better at what speed (Fig. 4 of SID-MLP).

    python -m jobs.compare --experiment retrieval/DATASET --tracking_uri URI --pareto pareto.png

A point is a row of the comparison with both figures measured on test; the line joins those that no other
point beats in both. Speeds compare only where they were measured on the same machine, with the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from models.tables import UserError
from pipelines.comparison.rows import Comparison, Row, lower_is_better
from pipelines.comparison.run_plots import Drawn
from pipelines.figures import COLOURS, logarithmic, new_figure

FORMATS = (".png", ".svg", ".pdf")
LINE = 13
"""Points of height by which a label moves away where it would hide another."""

STEPS = 14
"""Such moves, up or down, at most."""


@dataclass(frozen=True)
class Point:
    """A row that has both figures."""

    label: str
    """Name of the row."""
    model: str
    """Name in the registry."""
    speed: float
    """Users per second on test."""
    accuracy: float
    """The metric on test, mean over seeds."""
    parameters: float = 0.0
    """Learned numbers, which the size of the point shows."""


def points_of(rows: Sequence[Row], metric: str) -> list[Point]:
    """The rows that were evaluated on test, all on the same log and with or without the items that users know."""
    asked = min((row.asked for row in rows), default=None)
    return [
        Point(
            row.name, row.model, row.mean("test/users_per_s"), row.mean(f"test/{metric}"), row.mean("train/parameters")
        )
        for row in rows
        if row.asked == asked and row.values("test/users_per_s") and row.values(f"test/{metric}")
    ]


def frontier(points: Sequence[Point], lower: bool = False) -> list[Point]:
    """Those that no other beats: none is both as fast and as accurate, and better in one. Slowest first.

    With `lower` a smaller figure is the more accurate one.
    """
    sign = -1 if lower else 1
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.speed, -sign * p.accuracy)):
        if not best or sign * point.accuracy > sign * best[-1].accuracy:
            best.append(point)
    return best[::-1]


def draw(comparison: Comparison, path: str) -> int:
    """Draws the rows to `path` and returns how many there are; UserError where none was evaluated on test."""
    title, metric = comparison.selection.title, comparison.metric
    points = points_of(comparison.rows, metric)
    if not points:
        raise UserError(f"no run of {title} has {metric} and requests per second on test; run jobs.evaluate first")
    if Path(path).suffix not in FORMATS:
        raise UserError(f"--pareto is {path}; give a name that ends in one of {', '.join(FORMATS)}")
    with rc_context({"text.parse_math": False}):  # names may hold $
        figure = picture(points, metric, f"{title}   (dashed: no other is both faster and better)")
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); choose another file") from error
    return len(points)


def plot(comparison: Comparison) -> list[Drawn]:
    """The picture for a page; none with fewer than two points."""
    points = points_of(comparison.rows, comparison.metric)
    if len(points) < 2:
        return []
    caption = (
        "Each row evaluated on test, larger points for more parameters; dashed: no other is both faster and better "
        "(SID-MLP, Figure 4). Speeds compare only where they were measured on the same machine, with the same batch."
    )
    return [("pareto", f"{comparison.metric} against throughput", caption, picture(points, comparison.metric, ""))]


def picture(points: Sequence[Point], metric: str, title: str) -> Figure:
    """The points, their frontier and their names."""
    figure, (axes,) = new_figure(1, width=8, height=5)
    colours = dict(zip(sorted({p.model for p in points}), COLOURS * len(points), strict=False))
    line = frontier(points, lower_is_better(metric))
    axes.plot(
        [p.speed for p in line], [p.accuracy for p in line], color="#999999", zorder=1, linestyle="--",
        drawstyle="steps-pre",
    )  # fmt: skip
    largest = max([p.parameters for p in points if p.parameters > 0], default=1.0)
    for point in points:
        share = point.parameters / largest if point.parameters > 0 else 0.0  # not logged: NaN
        axes.scatter(point.speed, point.accuracy, color=colours[point.model], s=30 + 120 * share**0.5, zorder=2)
    logarithmic(axes, x=True)
    axes.margins(x=0.12, y=0.12)
    if all(point.accuracy >= 0 for point in points):
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.2)
    axes.set_xlabel("requests per second on test (log scale)")
    axes.set_ylabel(f"test {metric}")
    axes.set_title(title, fontsize=11)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the labels find their places on axes that stay where they are
    label(axes, points)
    return figure


def label(axes: Axes, points: Sequence[Point]) -> None:
    """Writes each name beside its point, at the first of a few places that overlaps no other and stays inside."""
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    inside = axes.get_window_extent(renderer)
    spots = [axes.transData.transform((p.speed, p.accuracy)) for p in points]
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in spots]
    for point in sorted(points, key=lambda p: -p.accuracy):
        heights = sorted(range(-STEPS * LINE, STEPS * LINE + 1, LINE), key=abs)
        places = [(side, up) for up in heights for side in ("left", "right")]
        for side, up in places:
            line = {"arrowstyle": "-", "color": "#999999", "lw": 0.6, "relpos": (0.0 if side == "left" else 1.0, 0.5)}
            text = axes.annotate(
                point.label, (point.speed, point.accuracy), xytext=(9 if side == "left" else -9, up),
                textcoords="offset points", ha=side, va="center", fontsize=9, zorder=3,
                bbox={"facecolor": rcParams["figure.facecolor"], "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
                arrowprops=line if up else None,
            )  # fmt: skip
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without the line to its point
            fits = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if (fits and not any(box.overlaps(other) for other in taken)) or (side, up) == places[-1]:
                taken.append(box)
                break
            text.remove()
