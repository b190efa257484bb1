"""Test the tables of benchmark results, with times relative to references."""

from __future__ import annotations

from benchmarks.tables import benchmark_tables, to_rows


def test_a_benchmark_has_a_table_per_size() -> None:
    lines = []
    for beam in (10, 50):
        for variant, ms, encode in (
            ("hf", 100, 20),
            ("tiger_shared_kv", 50, 10),
            ("gdn", 25, 5),
        ):
            params = {
                "batch": 32,
                "beam": beam,
                "checkpoints": {},
                "items": 25000,
                "mean_history": 9.0,
            }
            seconds = {
                "median_s": ms / 1e3,
                "min_s": ms / 2e3,
                "max_s": ms / 5e2,
                "encode_s": encode / 1e3,
            }
            seconds |= {
                "decode_s": (ms - encode) / 1e3,
                "items_per_s": 32e3 / ms,
                "peak_memory_mb": 12.4,
                "runs": 5,
            }
            lines.append(
                {"benchmark": "decode", "variant": variant, "params": params, **seconds}
            )

    first, second = benchmark_tables(to_rows(lines))

    assert first.title == "decode: batch 32, beam 10, items 25000"
    assert second.title == "decode: batch 32, beam 50, items 25000"
    assert second.cells[-1] == [
        "gdn",
        "25.0",
        "12.5 to 50.0",
        "1,280",
        "5.0",
        "20.0",
        "12",
        "4.00",
        "2.00",
        "4.00",
        "2.00",
    ]
    assert second.notes == [
        "medians of 5 interleaved runs. random weights and histories, 9.0 items in the mean."
    ]
