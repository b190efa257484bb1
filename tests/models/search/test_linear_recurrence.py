"""The parallel recurrence equals a step-by-step loop, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from models.search.encoders import linear_recurrence

DECAYS = torch.tensor([0.5, 0.9, 0.99, 0.999, 0.9999])


def run_loop(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Return the recurrence (B, T, D) by its definition, in the dtype of `x`."""
    h = torch.zeros_like(x[:, 0])
    outputs = []
    for t in range(x.shape[1]):
        h = decay * h + x[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1)


def is_close(values: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Return whether values agree relative to the largest value of their channel."""
    scale = expected.abs()
    if expected.ndim > 1:
        scale = scale.flatten(0, -2).amax(0)
    error = (values - expected).abs()
    return bool((error <= tolerance * scale.clamp(min=1)).all())


def run_with_gradients(
    recurrence: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return outputs and gradients of inputs and decays, in float64.

    Args:
        recurrence: The recurrence to run.
        x: (B, T, D) inputs.
        weight: (B, T, D) weights of the outputs in the loss.
        dtype: Type to compute in.
    """
    x = x.to(dtype, copy=True).requires_grad_()
    decay = DECAYS.to(dtype, copy=True).requires_grad_()
    outputs = recurrence(x, decay)
    (outputs * weight.to(dtype)).sum().backward()
    return [value.detach().double() for value in (outputs, x.grad, decay.grad)]


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 4000])
def test_outputs_and_gradients_equal_a_loop_in_float64(length):
    torch.manual_seed(0)
    x = torch.randn(2, length, 5)
    weight = torch.randn(2, length, 5)

    parallel = run_with_gradients(linear_recurrence, x, weight, torch.float32)

    loop = run_with_gradients(run_loop, x, weight, torch.float64)
    for values, expected in zip(parallel, loop, strict=True):
        assert is_close(values, expected, 1e-5)


def test_bf16_values_are_summed_in_fp32():
    torch.manual_seed(1)
    x = torch.randn(2, 4000, 5).bfloat16().requires_grad_()

    h = linear_recurrence(x, DECAYS)
    h.float().sum().backward()

    expected = run_loop(x.detach().double(), DECAYS.double())
    assert h.dtype == torch.bfloat16
    assert is_close(h.double(), expected, 2**-8)
    ones = torch.ones(2, 4000, 5, dtype=torch.float64)
    expected_gradient = run_loop(ones, DECAYS.double()).flip(1)
    assert x.grad.dtype == torch.bfloat16
    assert is_close(x.grad.double(), expected_gradient, 2**-8)
