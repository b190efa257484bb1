"""A checkpoint, ready to look at: its model on a device, and the examples of a split that it would be evaluated on; and
the options that all who look at one have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from models import setup
from models.config import check_positive
from models.inputs import Inputs
from models.tables import UserError
from pipelines.evaluation.ranking import device_of
from pipelines.training.record import find_checkpoint


@dataclass
class Options:
    """Options."""

    checkpoint: str
    """Folder of a checkpoint, or of a finished run, whose best one is taken."""
    tables: str
    """TABLES: the folder that jobs.prepare made."""
    split: Literal["val", "test"] = "test"
    """Which requests to look at."""
    batch_size: int = 256
    """Requests per batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: a GPU where there is one."""

    def __post_init__(self) -> None:
        check_positive(self, ["batch_size"])


@dataclass(frozen=True)
class Loaded:
    """What is looked at."""

    uri: str
    """Folder of the checkpoint."""
    name: str
    """Its model in the registry."""
    model: Any
    """The model, in evaluation mode."""
    examples: Any
    """Of the split, with as much history as the model reads."""
    device: torch.device
    """Where the model is."""


def load(
    uri: str,
    tables: str,
    *,
    sids: str | None = None,
    text: str | None = None,
    split: str,
    device: str,
) -> Loaded:
    """Loads the checkpoint, or the best one of a run; UserError for a split without requests."""
    uri, inputs, where = (
        find_checkpoint(uri),
        Inputs(tables, sids, text),
        device_of(device),
    )
    made = setup.Loaded.of(uri, inputs, where)
    examples = made.examples(inputs, split)
    if len(examples) == 0:
        raise UserError(
            f"the split '{split}' of {inputs.tables} has no request with a history; choose another --split"
        )
    return Loaded(uri, made.about.name, made.model, examples, where)
