"""Fast matrix products are as accurate as those of PyTorch."""

from __future__ import annotations

import torch

from models.cpu.weights import MAX_RELATIVE_ERROR, PackedLinear, use_exact_onednn


def test_products_are_accurate_and_no_random_number_is_drawn():
    state = torch.get_rng_state()
    precision = torch.get_float32_matmul_precision()
    try:
        is_enabled = use_exact_onednn.__wrapped__()

        assert torch.equal(torch.get_rng_state(), state)
        expected_precision = "medium" if is_enabled else precision
        assert torch.get_float32_matmul_precision() == expected_precision
        left, right = torch.randn(300, 128), torch.randn(128, 1000)
        exact = left.double() @ right.double()
        max_error = MAX_RELATIVE_ERROR * exact.abs().max()
        linear = torch.nn.functional.linear(left, right.T.contiguous())
        for product in (left @ right, linear):
            assert (product - exact).abs().max() < max_error
    finally:
        torch.set_float32_matmul_precision(precision)


def test_nan_and_infinite_weights_are_visible_after_a_relu():
    weight = torch.randn(6, 4)
    weight[3, 1] = float("nan")

    with torch.no_grad():
        outputs = PackedLinear(weight)(torch.randn(2, 4), relu=True)

    assert outputs[:, 3].isnan().all()
    assert outputs[:, [0, 1, 2, 4, 5]].isfinite().all()
