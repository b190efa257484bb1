"""Build a model from options, or load a model from a checkpoint.

model = build_model({"name": "sasrec", "dim": 32}, catalogue)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models import registry
from models.model import Model
from models.training import checkpoint
from models.training.checkpoint import Checkpoint
from models.warm_start import load_extended_weights


def build_model(options: Mapping[str, Any], catalogue: Any) -> Model:
    """Build a model with random weights.

    Args:
        options: The model's `name`, and the options of its config.
        catalogue: Catalogue of the tables.
    """
    config = registry.build_model_config(options)
    return registry.find(config.name)(config, catalogue)


def load_model(uri: str | Path, catalogue: Any) -> tuple[Model, Checkpoint]:
    """Load the model of a checkpoint in evaluation mode.

    Args:
        uri: Path or URI of the checkpoint.
        catalogue: Catalogue of the training tables, or of tables that extend them, with
            the scales of the checkpoint.

    Returns:
        The model, and the checkpoint's `config.json`.
    """
    metadata = checkpoint.read(uri)
    checkpoint.check(metadata, uri, catalogue.versions, extending=True)
    model = build_model(metadata.model, catalogue)
    extended = [
        table
        for table, trained in metadata.hashes.items()
        if trained and trained != catalogue.hashes[table]
    ]
    if extended:
        load_extended_weights(model, uri, metadata, catalogue.num_items)
    else:
        checkpoint.load_weights(model, uri)
    return model.eval(), metadata
