"""Recurrences of Gated DeltaNet and Mamba2: chunks and steps equal a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers.gated_deltanet import GatedDeltaNet
from models.layers.gated_recurrence import RecurrentMixer, gated_recurrence, gated_step
from models.layers.mamba2 import Mamba2
from models.training.optimizers import group_parameters, make_optimizer

EXACT = {"rtol": 0.0, "atol": 1e-10}


def run_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence by its definition, by head and position."""
    rows, heads, length, width = v.shape
    out = torch.zeros_like(v)
    after = torch.zeros(rows, heads, k.shape[-1], width, dtype=v.dtype)
    for b in range(rows):
        for h in range(heads):
            shared = h if k.shape[1] == heads else 0
            s = torch.zeros_like(after[b, h]) if memory is None else memory[b, h]
            for t in range(length):
                key = k[b, shared, t]
                s = log_decay[b, h, t].exp() * s
                u = (
                    v[b, h, t]
                    if beta is None
                    else beta[b, h, t] * (v[b, h, t] - s.T @ key)
                )
                s = s + torch.outer(key, u)
                out[b, h, t] = s.T @ q[b, shared, t]
            after[b, h] = s
    return out, after


def inputs(
    length: int, delta: bool, shared: bool, seed: int = 0
) -> list[Tensor | None]:
    """Return q, k, v, log_decay, beta and memory of 2 rows and 3 heads.

    Keys have length 1, for which the delta rule is stable.
    """
    torch.manual_seed(seed)
    groups = 1 if shared else 3
    q, k = torch.randn(2, 2, groups, length, 4, dtype=torch.double)
    v = torch.randn(2, 3, length, 5, dtype=torch.double)
    log_decay = -torch.rand(2, 3, length, dtype=torch.double).mul(3).exp().sub(1)
    beta = torch.rand(2, 3, length, dtype=torch.double) if delta else None
    return [
        q,
        k / k.norm(dim=-1, keepdim=True),
        v,
        log_decay,
        beta,
        torch.randn(2, 3, 4, 5, dtype=torch.double),
    ]


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@settings(max_examples=15)
@given(
    length=st.integers(1, 13),
    chunk=st.integers(1, 14),
    seed=st.integers(0, 99),
    remembers=st.booleans(),
)
def test_chunks_and_steps_equal_a_loop(
    delta: bool, shared: bool, length: int, chunk: int, seed: int, remembers: bool
) -> None:
    q, k, v, log_decay, beta, memory = inputs(length, delta, shared, seed)
    before = memory if remembers else None
    expected, after = run_loop(q, k, v, log_decay, beta, before)
    out, found = gated_recurrence(q, k, v, log_decay, beta, before, chunk=chunk)
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(found, after, **EXACT)
    state = memory.clone() if remembers else torch.zeros_like(memory)
    for t in range(length):
        newest = None if beta is None else beta[..., t]
        given_t = q[:, :, t], k[:, :, t], v[:, :, t], log_decay[..., t], newest, state
        torch.testing.assert_close(
            gated_step(*given_t, keep=False), expected[:, :, t], **EXACT
        )  # nothing is written
        torch.testing.assert_close(gated_step(*given_t), expected[:, :, t], **EXACT)
    torch.testing.assert_close(state, after, **EXACT)


@pytest.mark.parametrize("delta", [True, False])
def test_gradients_equal_those_of_a_loop(delta: bool) -> None:
    found = []
    for run in (run_loop, lambda *given: gated_recurrence(*given, chunk=4)):
        given = [
            None if x is None else x.clone().requires_grad_()
            for x in inputs(11, delta, shared=not delta)
        ]
        out, memory = run(*given)
        loss = (out * torch.arange(5)).sum() + memory.square().sum()
        found.append(torch.autograd.grad(loss, [x for x in given if x is not None]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("delta", [True, False])
def test_fast_forgetting_over_long_rows_stays_finite(delta: bool) -> None:
    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 2, 500, 8), dim=-1)
    v, log_decay = (
        torch.randn(1, 2, 500, 6).requires_grad_(),
        torch.full((1, 2, 500), -60.0, requires_grad=True),
    )
    out, memory = gated_recurrence(
        q, k, v, log_decay, torch.ones(1, 2, 500) if delta else None
    )
    (out.sum() + memory.sum()).backward()
    assert all(bool(x.isfinite().all()) for x in (out, memory, v.grad, log_decay.grad))
    torch.testing.assert_close(
        out, (q * k).sum(-1, keepdim=True) * v
    )  # each position alone


