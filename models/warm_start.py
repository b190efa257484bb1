"""A checkpoint's weights for a model on tables that extend those of its training: those of the next day.

    notes = carry(model, "runs/monday/best", about, catalogue.num_items)

Old items keep their rows, as they keep their numbers. Values of categories are found by name. A new value begins as the
unknown one does, a new item as the unknown item where the model learns one (`id_dropout`), else as the mean of all
items; what is known of its content is read as ever. Numbers and texts keep the scale of the first training
(`Catalogue.scales`), so that what the model says of old items stays the same.

A checkpoint's `learned` holds for that `scales`; `names`, the values that rows of tables are of, by module; `until`,
the time in ms up to which requests were trained on, where the split is by time; and `since`, that of the run before.
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

Names = Sequence[Sequence[str] | None]

EXTRA_STATE = "_extra_state"
"""Key under which PyTorch stores what a module's `get_extra_state` returns."""


class Tables(nn.Module):
    """A module with `tables` of vectors."""

    names: Names = ()
    """Of each, the values that rows from 1 on are of; None where they have no names."""
    of_catalogue: tuple[str, ...] = ()
    """Buffers that hold what the catalogue says of items, and not what was learned."""
    id_dropout = 0.0
    """Share of ids that count as unknown in training."""


def names_of(model: nn.Module) -> dict[str, Names]:
    """By module, of each of its `tables` the values that rows from 1 on are of; None where they have no names."""
    return {
        place: [None if values is None else list(values) for values in module.names]
        for place, module in model.named_modules()
        if isinstance(module, Tables)
    }


def carry(
    model: nn.Module,
    uri: str | Path,
    about: Checkpoint,
    items: int,
    learns: bool = False,
) -> list[str]:
    """Fill `model` with the weights of the checkpoint at `uri`, which was trained on tables that the model's extend.

    Args:
        model: built on new tables of `items` items and the old scales.
        uri: where the checkpoint is.
        about: its config.json.
        items: items of the new tables.
        learns: whether the model is trained next. It then begins anew with what the old training could not learn:
            features without spread, and tasks without positives or without negatives.

    Returns:
        Lines that say what is new.

    Raises:
        OtherTablesError: where the weights do not fit otherwise.
    """
    with local(uri) as folder:
        old = safetensors.torch.load_file(verify_file(folder, WEIGHTS, uri))
    check_tasks(model, about, uri)
    there, kept = model.state_dict(), {name for name, _ in of_content(model)}
    names, notes = dict(named_rows(model, about)), list[str]()
    if learns:
        notes += [*keep_new_scales(model, old), *keep_new_rates(model, old, about)]
    parameters = {name for name, _ in model.named_parameters()}
    filled = set()
    for name, weights in old.items():
        module, _, key = name.rpartition(".")
        if key == EXTRA_STATE:
            model.get_submodule(module).set_extra_state(weights)
            continue
        if (target := there.get(name)) is not None and name in kept:
            filled.add(target.data_ptr())
            continue
        if target is not None and name in names:
            before, now = names[name]
            if now is None:
                weights = by_hash(weights, before, len(target) - 1)
                notes.append(f"values of {name} are hashed now, as they are many")
            else:
                weights = by_name(weights, before, now)
                if new := len(set(now) - set(before)):
                    notes.append(f"{pluralize(new, 'new value')} in {name}")
        elif (
            target is not None and weights.ndim and len(weights) < len(target) == items
        ):
            notes.append(f"{pluralize(items - len(weights), 'new item')} in {name}")
            weights = longer(
                weights,
                items,
                zero=name not in parameters or knows_unknown(model, name),
            )
        if target is None or target.shape != weights.shape:
            shape = "none" if target is None else f"of {tuple(target.shape)}"
            raise OtherTablesError(
                f"{uri} does not fit the model: {name} is of {tuple(weights.shape)} there and {shape} here; give the "
                f"options of model.* that it was trained with, or train a model anew, without --init"
            )
        filled.add(target.data_ptr())
        target.copy_(weights)
    if left := [
        name
        for name, tensor in there.items()
        if tensor.data_ptr() not in filled and tensor.numel()
    ]:
        raise OtherTablesError(
            f"{uri} does not fit the model: it has no {left[0]}; give a checkpoint of this model, or train a model anew"
        )
    check_finite(model, uri)
    return notes


