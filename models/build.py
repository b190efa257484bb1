"""Build a model from its options.

model = build_model({"name": "sasrec", "dim": 32}, catalogue)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models import registry
from models.model import Model
from models.storage import checkpoint
from models.storage.checkpoint import Checkpoint
from models.storage.tables import UserError
from models.warm_start import load_extended_weights


def parse_options(options: Mapping[str, Any]) -> tuple[type[Model], Any]:
    """Return the class and the config of a model, given its `name` and options.

    Raises:
        UserError: For an unknown model, an unknown option or an impossible value.
    """
    if "name" not in options:
        raise UserError(
            "the model has no name; add name: with one of " + ", ".join(registry.MODELS)
        )
    model_class = registry.find(options["name"])
    others = {key: value for key, value in options.items() if key != "name"}
    return model_class, model_class.parse_config(others)


def build_model(options: Mapping[str, Any], catalogue: Any) -> Model:
    """Build a model with random weights, given its `name` and options."""
    model_class, config = parse_options(options)
    return model_class(config, catalogue)


def load_model(
    uri: str | Path, catalogue: Any, name: str | None = None
) -> tuple[Model, Checkpoint]:
    """Load a checkpoint in evaluation mode.

    Args:
        uri: Where the checkpoint is.
        catalogue: Catalogue of the tables of its training, or of tables that extend
            them, with the checkpoint's scales.
        name: Name of the model that is expected, if any.

    Returns:
        The model, and the checkpoint's `config.json`.
    """
    about = checkpoint.read(uri)
    checkpoint.check(about, uri, catalogue.versions, name, extending=True)
    model = build_model(about.model, catalogue)
    if any(
        value and value != catalogue.hashes[table]
        for table, value in about.hashes.items()
    ):
        load_extended_weights(model, uri, about, catalogue.num_items)
    else:
        checkpoint.load_weights(model, uri)
    return model.eval(), about
