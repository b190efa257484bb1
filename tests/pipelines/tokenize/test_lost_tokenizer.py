"""The training of codes whose worker is lost: it starts anew a few times, and ends with the same."""

from __future__ import annotations

import signal

import numpy as np
import psutil
import pytest
import ray
import torch

from models.retrieval.tokenizers.rqvae import RqvaeConfig
from pipelines import faults
from pipelines.data.sids import tokenize
from pipelines.data.sids.tokenize import TokenizerConfig, train_codes

EMBEDDINGS = np.random.default_rng(0).normal(size=(90, 6)).astype(np.float32)
RQVAE = TokenizerConfig("rqvae", rqvae=RqvaeConfig(levels=2, codebook_size=8, latent=4, epochs=400))


def kill_training() -> None:
    """SIGKILL to the worker that trains."""
    for process in psutil.Process().children(recursive=True):
        if process.name().startswith("ray::_train_ta"):
            process.send_signal(signal.SIGKILL)


def test_what_the_worker_did_before_does_not_matter() -> None:
    def trained() -> np.ndarray:
        *_, (_, codes) = tokenize._train_task(EMBEDDINGS, RQVAE, None, 2)
        return codes

    before = torch.get_float32_matmul_precision()
    expected = trained()
    torch.set_float32_matmul_precision("medium")  # as a model that was built there leaves it
    try:
        assert np.array_equal(trained(), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_lost_training_of_codes_starts_anew(ray_local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "TRIES", 2)
    lines: list[str] = []

    def once(line: str) -> None:
        if line.startswith("rqvae") and not any("note" in said for said in lines):
            kill_training()
        lines.append(line)

    embeddings = ray.put(EMBEDDINGS)
    _, expected = train_codes(embeddings, RQVAE, lambda line: None)
    _, codes = train_codes(embeddings, RQVAE, once)
    assert np.array_equal(codes, expected)
    (note,) = [line for line in lines if line.startswith("note:")]
    assert note.startswith("note: a process of Ray was lost (")
    assert note.endswith("starting rqvae anew, try 2 of 2")

    lines.clear()

    def always(line: str) -> None:
        lines.append(line)
        if line.startswith("rqvae"):
            kill_training()

    with pytest.raises(ray.exceptions.RayError) as lost:
        train_codes(embeddings, RQVAE, always)
    assert sum(line.startswith("note:") for line in lines) == 1
    assert str(faults.explain(lost.value)).startswith("a process of Ray was lost")
