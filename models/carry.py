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

from models.checkpoint import WEIGHTS, Checkpoint, check_finite, local, whole
from models.config import pluralize
from models.tables import UserError

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
    model: nn.Module, uri: str | Path, about: Checkpoint, items: int
) -> list[str]:
    """Fills `model`, built on new tables of so many items and the old scales, with the weights of the checkpoint at
    `uri`; lines that say what is new. UserError where they do not fit otherwise."""
    with local(uri) as folder:
        old = safetensors.torch.load_file(whole(folder, WEIGHTS, uri))
    there, kept = model.state_dict(), {name for name, _ in of_content(model)}
    names, notes = dict(named_rows(model, about)), []
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
            raise UserError(
                f"{uri} does not fit the model: {name} is of {tuple(weights.shape)} there and {shape} here; give the "
                f"options of model.* that it was trained with"
            )
        filled.add(target.data_ptr())
        target.copy_(weights)
    if left := [
        name
        for name, tensor in there.items()
        if tensor.data_ptr() not in filled and tensor.numel()
    ]:
        raise UserError(
            f"{uri} does not fit the model: it has no {left[0]}; give a checkpoint of this model"
        )
    check_finite(model, uri)
    return notes


def of_content(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that hold what the catalogue says of items, and not what was learned."""
    for place, module in model.named_modules():
        for name in module.of_catalogue if isinstance(module, Tables) else ():
            yield f"{place}.{name}", getattr(module, name)


def named_rows(
    model: nn.Module, about: Checkpoint
) -> Iterator[tuple[str, tuple[Sequence[str], Sequence[str]]]]:
    """Weights whose rows have names: those of the training, and those of the model."""
    before: Mapping[str, Any] = about.learned.get("names", {})
    for place, now in names_of(model).items():
        for number, (old, new) in enumerate(
            zip(before.get(place, ()), now, strict=False)
        ):
            if old is not None and new is not None:
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
