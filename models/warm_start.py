"""Load the weights of a checkpoint into a model on tables that extend those of its training.

    messages = load_extended_weights(model, "runs/monday/best", about, catalogue.num_items)

Old items keep their rows, as they keep their index. Rows of category values are found
by name. A new value begins as the unknown value does. A new item begins as the unknown
item if the model learns one (`id_dropout`), otherwise as the mean of all items; its
content is read like that of old items. Numbers and texts keep the scale of the first
training (`Catalogue.scales`), so the scores of old items stay the same.

For this, `learned` of a checkpoint holds `scales`; `names`, the values of the rows of
embedding tables by module; `until`, the time in ms before which training requests lie,
if the split is by time; and `since`, the `until` of the run before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import safetensors.torch
import torch
from torch import Tensor, nn

from models.config import pluralize
from models.layers.standardised import Standardised
from models.retrieval.data import hash_strings
from models.storage.checkpoint import (
    WEIGHTS,
    Checkpoint,
    OtherTablesError,
    check_finite,
    local,
    verify_file,
)

RowNames = Sequence[Sequence[str] | None]
"""Of each embedding table, the values of its rows from 1 on; None if they have no
names."""

EXTRA_STATE = "_extra_state"
"""Key under which PyTorch stores what a module's `get_extra_state` returns."""


class EmbeddingTables(nn.Module):
    """A module with a list `tables` of embeddings, whose row 0 is the unknown value."""

    row_names: RowNames = ()
    """Values of the rows from 1 on of each table; None if they have no names."""
    catalogue_buffers: tuple[str, ...] = ()
    """Names of buffers with content of the catalogue, which is not learned."""
    id_dropout = 0.0
    """Share of ids that count as unknown in training."""


def collect_row_names(model: nn.Module) -> dict[str, RowNames]:
    """Return the row names of the embedding tables of each module, as JSON values."""
    return {
        path: [None if names is None else list(names) for names in module.row_names]
        for path, module in model.named_modules()
        if isinstance(module, EmbeddingTables)
    }


def load_extended_weights(
    model: Any,
    uri: str | Path,
    about: Checkpoint,
    num_items: int,
    *,
    trains: bool = False,
) -> list[str]:
    """Fill a model with the weights of a checkpoint whose tables its own tables extend.

    Args:
        model: Model on the new tables, with the scales of the checkpoint.
        uri: Where the checkpoint is.
        about: `config.json` of the checkpoint.
        num_items: Items of the new tables.
        trains: Whether the model is trained next. What the old training could not learn
            is then initialised from the new tables: features without spread, and tasks
            without positives or without negatives.

    Returns:
        Messages about new values and items.

    Raises:
        OtherTablesError: If the weights do not fit the model otherwise.
    """
    with local(uri) as folder:
        saved = safetensors.torch.load_file(verify_file(folder, WEIGHTS, uri))
    check_tasks(model, about, uri)
    messages = []
    if trains:
        messages += keep_new_scales(model, saved)
        messages += keep_new_rates(model, saved, about)
    targets: dict[str, Tensor] = model.state_dict()
    from_catalogue = set(list_catalogue_buffers(model))
    names = dict(pair_row_names(model, about))
    loaded = set()  # addresses, as tied weights are saved once
    for name, weights in saved.items():
        module, _, key = name.rpartition(".")
        if key == EXTRA_STATE:
            model.get_submodule(module).set_extra_state(weights)
            continue
        target = targets.get(name)
        if target is not None and name in from_catalogue:
            loaded.add(target.data_ptr())
            continue
        if target is not None and name in names:
            weights, added = extend_values(name, weights, len(target) - 1, *names[name])
            messages += added
        elif target is not None and len(target.shape) and len(target) == num_items:
            weights, added = extend_items(model, name, weights, num_items)
            messages += added
        if target is None or target.shape != weights.shape:
            shape = "none" if target is None else f"of {tuple(target.shape)}"
            raise OtherTablesError(
                f"{uri} does not fit the model: {name} is of {tuple(weights.shape)} there "
                f"and {shape} here; give the options of model.* that it was trained with, "
                "or train a model anew, without --init"
            )
        target.copy_(weights)
        loaded.add(target.data_ptr())
    for name, tensor in targets.items():
        if tensor.numel() and tensor.data_ptr() not in loaded:
            raise OtherTablesError(
                f"{uri} does not fit the model: it has no {name}; give a checkpoint of "
                "this model, or train a model anew"
            )
    check_finite(model, uri)
    return messages


def keep_new_scales(model: nn.Module, saved: dict[str, Tensor]) -> list[str]:
    """Replace the saved scales of features without spread by the scales of the model.

    Returns:
        Messages that name the features.
    """
    messages = []
    for path, module in model.named_modules():
        if not isinstance(module, Standardised):
            continue
        mean, std = saved.get(f"{path}.mean"), saved.get(f"{path}.std")
        if mean is None or std is None or std.shape != module.std.shape:
            continue  # refused when the weights are copied
        messages += [
            f"{name} had no values or no spread before: it takes the scale of these tables"
            for name in module.keep_new_scales(mean, std)
        ]
    return messages


