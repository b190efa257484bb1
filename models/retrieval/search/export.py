"""Export of a student as one `torch.export` program, without this project's code.

    export_student(model, "student.pt2", k=10)
    recommend = load_exported("student.pt2")
    items, scores = recommend(history, history_length, user)

The program is the fast search with fixed beam, scores and k, and dynamic batch size and
history length. It contains the trie and the weights.
`torch.export.load("student.pt2").module()` loads it without this module.

Shapes: `B` users, `T` items of the longest history.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from models.cpu.fast import FastSearch
from models.dataset.encoding import PAD
from models.retrieval.data import HistoryBatch
from models.retrieval.students.sid_mlp import SidMlp
from models.storage.tables import UserError


class Program(nn.Module):
    """A student's search as a module for `torch.export`."""

    def __init__(self, student: SidMlp, k: int) -> None:
        """Build the module; `k` is the number of items to recommend."""
        super().__init__()
        self.student, self.k = student, k
        self.search = FastSearch(student)

    def forward(
        self, history: Tensor, history_length: Tensor, user: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Recommend items.

        Args:
            history: (B, T) item_index, padded with -1.
            history_length: (B,) number of items of each history.
            user: (B,) hash of the user, as in the batches of `models.retrieval.data`.

        Returns:
            Items and scores, (B, k) both.
        """
        config = self.student.config
        batch = HistoryBatch(history=history, history_length=history_length, user=user)
        return self.search(batch, self.k, config.beam, config.scores == "children")


def export_student(model: nn.Module, path: str | Path, k: int) -> None:
    """Export the search of a trained SID-MLP or SID-MLP++ as a program.

    The program has the beam width and the kind of scores of the model's config, and
    runs on the device of the model.

    Args:
        model: Trained student.
        path: File to write (.pt2).
        k: Number of items to recommend.

    Raises:
        UserError: If the fast path does not support the model, or k is below 1.
    """
    if not isinstance(model, SidMlp) or not model.supports_fast_search():
        raise UserError(
            f"a {type(model).__name__} of this config cannot be exported; use a "
            f"SID-MLP or SID-MLP++ without options of ablations"
        )
    if k < 1:
        raise UserError(f"k {k} is below 1; give the number of items to recommend")
    device = model.tokens.items.device
    longest = model.config.max_history
    history = torch.zeros((2, min(2, longest)), dtype=torch.long, device=device)
    history[1, 1:] = PAD
    length = torch.tensor([history.shape[1], 1], device=device)
    batch = Dim("batch", min=1)
    items = Dim("items", min=1, max=longest)
    with torch.no_grad():
        program = torch.export.export(
            Program(model, k).eval(),
            (history, length, torch.zeros(2, dtype=torch.long, device=device)),
            dynamic_shapes=(
                {0: batch, 1: items} if longest > 1 else {0: batch},
                {0: batch},
                {0: batch},
            ),
        )
    torch.export.save(program, str(path))


def load_exported(
    path: str | Path,
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Load an exported program as a function that also accepts empty batches."""
    program = cast(
        Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
        torch.export.load(str(path)).module(),
    )

    def recommend(
        history: Tensor, history_length: Tensor, user: Tensor
    ) -> tuple[Tensor, Tensor]:
        if len(history):
            return program(history, history_length, user)
        # a program needs at least one row
        items, scores = program(
            history.new_zeros((1, 1)), history_length.new_ones(1), user.new_zeros(1)
        )
        return items[:0], scores[:0]

    return recommend
