"""Test the shared command line: options from dataclasses, and errors of users."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import field
from pathlib import Path
from typing import Literal

import pytest
from pydantic.dataclasses import dataclass

from core import options
from core.errors import UserError


@dataclass(config=options.STRICT)
class Split:
    """Options below `split`."""

    kind: str = "leave_last_out"
    """Which split."""
    val_share: float = 0.1
    """Share of validation."""

    def __post_init__(self) -> None:
        if not 0 < self.val_share < 1:
            raise ValueError(f"val_share {self.val_share} is outside (0, 1)")


@dataclass(config=options.STRICT)
class Options:
    """Options of a job."""

    source: str
    """The source."""
    overwrite: bool = False
    """Replace the table."""
    split: Split = field(default_factory=Split)
    """How to split."""
    count: int | None = None
    """How many."""
    sizes: list[int] = field(default_factory=list)
    """How large."""
    gpu: bool | Literal["auto"] = "auto"
    """Where."""


def parse(*argv: str) -> Options:
    """Parse a command line."""
    return options.build(Options, options.read_words(argv, Options))


def test_the_command_line_overrides_the_config_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("source: a\nsplit:\n  val_share: 0.3\n")
    parsed = parse("--config", str(path), "--source", "b")
    assert parsed == Options("b", split=Split(val_share=0.3))


def test_a_flag_needs_no_value():
    assert parse("--source", "a", "--overwrite", "--split.kind", "temporal").overwrite
    assert parse("--overwrite", "--source", "a").overwrite
    assert parse("--source", "{title}").source == "{title}"
    assert parse("--source", "overwrite").source == "overwrite"  # a value, not the flag
    assert parse("--source", "a", "--overwrite=true").overwrite


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "missing: source"),
        ("--source", "--source has no value"),
        ("--source a b", "'b' belongs to no option"),
        ("--source a --split b", "split is 'b'"),
        ("--source a --sizes [1,x]", "sizes.1 is 'x'"),
        ("--source a --gpu some", "or Input should be 'auto'"),
        ("--source a --split.val_share nan", "finite"),
        ("--source a --split.val_share 7", "outside (0, 1)"),
    ],
)
def test_a_wrong_line_is_refused(argv, message):
    with pytest.raises(UserError) as error:
        parse(*argv.split())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source: a\nsplit:\n  kin: x\n", "unknown key 'split.kin'"),
        ("sorce: a\n", "the nearest is 'source'"),
        ("source: a\ncount: true\n", "count is True; input should be a number"),
        ("source: a\nsplit: {val_share: 7}\n", "split: val_share 7.0"),
        ("- a\n", "not a mapping"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_a_wrong_config_file_is_refused(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        parse("--config", str(path))
    assert message in str(error.value)


@pytest.mark.long
def test_a_closed_pipe_causes_no_error_message(tmp_path):
    """`| head` closes the pipe early."""
    (tmp_path / "log.csv").write_text(
        "user,item,time\n" + "".join(f"u{n % 9},i{n % 20},{n}\n" for n in range(300))
    )
    read, write = os.pipe()
    os.close(read)

    process = subprocess.run(
        [sys.executable, "-m", "jobs.prepare", "--suggest", str(tmp_path)],
        stdout=write,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    os.close(write)

    assert process.returncode == 141
    assert b"error" not in process.stderr
    assert b"Exception ignored" not in process.stderr
