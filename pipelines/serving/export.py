r"""Export a trained student as one `.pt2` program, and compare it with its model.

    python -m jobs.evaluate --checkpoint runs/sid_mlp --tables TABLES --sids SIDS \
        --export student.pt2 --k 10

`models/retrieval/search/export.py` documents the inputs and outputs of the program.
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
from models.retrieval.data import HistoryBatch
from models.retrieval.search.export import export_student, load_exported
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from pipelines.evaluation.checks import resolve_device
from pipelines.training.record import find_checkpoint

ROUNDING = 1e-5
"""Relative and absolute tolerance for float32 scores, which are summed in another
order."""


def export(
    uri: str,
    inputs: Inputs,
    path: str,
    *,
    k: int = 20,
    batch_size: int = 256,
    device: str = "auto",
) -> int:
    """Export a checkpoint as a program, and compare it with the model.

    Program and model rank a batch of requests with short to long histories, and the
    request with the longest history once more alone. No file is written if a ranking
    differs.

    Args:
        uri: Folder of a checkpoint, or of a run, whose best checkpoint is used.
        inputs: Folders of the tables, semantic IDs and text embeddings.
        path: Path of the program's file.
        k: Number of items per ranking.
        batch_size: Largest number of requests to compare.
        device: `cpu`, `cuda` or `auto`.

    Returns:
        The number of requests that were compared.

    Raises:
        UserError: If the checkpoint is not of a student, or the file cannot be
            written.
        RuntimeError: If program and model disagree.
    """
    loaded = LoadedModel.load(find_checkpoint(uri), inputs, resolve_device(device))
    model, examples = loaded.model, loaded.load_examples(inputs, "next")
    count = min(batch_size, len(examples))
    # compare histories of all lengths, from the shortest to the longest
    spread = np.linspace(0, len(examples) - 1, count).astype(np.int64)
    rows = np.argsort(examples.lengths, kind="stable")[spread]
    target = Path(path).expanduser().absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            file = Path(folder, target.name)
            export_student(model, file, k)
            program = load_exported(file)
            for checked_rows in (rows, rows[-1:]):
                batch = examples.collate(checked_rows)
                check_program(program, model, batch.to(model.tokens.items.device), k)
            file.replace(target)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); choose another file"
        ) from error
    return count


def check_program(
    program: Callable[..., tuple[Tensor, Tensor]],
    model: Any,
    batch: HistoryBatch,
    k: int,
) -> None:
    """Check that a program ranks a batch as its model does.

    Args:
        program: Exported program.
        model: Model from which the program was exported.
        batch: Requests to rank by both.
        k: Number of items per ranking.

    Raises:
        RuntimeError: If a ranking differs.
    """
    with torch.no_grad():
        expected = model.recommend(batch, k)
        exported = program(batch.history, batch.history_length, batch.user)
    num_different = int(differs(*exported, *expected).sum())
    if num_different:
        raise RuntimeError(
            f"the exported program ranks otherwise than the model for {num_different} "
            f"of {len(expected[0])} requests"
        )


def differs(
    items: Tensor, scores: Tensor, model_items: Tensor, model_scores: Tensor
) -> Tensor:
    """Return which rankings differ from the model's by more than rounding.

    The scores of each rank must be close. Items may differ at ranks where rounding
    decides the order: ranks whose score is close to a neighbouring rank's, and the last
    rank, whose next neighbour is not part of the ranking.

    Args:
        items: (B, K) items of the program.
        scores: (B, K) scores of the program.
        model_items: (B, K) items of the model.
        model_scores: (B, K) scores of the model.

    Returns:
        (B,) bool, whether a ranking differs.
    """
    is_close = torch.isclose(scores, model_scores, rtol=ROUNDING, atol=ROUNDING)
    ties_next = torch.isclose(
        model_scores[:, 1:], model_scores[:, :-1], rtol=ROUNDING, atol=ROUNDING
    )
    last = ties_next.new_ones((len(ties_next), 1))
    is_tied = torch.cat([ties_next, last], 1) | torch.cat([~last, ties_next], 1)
    return (~is_close | ((items != model_items) & ~is_tied)).any(1)
