"""Test which errors of the machine and of services end a job with one line."""

from __future__ import annotations

import os

import pytest
import torch
from ray.exceptions import RuntimeEnvSetupError
from ray.train import ControllerError, WorkerGroupError

from pipelines.faults import explain, find_user_error

FULL = "[Node 192.0.2.7] OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("error", "fragment"),
    [
        (OSError(28, "No space left on device", "/mnt/x"), "/mnt/x"),
        (ControllerError(RuntimeEnvSetupError(FULL)), "192.0.2.7"),
        (FileNotFoundError(2, "No such file", "/runs/run.json"), "run.json"),
        (torch.OutOfMemoryError("CUDA out of memory."), "CUDA out of memory"),
        (WorkerGroupError("failed", {1: MemoryError("1 EiB")}), "1 EiB"),
        (torch.distributed.DistBackendError("NCCL error"), "NCCL error"),
    ],
)
def test_a_failure_of_the_machine_is_its_own_message(error, fragment):
    assert fragment in str(explain(error))


def test_defects_are_not_explained():
    def raise_defect_while_handling() -> None:
        try:
            os.stat("/nowhere")
        except OSError:
            _ = {}["defect"]

    with pytest.raises(KeyError) as error:
        raise_defect_while_handling()

    # The error that was being handled is not the cause.
    assert explain(error.value) is None
    assert find_user_error(error.value) is None
    assert explain(WorkerGroupError("failed", {0: ValueError("disk")})) is None
