"""Test trainings and reads while S3 refuses or delays requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from models.storage.checkpoint import Checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.storage.uri import file_info, read_json, write_file
from models.training.fit import FitConfig
from pipelines.training.config import RayOptions
from tests.fixtures.s3_proxy import S3Proxy, s3_proxy
from tests.fixtures.trainings import train

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

MODEL = {"name": "sasrec", "dim": 16, "num_layers": 1, "max_history": 12}
FIT = {"batch_size": 8, "max_epochs": 3, "patience": 0, "seed": 3}


@pytest.fixture
def proxy(s3: str) -> Iterator[S3Proxy]:
    """Start a proxy of the S3 server; the environment points to the proxy."""
    with s3_proxy() as proxy:
        yield proxy


def test_a_training_survives_half_a_minute_of_status_503(
    proxy: S3Proxy,
    s3: str,
    small: tuple[str, str],
    tmp_path: Path,
    new_store: Callable[[Path], str],
) -> None:
    def refuse_requests(saved: Checkpoint) -> None:
        if saved.epoch == 1:
            proxy.busy_until = time.monotonic() + 30

    result = train(
        model=MODEL,
        fit=FitConfig(**FIT),
        ray=RayOptions(threads=1),
        inputs=Inputs(small[0]),
        storage=f"{s3}/runs",
        name="one",
        tracking_uri=new_store(tmp_path),
        log_model=False,
        say=lambda line: None,
        on_checkpoint=refuse_requests,
    )

    assert result.epochs == FIT["max_epochs"]
    assert proxy.refused > 2
    assert time.monotonic() > proxy.busy_until


def test_reading_waits_for_a_late_first_byte(proxy: S3Proxy, s3: str) -> None:
    proxy.delay_s = 5.0

    write_file(f"{s3}/late.json", b'{"value": 1}')

    assert read_json(f"{s3}/late.json") == {"value": 1}


def test_denied_access_is_an_error_without_retries(proxy: S3Proxy, s3: str) -> None:
    proxy.denies = True
    start_time = time.monotonic()

    with pytest.raises(UserError, match=r"cannot reach .*ACCESS_DENIED") as error:
        file_info(f"{s3}/forbidden")

    assert "\n" not in str(error.value)
    assert proxy.refused == 1
    assert time.monotonic() - start_time < 60
