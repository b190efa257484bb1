"""The fused kernels, run by Triton's interpreter, equal the PyTorch form."""

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
for (batch, length, width), dtype in [(shape, torch.float32) for shape in cases] + [((2, 70, 6), torch.bfloat16)]:
    decay = (torch.rand(width) * 0.6 + 0.3999).to(device)
    decay[0] = 0.9999
    whole = torch.randn(batch, length, 3 * width, device=device, dtype=dtype)  # k and v are parts
    weight = torch.randn(batch, length, width, device=device)
    found = []
    for fused in (True, False):
        x, gamma = whole.clone().requires_grad_(), decay.clone().requires_grad_()
        k, v = x[..., :width], x[..., 2 * width :]
        h = FusedRecurrence.apply(k, v, gamma) if fused else linear_recurrence(k.float() * v.float(), gamma)
        assert not fused or h.dtype == dtype
        (h.float() * weight).sum().backward()
        found.append([h.float(), x.grad.float(), gamma.grad])
    for got, want in zip(*found):
        scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        tolerance = scale * (1e-5 if dtype == torch.float32 else 1e-2)
        assert torch.allclose(got, want, atol=tolerance), (length, width, dtype)
print("alike")
"""


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_pass_is_the_parallel_form_forward_and_backward(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    ran = subprocess.run(
        [sys.executable, "-c", COMPARE, device],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[3],
    )
    assert ran.stdout.strip() == "alike", ran.stderr[-2000:]


def test_a_cpu_takes_the_pytorch_form() -> None:
    k, v, decay = torch.randn(2, 9, 4), torch.randn(2, 9, 4), torch.full((4,), 0.9)
    assert torch.equal(
        key_value_recurrence(k, v, decay), linear_recurrence(k * v, decay)
    )
