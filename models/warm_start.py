"""Loading of a checkpoint into a model whose tables extend the training tables.

    messages = load_extended_weights(model, "runs/monday/best", metadata, num_items)

Old items keep their index, so they keep their rows. Rows of category values are matched
by name. A new value is initialised like the unknown value. A new item is initialised
as zero if that is the unknown item (`new_items_are_zeros`), otherwise as the mean of
the old items. Numbers and texts keep the scale of the first training
(`Catalogue.scales`), so the scores of old items do not change.

`Checkpoint.learned` has what this needs: `scales`; `names`, the values of the rows of
embedding tables by module; `until`, the end of the training window in ms, if the split
is by time; and `since`, the `until` of the previous run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import safetensors.torch
import torch
from torch import Tensor, nn

from core.errors import pluralize
from core.ids import hash_strings
from models.custom_features import EmbeddingTables, RowNames, Standardised
from models.training.checkpoint import (
    WEIGHTS,
    Checkpoint,
    OtherTablesError,
    verified,
)

EXTRA_STATE = "_extra_state"
"""Key under which PyTorch stores the result of a module's `get_extra_state`."""


def collect_row_names(model: nn.Module) -> dict[str, RowNames]:
    """Return the row names of embedding tables by module, as JSON values."""
    return {
        path: [None if names is None else list(names) for names in module.row_names]
        for path, module in model.named_modules()
        if isinstance(module, EmbeddingTables)
    }


def load_extended_weights(
    model: Any,
    uri: str | Path,
    metadata: Checkpoint,
    num_items: int,
    *,
    trains: bool = False,
) -> list[str]:
    """Load a checkpoint into a model whose tables extend the training tables.

    Args:
        model: Model on the new tables, with the scales of the checkpoint.
        uri: Path or URI of the checkpoint.
        metadata: `config.json` of the checkpoint.
        num_items: Number of items of the new tables.
        trains: Whether the model is trained next. The scales of constant features,
            which the old training could not learn, are then those of the new tables.

    Returns:
        Messages about new values and items.

    Raises:
        OtherTablesError: If the weights do not fit the model otherwise.
    """
    with verified(uri, WEIGHTS) as file:
        saved = safetensors.torch.load_file(file)
    old_tasks = set(metadata.learned.get("scales", {}).get("rates", {}))
    differing_tasks = old_tasks ^ set(model.labels)
    if old_tasks and differing_tasks:
        raise OtherTablesError(
            f"the tables and {uri} have different tasks, such as "
            f"{min(differing_tasks)}",
            "init",
        )
    messages = replace_constant_scales(model, saved) if trains else []
    modules = dict(model.named_modules())
    catalogue_buffers = set()
    row_names = {}  # in the checkpoint and in the model, by the name of the weights
    for path, module in modules.items():
        if not isinstance(module, EmbeddingTables):
            continue
        catalogue_buffers |= {f"{path}.{name}" for name in module.catalogue_buffers}
        old_names = metadata.learned.get("names", {}).get(path, ())
        # not strict: a table without a partner is refused when the weights are copied
        pairs = zip(old_names, module.row_names, strict=False)
        for index, (old, new) in enumerate(pairs):
            if old is not None:
                row_names[f"{path}.tables.{index}.weight"] = old, new
    targets: dict[str, Tensor] = model.state_dict()
    parameters = dict(model.named_parameters())
    loaded = set()  # addresses of tensors, as tied weights are saved once
    for name, weights in saved.items():
        module_path, _, key = name.rpartition(".")
        if key == EXTRA_STATE:
            model.get_submodule(module_path).set_extra_state(weights)
            continue
        target = targets.get(name)
        if target is not None:
            loaded.add(target.data_ptr())
        if name in catalogue_buffers:
            continue
        num_new = num_items - len(weights) if weights.ndim else 0
        if name in row_names:
            old, new = row_names[name]
            weights = extend_values(weights, len(targets[name]) - 1, old, new)
            num_values = len(set(new or ()) - set(old))
            if new is None:
                messages.append(f"many values: {name} is hashed now")
            elif num_values:
                messages.append(f"{pluralize(num_values, 'new value')} in {name}")
        elif num_new > 0 and target is not None and target.shape[:1] == (num_items,):
            # new items are zeros in a buffer, and in a module that has learned the
            # unknown item as a zero vector; otherwise they are the mean of old items
            tables = modules.get(name.partition(".tables.")[0])
            are_zeros = getattr(tables, "new_items_are_zeros", False)
            if name not in parameters or are_zeros:
                row = torch.zeros_like(weights[:1])
            else:
                row = weights.mean(0, keepdim=True)
            rows = row.expand(num_new, *weights.shape[1:])
            weights = torch.cat([weights, rows])
            messages.append(f"{pluralize(num_new, 'new item')} in {name}")
        if target is None or target.shape != weights.shape:
            shape = "none" if target is None else f"of {tuple(target.shape)}"
            raise OtherTablesError(
                f"{uri} does not fit the model: {name} is of {tuple(weights.shape)} "
                f"there and {shape} here",
                "init",
            )
        target.copy_(weights)
    for name, target in targets.items():
        if target.numel() and target.data_ptr() not in loaded:
            raise OtherTablesError(f"{uri} does not fit the model: it has no {name}")
    return messages


def replace_constant_scales(model: nn.Module, saved: dict[str, Tensor]) -> list[str]:
    """Replace the saved scales of constant features by the scales of the new tables.

    A feature is constant if it has a single value, or none, in the training events of
    the checkpoint. Its saved standard deviation is inf.

    Args:
        model: Model on the new tables.
        saved: Weights of the checkpoint, which are changed in place.

    Returns:
        Messages that name the features.
    """
    messages = []
    for path, module in model.named_modules():
        if not isinstance(module, Standardised):
            continue
        mean, std = saved.get(f"{path}.mean"), saved.get(f"{path}.std")
        if mean is None or std is None or std.shape != module.std.shape:
            continue  # the shapes are checked when the weights are copied
        messages += [
            f"{name} had no values or was constant before: its scale is taken from the "
            "new tables"
            for name in module.replace_constant_scales(mean, std)
        ]
    return messages


def extend_values(
    weights: Tensor, num_rows: int, old: Sequence[str], new: Sequence[str] | None
) -> Tensor:
    """Rearrange the saved weights of a category by its values.

    Args:
        weights: (1 + old values, D) saved weights; row 0 is the unknown value.
        num_rows: Number of rows of the new table, without row 0.
        old: Values of the saved rows from 1 on.
        new: Values of the new rows from 1 on; None if the new table is hashed.

    Returns:
        (1 + num_rows, D) weights, in which rows without an old value are copies of row
        0.
    """
    values = pa.array(old, pa.large_string())
    if new is None:
        row = hash_strings(values) % num_rows + 1
    else:
        position = pc.index_in(values, pa.array(new, pa.large_string()))
        row = pc.fill_null(position, -1).to_numpy().astype(np.int64) + 1
    rows = weights[:1].repeat(num_rows + 1, *[1] * (weights.ndim - 1))
    rows[torch.from_numpy(row[row > 0])] = weights[1:][torch.from_numpy(row > 0)]
    return rows
