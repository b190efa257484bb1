"""Build a model from options, or load a model from a checkpoint, with its catalogue.

model = build_model({"name": "sasrec", "dim": 32}, catalogue)
loaded = LoadedModel.load("runs/tiger/best", Inputs(tables, sids), device="cuda")
examples = Dataset.load(loaded.model, loaded.catalogue, "test")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from core.errors import UserError
from core.schemas import Inputs
from core.tables import Table
from models import own_code, registry
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
        if trained and trained != catalogue.versions[table].hash
    ]
    if extended:
        load_extended_weights(model, uri, metadata, catalogue.num_items)
    else:
        checkpoint.load_weights(model, uri)
    return model.eval(), metadata


@dataclass(frozen=True)
class LoadedModel:
    """A trained model in evaluation mode, on its device."""

    checkpoint: Checkpoint
    """Content of the checkpoint's `config.json`."""
    model: Any
    """The model, a `Model`."""
    catalogue: Any
    """Catalogue of the tables with which the model is loaded."""

    @classmethod
    def load(
        cls,
        uri: str,
        inputs: Inputs,
        device: torch.device | str = "cpu",
        trust_code: bool = False,
    ) -> Self:
        """Load a checkpoint with tables that equal or extend the training tables.

        Args:
            uri: Path or URI of the checkpoint.
            inputs: Folders of the tables.
            device: Device of the model.
            trust_code: Whether to run code that the checkpoint contains.
        """
        metadata = checkpoint.read(uri)
        own_code.accept_code(metadata.code, uri, trust_code)
        catalogue = load_catalogue(
            metadata.name, inputs, metadata.learned.get("scales")
        )
        model, _ = load_model(uri, catalogue)
        return cls(metadata, model.to(device), catalogue)


def check_kind(name: str, versions: Mapping[str, Table[Any]]) -> None:
    """Raise UserError if the model `name` reads sequences of another kind."""
    kind, expected = versions["sequences"].info.kind, registry.find(name).kind.name
    if kind != expected:
        raise UserError(f"'{name}' is of {expected}, and the tables of {kind}", "kind")


def load_catalogue(
    name: str, inputs: Inputs, scales: Mapping[str, Any] | None = None
) -> Any:
    """Load the catalogue of a model.

    Args:
        name: Name of the model.
        inputs: Folders of the tables.
        scales: Scales of a checkpoint with which features are read; None to use the
            scales of the tables.
    """
    model_class = registry.find(name)
    inputs = inputs.select(name, model_class.extra_inputs)
    catalogue = model_class.catalogue_class.load(inputs, scales)
    check_kind(name, catalogue.versions)
    return catalogue


def read_versions(name: str, inputs: Inputs) -> dict[str, Table[Any]]:
    """Open the tables of the model `name`."""
    model_class = registry.find(name)
    inputs = inputs.select(name, model_class.extra_inputs)
    versions = inputs.versions(model_class.catalogue_class.tables)
    check_kind(name, versions)
    return versions
