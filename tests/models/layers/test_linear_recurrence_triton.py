"""The fused kernels, run by Triton's interpreter or a GPU, equal the PyTorch form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.layers.linear_recurrence import key_value_recurrence, linear_recurrence

pytest.importorskip("triton", reason="Triton comes with PyTorch for GPUs")

COMPARE = """
import sys, torch
from models.layers.linear_recurrence import linear_recurrence
from models.layers.linear_recurrence_triton import FusedRecurrence

device = sys.argv[1]
torch.manual_seed(0)
cases = [(1, 1, 1), (2, 31, 5), (1, 32, 32), (2, 33, 33), (1, 200, 40), (2, 0, 3), (0, 4, 3)]
cases = [(shape, torch.float32) for shape in cases] + [((2, 70, 6), torch.bfloat16)]
for (batch, length, width), dtype in cases:
    decay = (torch.rand(width) * 0.6 + 0.3999).to(device)
    decay[0] = 0.9999
    inputs = torch.randn(batch, length, 3 * width, device=device, dtype=dtype)
    weight = torch.randn(batch, length, width, device=device)
    results = []
    for fused in (True, False):
        x, gamma = inputs.clone().requires_grad_(), decay.clone().requires_grad_()
        k, v = x[..., :width], x[..., 2 * width :]  # not contiguous
        if fused:
            h = FusedRecurrence.apply(k, v, gamma)
            assert h.dtype == dtype
        else:
            h = linear_recurrence(k.float() * v.float(), gamma)
        (h.float() * weight).sum().backward()
        results.append([h.float(), x.grad.float(), gamma.grad])
    for values, expected in zip(*results):
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        tolerance = scale * (1e-5 if dtype == torch.float32 else 1e-2)
        assert torch.allclose(values, expected, atol=tolerance), (length, width, dtype)
print("equal")
"""
"""Program that compares the kernels with PyTorch on a device.

The device is an argument, as Triton's interpreter is chosen before its import.
"""


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fused_outputs_and_gradients_equal_the_parallel_form(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    environment = dict(os.environ)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"

    result = subprocess.run(
        [sys.executable, "-c", COMPARE, device],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[3],
    )

    assert result.stdout.strip() == "equal", result.stderr[-2000:]


def test_a_cpu_uses_the_pytorch_form() -> None:
    k, v, decay = torch.randn(2, 9, 4), torch.randn(2, 9, 4), torch.full((4,), 0.9)
    assert torch.equal(
        key_value_recurrence(k, v, decay), linear_recurrence(k * v, decay)
    )
