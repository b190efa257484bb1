"""Test which errors of the machine and of services end a job with one line."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from ray.exceptions import RuntimeEnvSetupError
from ray.train import ControllerError, WorkerGroupError

from core.errors import UserError
from pipelines.faults import explain, find_user_error, is_permanent

FULL = "[Node 192.0.2.7] OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("error", "fragment", "permanent"),
    [
        (OSError(28, "No space left on device", "/mnt/x"), "/mnt/x", True),
        (ControllerError(RuntimeEnvSetupError(FULL)), "192.0.2.7", True),
        (FileNotFoundError(2, "No such file", "/runs/run.json"), "run.json", False),
        (torch.OutOfMemoryError("CUDA out of memory."), "CUDA out of memory", True),
        (WorkerGroupError("failed", {1: MemoryError("1 EiB")}), "1 EiB", True),
        (torch.distributed.DistBackendError("NCCL error"), "NCCL error", False),
    ],
)
def test_a_failure_of_the_machine_is_its_own_message(
    error: Exception, fragment: str, permanent: bool
) -> None:
    assert fragment in str(explain(error))
    assert is_permanent(error) == permanent


def test_defects_are_not_explained() -> None:
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


def test_user_errors_and_missing_memory_are_permanent() -> None:
    with pytest.raises(MemoryError) as error:
        np.empty(1 << 60, dtype=np.uint8)
    assert is_permanent(error.value)
    assert is_permanent(UserError("lower fit.lr"))