def keep_new_rates(
    model: Any, saved: dict[str, Tensor], about: Checkpoint
) -> list[str]:
    """Replace the saved biases of tasks that were constant by the biases of the model.

    Returns:
        Messages that name the tasks.
    """
    old_rates = about.learned.get("scales", {}).get("rates", {})
    messages = []
    for task, (name, rate) in enumerate(
        zip(model.labels, model.train_rates, strict=False)
    ):
        if old_rates.get(name) in (0, 1) and 0 < rate < 1:
            bias = model.get_parameter("head.bias")
            saved["head.bias"][task] = bias[task].detach()
            messages.append(
                f"task {name} was {old_rates[name]:g} for all before: its bias begins at "
                f"its rate, {rate:.4f}"
            )
    return messages


def list_catalogue_buffers(model: nn.Module) -> Iterator[str]:
    """Yield the names of buffers with content of the catalogue, which is not learned."""
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingTables):
            for name in module.catalogue_buffers:
                yield f"{path}.{name}"


def check_tasks(model: Any, about: Checkpoint, uri: str | Path) -> None:
    """Raise OtherTablesError if the tables have other tasks than the training had."""
    old_tasks = set(about.learned.get("scales", {}).get("rates", {}))
    others = old_tasks ^ set(model.labels)
    if old_tasks and others:
        raise OtherTablesError(
            f"the tasks of these tables are not those of {uri}, such as {min(others)}: "
            "train a model anew, without --init; tables that jobs.prepare makes with "
            "--append from the first day on keep their tasks"
        )


def pair_row_names(
    model: nn.Module, about: Checkpoint
) -> Iterator[tuple[str, tuple[Sequence[str], Sequence[str] | None]]]:
    """Yield the weights whose rows have names in the checkpoint.

    With each: its row names in the checkpoint, and in the model; None if hashed there.
    """
    old_names: Mapping[str, Any] = about.learned.get("names", {})
    for path, tables in collect_row_names(model).items():
        pairs = zip(old_names.get(path, ()), tables, strict=False)
        for i, (old, new) in enumerate(pairs):
            if old is not None:
                yield f"{path}.tables.{i}.weight", (old, new)


def extend_values(
    name: str,
    weights: Tensor,
    num_rows: int,
    old: Sequence[str],
    new: Sequence[str] | None,
) -> tuple[Tensor, list[str]]:
    """Return the weights of a category's new values, and messages.

    Args:
        name: Name of the weights.
        weights: (1 + old values, D) saved weights.
        num_rows: Rows of the new table without row 0.
        old: Values of the saved rows.
        new: Values of the new rows; None if the new table is hashed.
    """
    if new is None:
        message = f"values of {name} are hashed now, as they are many"
        return assign_by_hash(weights, old, num_rows), [message]
    weights = assign_by_name(weights, old, new)
    num_new = len(set(new) - set(old))
    if not num_new:
        return weights, []
    return weights, [f"{pluralize(num_new, 'new value')} in {name}"]


def assign_by_name(weights: Tensor, old: Sequence[str], new: Sequence[str]) -> Tensor:
    """Return (1 + new, D) rows by name out of (1 + old, D); row 0 for new values."""
    index = pc.index_in(pa.array(new, pa.string()), pa.array(old, pa.string()))
    rows = pc.fill_null(index, -1).to_numpy() + 1
    return weights[torch.from_numpy(np.append(0, rows))]


def assign_by_hash(weights: Tensor, old: Sequence[str], buckets: int) -> Tensor:
    """Return (1 + buckets, D) rows by the values' hash out of (1 + old, D) rows by value.

    A bucket without an old value begins as the unknown value, row 0.
    """
    hashed = weights[:1].repeat(buckets + 1, *[1] * (weights.ndim - 1))
    if len(old):
        hashes = hash_strings(pa.array(old, pa.large_string()))
        hashed[torch.from_numpy(hashes % buckets + 1)] = weights[1:]
    return hashed


def extend_items(
    model: nn.Module, name: str, weights: Tensor, num_items: int
) -> tuple[Tensor, list[str]]:
    """Return (num_items, ...) weights of all items, and messages.

    The rows of new items are zeros in a buffer, and in the table of a module that has
    learned the unknown item; elsewhere they are the mean of the old items.
    """
    num_new = num_items - len(weights) if weights.ndim else 0
    if num_new <= 0:
        return weights, []
    parameters = {parameter for parameter, _ in model.named_parameters()}
    if name not in parameters or has_unknown_item(model, name):
        row = torch.zeros_like(weights[:1])
    else:
        row = weights.mean(0, keepdim=True)
    rows = row.expand(num_new, *weights.shape[1:])
    return torch.cat([weights, rows]), [f"{pluralize(num_new, 'new item')} in {name}"]


def has_unknown_item(model: nn.Module, name: str) -> bool:
    """Return whether the module of these weights has learned a zero vector as unknown item."""
    path, is_table, _ = name.partition(".tables.")
    module = model.get_submodule(path) if is_table else model
    return isinstance(module, EmbeddingTables) and module.id_dropout > 0
