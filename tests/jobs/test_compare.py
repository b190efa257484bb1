"""The comparison table: aligned for the terminal, whole as Markdown."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.compare import Config, run
from models.tables import UserError
from pipelines import tracking
from pipelines.evaluation.comparison import Table, shared_name


def test_text_is_aligned_and_markdown_whole() -> None:
    table = Table(
        "retrieval/x", ["model", "run", "test/ndcg@10"], [["sasrec", "a|b", "0.1"], ["t", "c", "-"]], ["note"]
    )
    _, header, rule, first, second, note = table.text().splitlines()
    assert header.index("test/ndcg@10") + len("test/ndcg@10") == len(first) == len(second) == len(rule)
    assert note == "note"
    assert "| sasrec | a\\|b | 0.1 |" in table.markdown()


def test_names_of_seeds_are_shortened_to_what_they_share() -> None:
    name = "tiger-seed1"
    for other in ("tiger-seed2", "tiger-seed3"):
        name = shared_name(name, other)
    assert name == "tiger-seed*"
    assert shared_name("a", "a") == "a"
    assert shared_name("a", "b") == "*"


def test_runs_with_other_settings_stay_apart(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for name, width, value in [("narrow", 8, 0.1), ("wide", 16, 0.2)]:
        config = {"model": {"name": "sasrec", "dim": width}, "fit": {"seed": 1}}
        logger = tracking.Logger(tracking.open_run(uri, "retrieval/x", name, str(tmp_path), config=config, hashes={}))
        logger.log({"test/ndcg@10": value, "val/ndcg@10": 0.3}, 5)
        logger.log({"best/ndcg@10": 0.4}, 6)
    run(Config("retrieval/x", uri, str(tmp_path / "out/table.md")))
    printed = capsys.readouterr().out
    assert printed.index("wide ") < printed.index("narrow ")  # best first
    assert "0.4000" in printed  # val at the best epoch
    assert "0.3000" not in printed
    assert "wide: model.dim 16" in printed
    assert "wide: 1 of 1 runs not finished" in printed
    assert "| sasrec | wide |" in (tmp_path / "out/table.md").read_text()
    with pytest.raises(UserError, match="cannot write /proc/x"):
        run(Config("retrieval/x", uri, "/proc/x/table.md"))


def test_the_store_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match="give --tracking_uri"):
        run(Config("retrieval/x"))
