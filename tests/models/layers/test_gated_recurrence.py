"""Recurrences of Gated DeltaNet and Mamba2: chunks and steps equal a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu, softplus

from models.layers.gated_deltanet import GatedDeltaNet
from models.layers.gated_recurrence import RecurrentMixer, gated_recurrence, gated_step
from models.layers.mamba2 import Mamba2

EXACT = {"rtol": 0.0, "atol": 1e-10}


def run_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence by its definition, by row, head and position.

    Returns:
        The outputs, like `v`, and the memory (B, H, K, V) after the last position.
    """
    rows, heads, length, width = v.shape
    outputs = torch.zeros_like(v)
    last_memory = torch.zeros(rows, heads, k.shape[-1], width, dtype=v.dtype)
    for row in range(rows):
        for head in range(heads):
            key_head = head if k.shape[1] == heads else 0
            state = torch.zeros_like(last_memory[row, head])  # (K, V)
            if memory is not None:
                state = memory[row, head]
            for t in range(length):
                key, value = k[row, key_head, t], v[row, head, t]
                state = log_decay[row, head, t].exp() * state
                if beta is not None:
                    value = beta[row, head, t] * (value - state.T @ key)
                state = state + torch.outer(key, value)
                outputs[row, head, t] = state.T @ q[row, key_head, t]
            last_memory[row, head] = state
    return outputs, last_memory


def draw_inputs(
    length: int, delta: bool, shared: bool, seed: int = 0
) -> list[Tensor | None]:
    """Return q, k, v, log_decay, beta and memory of 2 rows and 3 heads.

    Keys have length 1, for which the delta rule is stable.

    Args:
        length: Number of positions.
        delta: Whether there is a beta, as the delta rule needs it.
        shared: Whether all heads share queries and keys.
        seed: Seed of the numbers.
    """
    torch.manual_seed(seed)
    key_heads = 1 if shared else 3
    q, k = torch.randn(2, 2, key_heads, length, 4, dtype=torch.double)
    v = torch.randn(2, 3, length, 5, dtype=torch.double)
    log_decay = -torch.rand(2, 3, length, dtype=torch.double).mul(3).exp().sub(1)
    beta = torch.rand(2, 3, length, dtype=torch.double) if delta else None
    memory = torch.randn(2, 3, 4, 5, dtype=torch.double)
    return [q, k / k.norm(dim=-1, keepdim=True), v, log_decay, beta, memory]


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@settings(max_examples=15)
@given(
    length=st.integers(1, 13),
    chunk=st.integers(1, 14),
    seed=st.integers(0, 99),
    has_memory=st.booleans(),
)
def test_chunks_and_steps_equal_a_loop(delta, shared, length, chunk, seed, has_memory):
    q, k, v, log_decay, beta, memory = draw_inputs(length, delta, shared, seed)
    initial = memory if has_memory else None
    expected, expected_memory = run_loop(q, k, v, log_decay, beta, initial)

    outputs, last_memory = gated_recurrence(
        q, k, v, log_decay, beta, initial, chunk=chunk
    )
    torch.testing.assert_close(outputs, expected, **EXACT)
    torch.testing.assert_close(last_memory, expected_memory, **EXACT)

    state = memory.clone() if has_memory else torch.zeros_like(memory)
    for t in range(length):
        inputs = (
            q[:, :, t],
            k[:, :, t],
            v[:, :, t],
            log_decay[..., t],
            None if beta is None else beta[..., t],
        )
        # a step that does not keep its state leaves the memory unchanged for the next
        output = gated_step(*inputs, state, keep=False)
        torch.testing.assert_close(output, expected[:, :, t], **EXACT)
        output = gated_step(*inputs, state)
        torch.testing.assert_close(output, expected[:, :, t], **EXACT)
    torch.testing.assert_close(state, expected_memory, **EXACT)


def build_mixer(name: str) -> RecurrentMixer:
    """Return a mixer of width 6 in float64."""
    torch.manual_seed(0)
    gdn = GatedDeltaNet(6, 2, 4, 2, chunk=3)
    mamba2 = Mamba2(6, 4, 5, 2, chunk=3)
    return {"gdn": gdn, "mamba2": mamba2}[name].double()


def convolve_two(weight: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
    """Return a causal convolution of width 4 over a row of two positions.

    Args:
        weight: (4, C) weights, the newest position last.
        first: (C,) inputs of the first position.
        second: (C,) inputs of the second position.
    """
    return [weight[3] * first, weight[2] * first + weight[3] * second]


@torch.no_grad()
def test_gated_deltanet_follows_its_equations():
    """Compute the second of two positions head by head from the weights."""
    mixer, x = build_mixer("gdn"), torch.randn(2, 6, dtype=torch.double)

    def scale_to_unit(y: Tensor) -> Tensor:
        return y / (y.square().sum() + 1e-6).sqrt()

    output = mixer(x[None])[0][0, 1]

    projected = x @ mixer.qkv.weight.T
    mixed = [silu(y) for y in convolve_two(mixer.conv.weight, *projected)]
    heads = []
    for head in range(2):
        state = torch.zeros(4, 8, dtype=torch.double)
        for t in range(2):
            q = scale_to_unit(mixed[t][4 * head : 4 * head + 4])
            k = scale_to_unit(mixed[t][8 + 4 * head : 12 + 4 * head])
            v = mixed[t][16 + 8 * head : 24 + 8 * head]
            rates = mixer.rates.weight @ x[t]
            step = softplus(rates[head] + mixer.step_bias[head])
            decay = torch.exp(-mixer.log_rate[head].exp() * step)
            beta = rates[2 + head].sigmoid()
            forgotten = state - beta * torch.outer(k, state.T @ k)
            state = decay * forgotten + beta * torch.outer(k, v)
        head_output = state.T @ q / 4**0.5
        rms = (head_output.square().mean() + 1e-6).sqrt()
        heads.append(head_output / rms * mixer.norm.weight)
    gate = silu(mixer.gate.weight @ x[1])
    expected = mixer.out.weight @ (torch.cat(heads) * gate)
    torch.testing.assert_close(output, expected, **EXACT)


@torch.no_grad()
def test_mamba2_follows_its_equations():
    """Compute the second of two positions head by head from the weights.

    The input projection gives 12 channels of x, 5 of B, 5 of C and 3 step sizes.
    """
    mixer, x = build_mixer("mamba2"), torch.randn(2, 6, dtype=torch.double)
    mixer.skip.normal_()

    output = mixer(x[None])[0][0, 1]

    projected = x @ mixer.enter.weight.T
    convolved = convolve_two(mixer.conv.weight, *projected[:, :22])
    mixed = [silu(y + mixer.conv.bias) for y in convolved]
    heads = []
    for head in range(3):
        state = torch.zeros(4, 5, dtype=torch.double)
        for t in range(2):
            step = softplus(projected[t, 22 + head] + mixer.step_bias[head])
            decay = torch.exp(-mixer.log_rate[head].exp() * step)
            channels, b = mixed[t][4 * head : 4 * head + 4], mixed[t][12:17]
            state = decay * state + step * torch.outer(channels, b)
        c = mixed[1][17:]
        heads.append(state @ c + mixer.skip[head] * channels)
    gated = torch.cat(heads) * silu(mixer.gate.weight @ x[1])
    rms = (gated.square().mean() + 1e-5).sqrt()
    expected = mixer.out.weight @ (gated / rms * mixer.norm.weight)
    torch.testing.assert_close(output, expected, **EXACT)