def test_float32_is_accurate_after_fast_decay() -> None:
    """Fast and slow decays in one chunk: float32 agrees with float64."""
    q, k, v, log_decay, beta, _ = inputs(40, True, shared=False)
    log_decay[..., :20] = -2000 - torch.rand(2, 3, 20, dtype=torch.double)
    log_decay[..., 20:] = -0.1 * torch.rand(2, 3, 20, dtype=torch.double)
    exact, _ = gated_recurrence(q, k, v, log_decay, beta, chunk=40)
    found, _ = gated_recurrence(
        *(x.float() for x in (q, k, v, log_decay, beta)), chunk=40
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_time_and_skip_parameters_have_no_weight_decay() -> None:
    for mixer, spared in (
        (Mamba2(8, 4, 4, 2, 4, 8), 3),
        (GatedDeltaNet(8, 2, 4, 1, 4, 8), 2),
    ):
        names = {id(p): name for name, p in mixer.named_parameters()}
        groups = group_parameters(mixer, {})
        found = [names[id(p)] for p in groups[1.0, False]]
        assert set(found) <= {"log_rate", "step_bias", "skip"}
        assert len(found) == spared
        optimizer, _ = make_optimizer(mixer, "adamw", 0.5, {})
        assert [group["weight_decay"] for group in optimizer.param_groups] == [
            0.5 if decays else 0.0 for _, decays in groups
        ]


def mixers() -> dict[str, RecurrentMixer]:
    torch.manual_seed(0)
    made = {
        "gdn": GatedDeltaNet(6, 2, 4, 2, 4, chunk=3),
        "mamba2": Mamba2(6, 4, 5, 2, 4, chunk=3),
    }
    return {name: mixer.double() for name, mixer in made.items()}


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_mixer_steps_equal_the_forward_pass(name: str) -> None:
    mixer, x = mixers()[name], torch.randn(3, 9, 6, dtype=torch.double)
    with torch.no_grad():
        expected, after = mixer(x)
        torch.testing.assert_close(mixer(x, last=2)[0], expected[:, -2:], **EXACT)
        _, state = mixer(x[:, :1])
        for t in range(1, 9):
            found, state = mixer.step(x[:, t], state)
            torch.testing.assert_close(found, expected[:, t], **EXACT)
    torch.testing.assert_close(state.memory, after.memory, **EXACT)
    torch.testing.assert_close(state.window, after.window, **EXACT)


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_mixer_ignores_padding(name: str) -> None:
    """Rows of 2 and 5 real positions equal rows without padding."""
    mixer, x = mixers()[name], torch.randn(2, 7, 6, dtype=torch.double)
    real = torch.ones(2, 7, 1, dtype=torch.double)
    real[0, :5], real[1, :2] = 0, 0
    with torch.no_grad():
        out, state = mixer(x, real)
        for row, length in enumerate((2, 5)):
            expected, alone = mixer(x[row : row + 1, 7 - length :])
            torch.testing.assert_close(
                out[row : row + 1, 7 - length :], expected, **EXACT
            )
            torch.testing.assert_close(
                state.memory[row : row + 1], alone.memory, **EXACT
            )
            if length > 3:
                torch.testing.assert_close(
                    state.window[row : row + 1], alone.window, **EXACT
                )


def test_gated_deltanet_follows_its_equations() -> None:
    """Compute two positions head by head from the weights."""
    mixer, x = mixers()["gdn"], torch.randn(2, 6, dtype=torch.double)
    silu, unit = (
        torch.nn.functional.silu,
        lambda y: y / (y.square().sum() + 1e-6).sqrt(),
    )
    with torch.no_grad():
        found = mixer(x[None])[0][0, 1]
        given = x @ mixer.qkv.weight.T
        w = mixer.conv.weight
        mixed = [silu(w[3] * given[0]), silu(w[2] * given[0] + w[3] * given[1])]
        outs = []
        for h in range(2):
            s = torch.zeros(4, 8, dtype=torch.double)
            for t in range(2):
                q, k = (unit(mixed[t][part : part + 4]) for part in (4 * h, 8 + 4 * h))
                v = mixed[t][16 + 8 * h : 24 + 8 * h]
                rates = mixer.rates.weight @ x[t]
                decay = torch.exp(
                    -mixer.log_rate[h].exp()
                    * torch.nn.functional.softplus(rates[h] + mixer.step_bias[h])
                )
                s = decay * (
                    s - rates[2 + h].sigmoid() * torch.outer(k, s.T @ k)
                ) + rates[2 + h].sigmoid() * (torch.outer(k, v))
            o = s.T @ q / 4**0.5
            outs.append(o / (o.square().mean() + 1e-6).sqrt() * mixer.norm.weight)
        expected = mixer.out.weight @ (torch.cat(outs) * silu(mixer.gate.weight @ x[1]))
    torch.testing.assert_close(found, expected, **EXACT)


def test_mamba2_follows_its_equations() -> None:
    mixer, x = mixers()["mamba2"], torch.randn(2, 6, dtype=torch.double)
    silu, softplus = torch.nn.functional.silu, torch.nn.functional.softplus
    with torch.no_grad():
        mixer.skip.normal_()
        found = mixer(x[None])[0][0, 1]
        given = x @ mixer.enter.weight.T  # 12 of x, 5 of B, 5 of C, 3 step sizes
        w, bias = mixer.conv.weight, mixer.conv.bias
        mixed = [
            silu(w[3] * given[0, :22] + bias),
            silu(w[2] * given[0, :22] + w[3] * given[1, :22] + bias),
        ]
        ys = []
        for h in range(3):
            s = torch.zeros(4, 5, dtype=torch.double)
            for t in range(2):
                step = softplus(given[t, 22 + h] + mixer.step_bias[h])
                part = mixed[t][4 * h : 4 * h + 4]
                s = torch.exp(-mixer.log_rate[h].exp() * step) * s + step * torch.outer(
                    part, mixed[t][12:17]
                )
            ys.append(s @ mixed[1][17:] + mixer.skip[h] * part)
        y = torch.cat(ys) * silu(mixer.gate.weight @ x[1])
        expected = mixer.out.weight @ (
            y / (y.square().mean() + 1e-5).sqrt() * mixer.norm.weight
        )
    torch.testing.assert_close(found, expected, **EXACT)


def test_head_width_must_divide_the_inner_width() -> None:
    with pytest.raises(
        ValueError, match="head_width 5 does not divide the inner width 12"
    ):
        Mamba2(6, 5, 4, 2, 4, chunk=8)
