"""An evaluation that is checked as far as that goes without Ray and MLflow, whose imports take seconds."""

from __future__ import annotations

from typing import Any

from models import checkpoint, registry
from models.checkpoint import Checkpoint
from models.inputs import Inputs
from models.setup import hashes_of, of_training
from models.tables import UserError
from pipelines.training.record import find_checkpoint


def check(uri: str, inputs: Inputs, options: dict[str, Any]) -> Checkpoint:
    """What the checkpoint, or the best one of a run, says of itself; UserError where it takes other tables, or its
    model has no such options of `recommend`."""
    uri = find_checkpoint(uri)
    about = checkpoint.read(uri)
    recommend_options(about.name, options)
    given = hashes_of(about.name, inputs)
    checkpoint.check(about, uri, dict(of_training(given, about)))
    return about


def recommend_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Those options that were given; UserError where the model has no such option, or refuses its value."""
    chosen = {key: value for key, value in given.items() if value is not None}
    known = registry.recommend_options(name)
    for key in chosen:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UserError(f"the model '{name}' has no option --{key} when recommending; {takes}")
    if options := registry.find(name).recommends:
        try:
            options(**chosen)
        except ValueError as error:
            raise UserError(str(error)) from error
    return chosen
