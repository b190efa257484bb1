"""Fast products are as accurate as PyTorch's own."""

from __future__ import annotations

import torch

from models.cpu.matmul import MAX_RELATIVE_ERROR, PackedLinear, use_exact_onednn


def test_products_stay_float32_and_no_random_number_is_drawn():
    state = torch.get_rng_state()
    before = torch.get_float32_matmul_precision()
    try:
        on = use_exact_onednn.__wrapped__()
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_float32_matmul_precision() == ("medium" if on else before)
        left, right = torch.randn(300, 128), torch.randn(128, 1000)
        exact = left.double() @ right.double()
        for product in (
            left @ right,
            torch.nn.functional.linear(left, right.T.contiguous()),
        ):
            assert (
                product - exact
            ).abs().max() < MAX_RELATIVE_ERROR * exact.abs().max()
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_weight_that_is_no_number_is_seen_after_a_relu():
    weight, bias = torch.randn(6, 4), torch.randn(6)
    weight[3, 1] = float("nan")
    bias[5] = float("inf")
    with torch.no_grad():
        found = PackedLinear(weight, bias)(torch.randn(2, 4), relu=True)
    assert found[:, 3].isnan().all()
    assert found[:, 5].isinf().all()
    assert found[:, [0, 1, 2, 4]].isfinite().all()
