"""Gated DeltaNet and Mamba2 as decoders: steps, padding, cost and configs."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from models.loaded_model import build_model
from models.retrieval import retriever
from models.retrieval.distillation.student import Student
from models.retrieval.students.recurrent import RecurrentScorer
from tests.fixtures.small_retrieval import (
    TEACHER,
    build_catalogue,
    build_tiger,
    make_requests,
)

SMALL: dict[str, dict[str, Any]] = {
    "gdn": {"num_layers": 2, "heads": 2, "head_width": 6, "ffn_width": 24, "chunk": 8},
    "mamba2": {"num_layers": 2, "width": 24, "head_width": 12, "state": 10, "chunk": 8},
}
NAMES = sorted(SMALL)


def build_student(name: str, **options: Any) -> Student:
    """Return a student of `build_tiger()` with random weights.

    Its log-probabilities are far from uniform.
    """
    torch.manual_seed(1)
    options = {"name": name, "teacher_model": TEACHER, **SMALL[name], **options}
    model: Any = build_model(options, build_catalogue())
    model.set_teacher(build_tiger())
    for key, parameter in model.named_parameters():
        if "heads" in key:
            torch.nn.init.normal_(parameter.data)
    return model.eval()


@pytest.mark.parametrize("name", NAMES)
def test_requests_with_large_beam_states_are_searched_in_parts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = build_student(name), make_requests(7)
    expected_items, expected_scores = model.recommend(batch, 5, beam=4)
    beam_bytes = 3 * 4 * model.decoder.beam_bytes  # 3 requests of 4 beams
    state_bytes = []
    step = RecurrentScorer.step

    def record_step(self: RecurrentScorer, parents: Tensor, tokens: Tensor) -> Tensor:
        log_probs = step(self, parents, tokens)
        parts = chain.from_iterable(self.states)
        state_bytes.append(sum(part.nbytes for part in parts))
        return log_probs

    monkeypatch.setattr(RecurrentScorer, "step", record_step)
    monkeypatch.setattr(retriever, "MAX_BEAM_BYTES", beam_bytes)
    items, scores = model.recommend(batch, 5, beam=4)

    assert items.tolist() == expected_items.tolist()
    torch.testing.assert_close(scores, expected_scores)
    assert max(state_bytes) == beam_bytes
    empty = batch.select("B", slice(0))
    assert model.recommend(empty, 5)[0].shape == (0, 5)
