"""Attention as `transformers` has it, and what a search without the trie loses, counted by loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_retrieval import SIZES, catalogue, requests, row_of, tiger

from models.retrieval.search.generate import as_transformers
from papers.diagnose import attention_received, lost_without_trie
from tests.models.retrieval.test_joint import started


def test_attention_is_that_of_transformers() -> None:
    model, batch = tiger(), requests(5)
    received, lengths = attention_received(model.backbone, batch)
    assert received.shape == (3, 5, 22)
    torch.testing.assert_close(received.sum(2), torch.ones(3, 5))
    library = as_transformers(model.backbone, model.decoder).eval()
    library.set_attn_implementation("eager")
    for row in range(5):
        tokens = model.tokens.history(batch)[row : row + 1, : lengths[row]]
        weights = library.encoder(tokens, output_attentions=True).attentions
        for layer in range(3):
            expected = weights[layer][0].mean(
                (0, 1)
            )  # over heads and positions that ask
            torch.testing.assert_close(
                received[layer, row, : lengths[row]], expected, rtol=1e-4, atol=1e-6
            )
            assert not received[layer, row, lengths[row] :].any()


def log_probs(model: Any, history: Any, code: list[int]) -> list[torch.Tensor]:
    """(O_l,) of each level: over all that the decoder predicts there."""
    return [
        logits[0].log_softmax(-1)
        for logits in model.decoder.teacher_forced(history, torch.tensor([code]))
    ]


@pytest.mark.parametrize("beam", [1, 4, 200])
@pytest.mark.parametrize("name", ["earn", "nezha"])
@torch.no_grad()
def test_lost_codes_are_counted(name: str, beam: int) -> None:
    model, batch = started({"name": name}), requests(3)
    history = model.encode(batch)
    found = lost_without_trie(model.decoder.scorer(history), model.trie, beam)
    codes = {tuple(code) for code in catalogue().sids.tolist()}
    for row in range(3):
        beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        for level, size in enumerate(SIZES):
            scored = []
            for prefix, score in beams:
                digit = log_probs(
                    model, row_of(history, row), [*prefix, *[0] * (4 - level)]
                )[level]
                first = model.tokens.first[level] - model.decoder.span(level)[0]
                scored += [
                    ((*prefix, code), score + digit[first + code].item())
                    for code in range(size)
                ]
            valid = {code[: level + 1] for code in codes}
            could = min(beam, sum(prefix in valid for prefix, _ in scored))
            beams = sorted(scored, key=lambda pair: -pair[1])[:beam]
            kept = sum(prefix in valid for prefix, _ in beams)
            assert found[row, level].item() == pytest.approx(
                1 - kept / could if could else 1.0
            )
    if beam == 200:
        assert not found.any()  # nothing is displaced where all is kept
