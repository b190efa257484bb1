"""Test the benchmark of search encoders: its rows, and the sizes that are left out."""

from __future__ import annotations

import torch

from benchmarks import search_encoder


def test_rows_have_mode_length_times_and_memory(monkeypatch):
    monkeypatch.setattr(
        search_encoder,
        "in_fresh_process",
        lambda function, *arguments: function(*arguments),
    )
    sizes = {
        "width": 16,
        "layers": 2,
        "heads": 2,
        "lengths": [5],
        "modes": ["train"],
        "variants": ["linear_hstu"],
    }

    (row,) = search_encoder.search_encoder(runs=2, threads=1, **sizes)

    assert (row["benchmark"], row["variant"]) == ("search_encoder", "linear_hstu")
    assert (row["params"]["mode"], row["params"]["length"]) == ("train", 5)
    assert 0 < row["min_s"] <= row["median_s"]
    assert row["peak_memory_mb"] >= 0


def test_attention_too_large_to_train_is_left_out():
    params = {"mode": "train", "length": 4000, "layers": 12, "heads": 8, "batch": 1}
    assert not search_encoder.fits_in_memory("hstu", params)
    assert search_encoder.fits_in_memory("hstu", params | {"mode": "forward"})
    assert not search_encoder.fits_in_memory(
        "hstu", params | {"mode": "forward", "length": 16000}
    )
    assert search_encoder.fits_in_memory("hstu", params | {"length": 1000})
    assert search_encoder.fits_in_memory("linear_hstu", params)


def test_the_floor_computes_only_the_projections():
    floor = search_encoder.Projections(8, 3)
    states = torch.randn(1, 4, 8)

    expected = states
    for layer in floor.layers:
        expected = (expected @ layer.weight.T)[..., :8]

    assert torch.allclose(floor(states), expected, atol=1e-6)
