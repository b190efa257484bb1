"""The shared command line: options from dataclasses, and errors that name the nearest key."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobs import cli
from models.tables import UserError


@dataclass
class Split:
    kind: str = "leave_last_out"
    """Which split."""
    val_share: float = 0.1
    """Share of validation."""

    def __post_init__(self) -> None:
        if not 0 < self.val_share < 1:
            raise ValueError(f"val_share {self.val_share} is outside (0, 1); give a share such as 0.1")


@dataclass
class Options:
    source: str
    """The source."""
    overwrite: bool = False
    """Replace the table."""
    split: Split = field(default_factory=Split)
    """How to split."""


def parse(*argv: str) -> Options:
    return cli.parse(Options, "example", list(argv))


def test_line_wins_over_config(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("source: a\nsplit:\n  val_share: 0.3\n")
    options = parse("--config", str(path), "--source", "b")
    assert options == Options("b", split=Split(val_share=0.3))


def test_flag_needs_no_value() -> None:
    assert parse("--source", "a", "--overwrite", "--split.kind", "temporal").overwrite
    assert parse("--overwrite", "--source", "a").overwrite
    assert parse("--source", "overwrite").source == "overwrite"  # a value is no flag


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sorce", "a"], "unknown key 'sorce'; the nearest key is 'source'"),
        (["--source", "a", "--split.val_shar", "1"], "the nearest key is 'split.val_share'"),
        (["--source", "a", "--split.val_share", "x"], "split.val_share"),
        (["--source", "a", "--split.val_share", "7"], "outside (0, 1)"),
        ([], "source"),
    ],
)
def test_bad_line(argv: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(*argv)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source: a\nsplit:\n  kin: x\n", "unknown key 'split.kin'"),
        ("sorce: a\n", "the nearest key is 'source'"),
        ("- a\n", "not a mapping"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_bad_config(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        parse("--config", str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_config() -> None:
    with pytest.raises(UserError, match=r"cannot read nowhere\.yaml \(no such file\)"):
        parse("--config", "nowhere.yaml")


def test_user_error_behind_a_ray_task(ray_local: None) -> None:
    import ray

    @ray.remote
    def fail() -> None:
        raise UserError("a is 1, the limit is 0; give 0")

    with pytest.raises(Exception) as caught:  # noqa: PT011 - Ray wraps it in a class of its own
        ray.get(fail.remote())
    found = cli.user_error_in(caught.value)
    assert found is not None
    assert str(found) == "a is 1, the limit is 0; give 0"


@pytest.mark.long
@pytest.mark.parametrize(("job", "policy"), [("train", "PASSIVE"), ("benchmark", "None")])
def test_waiting_threads_sleep_beside_other_processes_and_spin_where_time_is_taken(job: str, policy: str) -> None:
    code = f"import os, sys; sys.argv[0] = '/jobs/{job}.py'; import jobs.cli; print(os.environ.get('OMP_WAIT_POLICY'))"
    given = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "RAY_ADDRESS")}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == policy
