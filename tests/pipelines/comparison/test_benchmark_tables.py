"""Lines of a benchmark as tables: a table for each size, times beside those of the references."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.compare import parse, run


@pytest.mark.long
def test_a_benchmark_is_a_table_for_each_size(
    new_store: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = []
    for beam in (10, 50):
        for variant, ms, encode in (("hf", 100, 20), ("tiger_shared_kv", 50, 10), ("gdn", 25, 5)):
            params = {"batch": 32, "beam": beam, "checkpoints": {}, "items": 25000, "mean_history": 9.0}
            seconds = {"median_s": ms / 1e3, "min_s": ms / 2e3, "max_s": ms / 5e2, "encode_s": encode / 1e3}
            seconds |= {"decode_s": (ms - encode) / 1e3, "items_per_s": 32e3 / ms, "peak_memory_mb": 12.4, "runs": 5}
            lines.append({"benchmark": "decode", "variant": variant, "params": params, **seconds})
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--benchmark", str(tmp_path / "lines.jsonl"), "--experiment", "benchmark/decode"]
    run(parse("compare", [*words, "--tracking_uri", new_store(tmp_path), "--export", str(tmp_path / "kept.jsonl")]))
    printed = capsys.readouterr().out
    assert "decode: batch 32, beam 10, items 25000" in printed
    table = printed.split("decode: batch 32, beam 50, items 25000")[1]
    row = next(line.split() for line in table.splitlines() if line.startswith("gdn"))
    assert row == ["gdn", "25.0", "12.5", "to", "50.0", "1,280", "5.0", "20.0", "12", "4.00", "2.00", "4.00", "2.00"]
    assert "medians of 5 interleaved runs. random weights and histories, 9.0 items in the mean." in table
    run(parse("compare", ["--from", str(tmp_path / "kept.jsonl"), "--markdown", f"{tmp_path}/pages/"]))
    page = (tmp_path / "pages/benchmark-decode.md").read_text()
    assert "| gdn | 25.0 | 12.5 to 50.0 | 1,280 |" in page
    assert "| gdn |  |  | python -m models.bench decode |" in page  # whose lines do not say where they are from


@pytest.mark.long
def test_latency_at_the_99th_percentile_has_a_column(
    new_store: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"benchmark": "serve", "variant": "qgs_state", "params": {"model": "qgs", "history": 100}, "runs": 100}
    line |= {"median_s": 0.05, "min_s": 0.04, "max_s": 0.2, "p99_s": 0.15, "items_per_s": 20.0}
    line |= {
        "hardware": "a CPU, 2 cores",
        "commit": "abcdef0123456789",
        "command": "python -m jobs.benchmark serve",
    }
    (tmp_path / "lines.jsonl").write_text(json.dumps(line) + "\n")
    words = ["--benchmark", str(tmp_path / "lines.jsonl"), "--experiment", "benchmark/serve"]
    run(parse("compare", [*words, "--tracking_uri", new_store(tmp_path), "--export", str(tmp_path / "kept.jsonl")]))
    table = capsys.readouterr().out.split("serve: history 100, model qgs")[1].splitlines()
    assert " ".join(table[1].split()) == "variant ms min to max p99, ms per s"
    assert table[3].split() == ["qgs_state", "50.0", "40.0", "to", "200.0", "150.0", "20"]
    run(parse("compare", ["--from", str(tmp_path / "kept.jsonl"), "--markdown", f"{tmp_path}/pages/"]))
    origin = "| qgs_state | a CPU, 2 cores | abcdef0123 | python -m jobs.benchmark serve |"
    assert origin in (tmp_path / "pages/benchmark-serve.md").read_text()
