"""A checkpoint, ready to look at: its model on a device, and the examples of a split that it would be evaluated on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from models import setup
from models.inputs import Inputs
from models.tables import UserError
from pipelines.evaluation.ranking import device_of
from pipelines.training.record import find_checkpoint


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


def load(uri: str, tables: str, *, sids: str | None = None, text: str | None = None, split: str, device: str) -> Loaded:
    """Loads the checkpoint, or the best one of a run; UserError for a split without requests."""
    uri, inputs, where = find_checkpoint(uri), Inputs(tables, sids, text), device_of(device)
    made = setup.Loaded.of(uri, inputs, where)
    examples = made.examples(inputs, split)
    if len(examples) == 0:
        raise UserError(f"the split '{split}' of {inputs.tables} has no request with a history; choose another --split")
    return Loaded(uri, made.about.name, made.model, examples, where)
