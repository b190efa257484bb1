"""Test that a tokenizer's training whose worker is lost restarts with the same codes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import ray

from models.retrieval.tokenizers.config import RqvaeConfig
from models.retrieval.tokenizers.rqvae import RqvaeTokenizer
from pipelines import faults
from pipelines.encode import tokenize
from pipelines.encode.tokenize import train_codes

pytestmark = pytest.mark.exhaustive

EMBEDDINGS = np.random.default_rng(0).normal(size=(90, 6)).astype(np.float32)
RQVAE = RqvaeTokenizer(RqvaeConfig(levels=2, codebook_size=8, latent=4, epochs=400))


@contextlib.contextmanager
def kill_workers(times: int) -> Iterator[set[int]]:
    """Kill training workers one after the other; yield the ids of killed processes."""
    killed: set[int] = set()
    is_over = threading.Event()

    def kill_workers_until_over() -> None:
        while len(killed) < times and not is_over.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    is_worker = process.name().startswith("ray::_train_ta")
                    if is_worker and process.pid not in killed:
                        process.send_signal(signal.SIGKILL)
                        killed.add(process.pid)

    thread = threading.Thread(target=kill_workers_until_over)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def test_a_training_that_loses_its_worker_restarts(ray_local, monkeypatch):
    expected_lines: list[str] = []
    expected, *_ = train_codes(EMBEDDINGS, RQVAE, expected_lines.append)
    # On a cluster the training is a Ray task.
    monkeypatch.setenv("RAY_ADDRESS", "local")

    lines: list[str] = []
    with kill_workers(1) as killed:
        codes, *_ = train_codes(EMBEDDINGS, RQVAE, lines.append)

    assert len(killed) == 1
    assert np.array_equal(codes, expected)
    assert lines[-len(expected_lines) :] == expected_lines
    with (
        kill_workers(tokenize.MAX_STARTS),
        pytest.raises(ray.exceptions.RayError) as error,
    ):
        train_codes(EMBEDDINGS, RQVAE, str)
    assert "died" in str(faults.explain(error.value))
