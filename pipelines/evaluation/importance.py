"""Permutation importance: what a model loses where one of its inputs comes from another request.

    python -m jobs.evaluate --checkpoint runs/qgs --tables TABLES --text TEXT --importance true

An input is the history, text, or a group of features (the family's `shuffles`). Its values are exchanged at random
between the requests or candidates of a batch, and the metric that chose the checkpoint is measured again. The loss says
what the model makes of the input, not what the input could give: two inputs that say the same share their importance.
"""

from __future__ import annotations

import math
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models import checkpoint, registry
from models.inputs import Inputs
from models.setup import Loaded, score
from models.shuffles import Shuffle
from models.tables import UserError
from pipelines.evaluation.ranking import device_of
from pipelines.figures import COLOURS, new_figure, png
from pipelines.training.record import find_checkpoint


@dataclass(frozen=True)
class Loss:
    """What one input is worth."""

    mean: float
    """The metric less what is left of it where the input is exchanged, mean over the repeats."""
    deviation: float
    """Standard deviation over the repeats."""


@dataclass(frozen=True)
class Importance:
    """What was found."""

    metric: str
    """What was measured: the metric by which the training chose its checkpoint."""
    value: float
    """It, with all inputs as they are."""
    repeats: int
    """Random exchanges of each input."""
    losses: dict[str, Loss]
    """By input, the most important one first."""

    def metrics(self) -> dict[str, float]:
        """For MLflow and the evaluation's file."""
        found: dict[str, float] = {}
        for name, loss in self.losses.items():
            key = f"importance/{name.replace(': ', '_')}"
            found |= {key: loss.mean, f"{key}_sd": loss.deviation}
        return found

    def lines(self) -> list[str]:
        """As it is printed."""
        lines = [
            f"  importance: loss of {self.metric} ({self.value:.4f}) where an input comes from another row, "
            f"{self.repeats} times each"
        ]
        width = max(map(len, self.losses))
        lines += [
            f"    {name:<{width}}  {x.mean:+.4f} ± {x.deviation:.4f}"
            for name, x in self.losses.items()
        ]
        return lines

    def draw(self) -> bytes:
        """The plot, as PNG: a bar per input, with its deviation."""
        names, losses = list(self.losses), list(self.losses.values())
        figure, (axes,) = new_figure(1, width=6.4, height=0.9 + 0.32 * len(names))
        spread = [loss.deviation for loss in losses]
        axes.barh(
            range(len(names)),
            [loss.mean for loss in losses],
            xerr=spread,
            color=COLOURS[0],
            height=0.6,
        )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.axvline(0, color=COLOURS[6], lw=0.8)
        axes.set_xlabel(f"loss of {self.metric} (of {self.value:.4f})")
        axes.grid(axis="x", alpha=0.15)
        return png(figure)


def check_has_inputs(name: str) -> None:
    """UserError for a model whose family does not say what its inputs are."""
    if registry.find(name).family.ranks != "candidates":
        raise UserError(
            f"--importance asks what ranks candidates, and the model '{name}' ranks none; leave it out"
        )


def importance(
    uri: str,
    inputs: Inputs,
    *,
    split: str = "test",
    repeats: int = 5,
    batch_size: int = 256,
    device: str = "auto",
    seed: int = 0,
) -> Importance:
    """Measures the checkpoint at `uri` on the split, once as it is and `repeats` times per input without it."""
    uri = find_checkpoint(uri)
    check_has_inputs(checkpoint.read(uri).name)
    where = device_of(device)
    loaded = Loaded.of(uri, inputs, where)
    entry, model, examples = loaded.entry, loaded.model, loaded.examples(inputs, split)
    metric = loaded.about.fit.get("metric") or entry.measured.SHOWN[0]

    def measured(shuffle: Shuffle, seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        measure = partial(with_other, entry.measured.measure, shuffle, generator)
        return entry.measured.means(
            score(model, measure, examples, batch_size=batch_size, device=where)[0]
        )[metric]

    value = measured(lambda model, batch, generator: nullcontext(batch), seed)
    if math.isnan(value):
        raise UserError(
            f"{metric} is not defined on the split '{split}'; choose another --split"
        )
    losses = {}
    for name, shuffle in entry.family.shuffles(model, loaded.catalogue).items():
        lost = [value - measured(shuffle, seed + number) for number in range(repeats)]
        losses[name] = Loss(
            statistics.fmean(lost), statistics.stdev(lost) if repeats > 1 else 0.0
        )
    ordered = sorted(losses.items(), key=lambda pair: -pair[1].mean)
    return Importance(metric, value, repeats, dict(ordered))


def with_other(
    measure: Any,
    shuffle: Shuffle,
    generator: torch.Generator,
    model: Any,
    batch: dict[str, Tensor],
) -> dict[str, Any]:
    """What `measure` finds where the input comes from another row."""
    with shuffle(model, batch, generator) as exchanged:
        return dict(measure(model, exchanged))