def keep_new_scales(model: nn.Module, old: dict[str, Tensor]) -> list[str]:
    """Replace, in the weights of a checkpoint, the scales of features that had no spread by those of the model."""
    notes = []
    for place, module in model.named_modules():
        if not isinstance(module, Standardised):
            continue
        mean, std = (old.get(f"{place}.{name}") for name in ("mean", "std"))
        if mean is None or std is None or std.shape != module.std.shape:
            continue  # which the caller refuses
        notes += [
            f"{name} had no values or no spread before: it takes the scale of these tables"
            for name in module.keep_new_scales(mean, std)
        ]
    return notes


def keep_new_rates(model: Any, old: dict[str, Tensor], about: Checkpoint) -> list[str]:
    """Replace, in the weights of a checkpoint, the biases of tasks that were constant by those of the model."""
    before = about.learned.get("scales", {}).get("rates", {})
    rates = dict(zip(model.labels, model.train_rates, strict=False))
    notes = []
    for place, (name, rate) in enumerate(rates.items()):
        if before.get(name) in (0, 1) and 0 < rate < 1:
            old["head.bias"][place] = model.get_parameter("head.bias")[place].detach()
            notes.append(
                f"task {name} was {before[name]:g} for all before: its bias begins at its rate, {rate:.4f}"
            )
    return notes


def of_content(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that hold what the catalogue says of items, and not what was learned."""
    for place, module in model.named_modules():
        for name in module.of_catalogue if isinstance(module, Tables) else ():
            yield f"{place}.{name}", getattr(module, name)


def check_tasks(model: Any, about: Checkpoint, uri: str | Path) -> None:
    """Raise OtherTablesError where the tables have other tasks than the training had."""
    before = about.learned.get("scales", {}).get("rates", {})
    other = {*before} ^ {*model.labels} if before else set()
    if other:
        raise OtherTablesError(
            f"the tasks of these tables are not those of {uri}, such as {min(other)}: train a model anew, without "
            f"--init; tables that jobs.prepare makes with --append from the first day on keep their tasks"
        )


def named_rows(
    model: nn.Module, about: Checkpoint
) -> Iterator[tuple[str, tuple[Sequence[str], Sequence[str] | None]]]:
    """Yield weights whose rows have names in the checkpoint: these names, and those of the model, None if hashed."""
    before: Mapping[str, Any] = about.learned.get("names", {})
    for place, now in names_of(model).items():
        for number, (old, new) in enumerate(
            zip(before.get(place, ()), now, strict=False)
        ):
            if old is not None:
                yield f"{place}.tables.{number}.weight", (old, new)


def by_name(weights: Tensor, before: Sequence[str], now: Sequence[str]) -> Tensor:
    """(1 + now, D) of (1 + before, D): the rows of values by their names, that of row 0 for new ones."""
    found = (
        pc.fill_null(
            pc.index_in(pa.array(now, pa.string()), pa.array(before, pa.string())), -1
        ).to_numpy()
        + 1
    )
    return weights[torch.from_numpy(np.append(0, found))]


def by_hash(weights: Tensor, before: Sequence[str], buckets: int) -> Tensor:
    """Return (1 + buckets, D) rows by the hash of values from the rows (1 + before, D) by value.

    A bucket without an old value begins as the unknown value, row 0.
    """
    found = weights[:1].repeat(buckets + 1, *[1] * (weights.ndim - 1))
    if len(before):
        hashes = hash_strings(pa.array(before, pa.large_string()))
        found[torch.from_numpy(hashes % buckets + 1)] = weights[1:]
    return found


def longer(weights: Tensor, rows: int, zero: bool) -> Tensor:
    """(rows, ...) of fewer: new ones are of zeros, or of the mean of the others."""
    one = torch.zeros_like(weights[:1]) if zero else weights.mean(0, keepdim=True)
    return torch.cat([weights, one.expand(rows - len(weights), *weights.shape[1:])])


def knows_unknown(model: nn.Module, name: str) -> bool:
    """Whether the module of the weights has learned what an unknown item is, which then is a vector of zeros."""
    module = (
        model.get_submodule(name.split(".tables.")[0]) if ".tables." in name else model
    )
    return isinstance(module, Tables) and module.id_dropout > 0
