"""The parallel recurrence equals a step-by-step loop, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.layers.linear_recurrence import Decay, linear_recurrence, scan

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
def test_outputs_and_gradients_equal_a_loop_in_float32_and_float64(length):
    torch.manual_seed(0)
    x = torch.randn(2, length, 5)
    weight = torch.randn(2, length, 5)

    parallel = run_with_gradients(linear_recurrence, x, weight, torch.float32)

    loop = run_with_gradients(run_loop, x, weight, torch.float32)
    double_loop = run_with_gradients(run_loop, x, weight, torch.float64)
    for values, expected, exact in zip(parallel, loop, double_loop, strict=True):
        assert is_close(values, expected, 1e-5)
        assert is_close(values, exact, 1e-5)


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


@settings(max_examples=40)
@given(
    st.integers(0, 3),
    st.integers(1, 70),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 1000),
)
def test_a_scan_of_any_shape_equals_a_loop_in_both_directions(
    batch, length, width, reverse, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, width, generator=generator)
    decay = torch.rand(width, generator=generator) * 0.98 + 0.01
    if reverse:
        expected = run_loop(x.flip(1), decay).flip(1)
    else:
        expected = run_loop(x, decay)
    assert torch.allclose(scan(x, decay, reverse), expected, atol=1e-5)


def test_extreme_decays_stay_finite():
    x = torch.full((1, 4000, 3), 1e3, requires_grad=True)
    decay = torch.tensor([1e-30, 1e-3, 1 - 1e-7], requires_grad=True)
    h = linear_recurrence(x, decay)
    h.sum().backward()
    assert torch.isfinite(h).all()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(decay.grad).all()


def test_decays_start_between_a_half_and_the_longest_memory_and_are_trained():
    decay = Decay(64, 100)
    values = decay()
    assert values.tolist()[0] == pytest.approx(0.5)
    assert values.tolist()[-1] == pytest.approx(0.99)
    assert ((values > 0) & (values < 1)).all()
    values.sum().backward()
    assert (decay.logit.grad > 0).all()
