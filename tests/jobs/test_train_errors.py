"""What a user of jobs.train can get wrong: one line with the remedy, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.train import parse
from models.tables import UserError

ROOT = Path(__file__).parents[2]
SASREC = str(ROOT / "jobs/configs/sasrec.yaml")
LINE = ["--tables", "t", "--storage", "s", "--name", "n"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fit.lrr", "1"], "unknown key 'fit.lrr'; the nearest key is 'fit.lr'"),
        (["--model.num_layer", "1"], "unknown key 'model.num_layer'; the nearest key is 'model.num_layers'"),
        (["--fit.device", "cpu"], "unknown key 'fit.device'; the nearest key is 'ray.use_gpu'"),
        (["--model.lr", "1"], "unknown key 'model.lr'; the nearest key is 'fit.lr'"),
        (["--model.num_layers", "0"], "num_layers is 0, it must be at least 1"),
        (["--model.name", "tigre"], "unknown model 'tigre'; the nearest is 'tiger'"),
        (["--fit.batch_size", "0"], r"fit.batch_size is 0, it must be at least 1"),
        (["--fit.lr", "fast"], "fast"),
        (["--ray.num_workers", "0"], "ray.num_workers is 0"),
        (["--fit.schedule", "linear"], "linear"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(["--config", SASREC, *LINE, *words])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: {name: sasrec, dimm: 3}", r"unknown key 'model.dimm' in .*; the nearest key is 'model.dim'"),
        ("fit: {lr: 0.1}", "no model is named; give a --config"),
        ("- 1", "holds list, not a mapping"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(content)
    with pytest.raises(UserError, match=message):
        parse(["--config", str(config), *LINE])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"cannot read nowhere\.yaml \(no such file\)"):
        parse(["--config", "nowhere.yaml", *LINE])


def test_the_nearest_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=r"the nearest is jobs/configs/tiger_small\.yaml; check --config"):
        parse(["--config", "jobs/configs/tiger_smal.yaml", *LINE])
