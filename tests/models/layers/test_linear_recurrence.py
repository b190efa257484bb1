"""The parallel recurrence equals a step-by-step loop, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.layers.linear_recurrence import Decay, linear_recurrence, scan

DECAYS = torch.tensor([0.5, 0.9, 0.99, 0.999, 0.9999])


def step_by_step(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Compute the recurrence by its definition, in the dtype of `x`."""
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = decay * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    """Return whether values agree relative to the largest value of their channel."""
    scale = want.abs().flatten(0, -2).amax(0) if want.ndim > 1 else want.abs()
    return bool(((got - want).abs() <= tolerance * scale.clamp(min=1)).all())


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 4000])
def test_parallel_and_recurrent_form_agree_forward_and_backward(length):
    torch.manual_seed(0)
    x = torch.randn(2, length, 5)
    weight = torch.randn(2, length, 5)
    found = {}
    for name, run, dtype in (
        ("parallel", linear_recurrence, torch.float32),
        ("recurrent", step_by_step, torch.float32),
        ("exact", step_by_step, torch.float64),
    ):
        a, decay = (v.detach().clone().to(dtype).requires_grad_() for v in (x, DECAYS))
        h = run(a, decay)
        (h * weight.to(dtype)).sum().backward()
        found[name] = [v.detach().double() for v in (h, a.grad, decay.grad)]
    for got, step, exact in zip(
        found["parallel"], found["recurrent"], found["exact"], strict=True
    ):
        assert close(got, step, 1e-5)
        assert close(got, exact, 1e-5)


def test_bf16_values_are_summed_in_fp32():
    torch.manual_seed(1)
    x = torch.randn(2, 4000, 5).bfloat16().requires_grad_()
    h = linear_recurrence(x, DECAYS)
    exact = step_by_step(x.detach().double(), DECAYS.double())
    assert h.dtype == torch.bfloat16
    assert close(h.double(), exact, 2**-8)
    h.float().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    ones = step_by_step(
        torch.ones(2, 4000, 5, dtype=torch.float64), DECAYS.double()
    ).flip(1)
    assert close(x.grad.double(), ones, 2**-8)


@settings(max_examples=40)
@given(
    st.integers(0, 3),
    st.integers(1, 70),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_shape_and_both_directions(batch, length, width, reverse, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, width, generator=generator)
    decay = torch.rand(width, generator=generator) * 0.98 + 0.01
    want = step_by_step(x.flip(1), decay).flip(1) if reverse else step_by_step(x, decay)
    assert torch.allclose(scan(x, decay, reverse), want, atol=1e-5)


def test_extreme_decays_stay_finite():
    x = torch.full((1, 4000, 3), 1e3, requires_grad=True)
    decay = torch.tensor([1e-30, 1e-3, 1 - 1e-7], requires_grad=True)
    h = linear_recurrence(x, decay)
    h.sum().backward()
    assert torch.isfinite(h).all()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(decay.grad).all()


def test_decays_start_between_two_positions_and_the_longest_and_learn():
    decay = Decay(64, 100)
    values = decay()
    assert values.tolist()[0] == pytest.approx(0.5)
    assert values.tolist()[-1] == pytest.approx(0.99)
    assert ((values > 0) & (values < 1)).all()
    values.sum().backward()
    assert (decay.logit.grad > 0).all()
