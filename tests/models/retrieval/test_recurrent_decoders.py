"""Gated DeltaNet and Mamba2 as decoders: steps, padding, cost and configs."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from models.retrieval import retriever
from models.retrieval.students.recurrent import RecurrentScorer
from tests.fixtures.small_retrieval import build_taught, make_requests
from tests.fixtures.trainings import CASES


def test_requests_with_large_beam_states_are_searched_in_parts(monkeypatch):
    model = build_taught(spread=1.0, **CASES["gdn"])
    batch = make_requests(7)
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
