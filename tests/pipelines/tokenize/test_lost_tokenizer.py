"""A training of codes with a lost worker starts again and gives the same codes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import ray
import torch

from models.retrieval.tokenizers.config import RqvaeConfig
from pipelines import faults
from pipelines.data.sids import tokenize
from pipelines.data.sids.config import TokenizerConfig
from pipelines.data.sids.tokenize import train_codes

pytestmark = pytest.mark.exhaustive

EMBEDDINGS = np.random.default_rng(0).normal(size=(90, 6)).astype(np.float32)
RQVAE = TokenizerConfig(
    "rqvae", rqvae=RqvaeConfig(levels=2, codebook_size=8, latent=4, epochs=400)
)


@contextlib.contextmanager
def killing(times: int) -> Iterator[set[int]]:
    """Kill training workers one after the other, and return their process ids."""
    killed, over = set[int](), threading.Event()

    def kill() -> None:
        while len(killed) < times and not over.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if process.pid not in killed and process.name().startswith(
                        "ray::_train_ta"
                    ):
                        process.send_signal(signal.SIGKILL)
                        killed.add(process.pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def test_what_the_worker_did_before_does_not_matter() -> None:
    def trained() -> np.ndarray:
        *_, trained = tokenize._train_task(EMBEDDINGS, RQVAE, None, 2)
        assert isinstance(trained, tokenize.TrainedCodes)
        return trained.codes

    before = torch.get_float32_matmul_precision()
    expected = trained()
    torch.set_float32_matmul_precision(
        "medium"
    )  # as a model that was built there leaves it
    try:
        assert np.array_equal(trained(), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_lost_training_of_codes_starts_anew(
    ray_local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, again = list[str](), list[str]()
    expected = train_codes(EMBEDDINGS, RQVAE, lines.append).codes
    monkeypatch.setenv(
        "RAY_ADDRESS", "local"
    )  # as on a cluster, where it is a task of Ray
    with killing(1) as killed:
        codes = train_codes(EMBEDDINGS, RQVAE, again.append).codes
    assert len(killed) == 1
    assert np.array_equal(codes, expected)
    assert again == lines
    with killing(tokenize.MAX_STARTS), pytest.raises(ray.exceptions.RayError) as lost:
        train_codes(EMBEDDINGS, RQVAE, str)
    assert str(faults.explain(lost.value)).startswith("a process of Ray was lost")
