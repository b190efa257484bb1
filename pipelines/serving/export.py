"""A trained student as one `.pt2` program, checked against the model that it was made from.

    python -m jobs.evaluate --checkpoint runs/sid_mlp --tables TABLES --sids SIDS --export student.pt2 --k 10

What the program takes and gives is in `models/retrieval/search/export.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.loaded_model import LoadedModel
from models.retrieval.search.export import export_student, load_exported
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit import to_device
from pipelines.evaluation.ranking import device_of
from pipelines.training.record import find_checkpoint

ROUNDING = 1e-5
"""Difference, relative and absolute, that float32 scores have by the order of their sums."""


def export(
    uri: str,
    inputs: Inputs,
    path: str,
    *,
    k: int = 20,
    batch_size: int = 256,
    device: str = "auto",
) -> int:
    """Writes the program of the checkpoint at `uri` to the file `path`; returns the requests that it was checked on.

    They are spread over the lengths of all histories and ranked as one batch, and the longest once more
    alone. Raises UserError for a checkpoint that is no student and a path that cannot be written, and
    RuntimeError where program and model disagree on anybody's top k (`differs`); then there is no file.
    """
    loaded = LoadedModel.load(find_checkpoint(uri), inputs, device_of(device))
    model, examples = loaded.model, loaded.load_examples(inputs, "next")
    count = min(batch_size, len(examples))
    rows = np.argsort(examples.lengths, kind="stable")[
        np.linspace(0, len(examples) - 1, count).astype(np.int64)
    ]
    target = Path(path).expanduser().absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            made = Path(folder, target.name)
            export_student(model, made, k)
            program = load_exported(made)
            for part in (rows, rows[-1:]):
                check(
                    program,
                    model,
                    to_device(examples.collate(part), model.tokens.items.device),
                    k,
                )
            made.replace(target)  # what is there has passed
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); choose another file"
        ) from error
    return count


def check(
    program: Callable[..., tuple[Tensor, Tensor]],
    model: Any,
    batch: dict[str, Tensor],
    k: int,
) -> None:
    """Raises RuntimeError where program and model rank otherwise for any user of the batch."""
    with torch.no_grad():
        expected = model.recommend(batch, k)
        found = program(batch["history"], batch["history_length"], batch["user"])
    if wrong := int(differs(*found, *expected).sum()):
        raise RuntimeError(
            f"the exported program ranks otherwise than the model for {wrong} of {len(expected[0])} requests"
        )


def differs(
    items: Tensor, scores: Tensor, model_items: Tensor, model_scores: Tensor
) -> Tensor:
    """(B,) bool: whose ranking (B, K) differs from the model's by more than rounding.

    Scores by rank must be close, and items the same but at ranks whose score a neighbour has too, up to
    rounding: there, and at the last rank for the one left out, rounding decides who comes first.
    """
    far = ~torch.isclose(scores, model_scores, rtol=ROUNDING, atol=ROUNDING)
    same = torch.isclose(
        model_scores[:, 1:], model_scores[:, :-1], rtol=ROUNDING, atol=ROUNDING
    )
    edge = same.new_ones((len(same), 1))
    tied = torch.cat([same, edge], 1) | torch.cat([~edge, same], 1)
    return (far | ((items != model_items) & ~tied)).any(1)
