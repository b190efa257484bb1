"""What the commands answer to bad input: one line on stderr that names the thing and the remedy, exit code 1.

The same `main` as on the command line, in this process so that one Ray serves all.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training_tables import write_tables

from jobs import cli
from models.fit import FitConfig
from models.inputs import Inputs
from models.setup import set_up

pytestmark = pytest.mark.usefixtures("ray_local")

CONFIGS = Path(__file__).parents[2] / "jobs/configs"
SOURCE = """
files: log.*
user: user
item: item
time: {column: time, unit: ms}
prepare: {core: 0, split: {kind: leave_last_out}}
"""
ROWS = [{"user": f"u{i % 5}", "item": f"i{i % 7}", "time": 1_600_000_000_000 + i} for i in range(60)]
SMALL = {
    "sasrec": {"name": "sasrec", "dim": 16, "num_layers": 1, "max_history": 12},
    "tiger": {"name": "tiger", "d_model": 16, "d_ff": 32, "num_heads": 2, "d_kv": 8, "num_encoder_layers": 1,
              "num_decoder_layers": 1, "beam": 24},
}  # fmt: skip


class Command:
    """Runs a job as its command line would and gives the one line that it ends with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def error(self, job: str, *argv: str) -> str:
        module = importlib.import_module(f"jobs.{job}")
        self.monkeypatch.setattr(sys, "argv", [f"jobs/{job}.py", *argv])
        with pytest.raises(SystemExit) as caught:
            cli.main(module.run, module.Config, getattr(module, "parse", None))
        assert caught.value.code == 1
        lines = [line for line in self.capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return lines[0]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    (tmp_path / "source.yaml").write_text(SOURCE)
    return tmp_path


def prepare(command: Command, folder: Path, *argv: str) -> str:
    out = folder / "tables"
    line = command.error(
        "prepare", "--source", str(folder / "source.yaml"), "--input", str(folder / "raw"), "--output", str(out), *argv
    )
    assert not [path for path in out.rglob("*") if path.is_file()], "something half-written is left"
    return line


def write_csv(folder: Path, rows: list[dict[str, object]]) -> None:
    names = list(rows[0])
    lines = [",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)]
    (folder / "raw/log.csv").write_text("\n".join(lines) + "\n")


def test_a_missing_column(command: Command, folder: Path) -> None:
    write_csv(folder, [{"user": row["user"], "itme": row["item"], "time": row["time"]} for row in ROWS])
    line = prepare(command, folder)
    assert "log.csv" in line
    assert "'item'" in line


def test_a_wrong_type(command: Command, folder: Path) -> None:
    write_csv(folder, [{**row, "time": "yesterday"} for row in ROWS])
    assert "time" in prepare(command, folder)


@pytest.mark.parametrize(("bad", "reason"), [(-5, "before 1980"), (1_600_000_000_000_000, "after the year 2099")])
def test_times_that_are_of_another_unit(command: Command, folder: Path, bad: int, reason: str) -> None:
    write_csv(folder, [{**row, "time": bad} if i < 6 else row for i, row in enumerate(ROWS)])
    line = prepare(command, folder)
    assert reason in line
    assert "max_rejects" in line


def test_an_empty_file(command: Command, folder: Path) -> None:
    (folder / "raw/log.csv").write_text("")
    assert "log.csv" in prepare(command, folder)


def test_a_log_without_rows(command: Command, folder: Path) -> None:
    (folder / "raw/log.csv").write_text("user,item,time\n")
    assert "error: " in prepare(command, folder)


def test_no_log_at_all(command: Command, folder: Path) -> None:
    assert "log.*" in prepare(command, folder)


def test_a_truncated_parquet_file(command: Command, folder: Path) -> None:
    path = folder / "raw/log.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-40])
    assert "log.parquet" in prepare(command, folder)


def test_an_output_that_cannot_be_written(command: Command, folder: Path) -> None:
    write_csv(folder, ROWS)
    (folder / "tables").write_text("a file where a folder should be")
    assert "cannot write to" in prepare(command, folder)


def test_an_unknown_key_on_the_line_and_in_a_file(command: Command, folder: Path) -> None:
    write_csv(folder, ROWS)
    assert "unknown key 'cor'; the nearest key is 'core'" in prepare(command, folder, "--cor", "5")
    (folder / "source.yaml").write_text(SOURCE + "uesr: x\n")
    assert "uesr" in prepare(command, folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two sets of small tables with their semantic IDs, and a checkpoint of each model on the first."""
    home = tmp_path_factory.mktemp("bad_input")
    tables, sids = write_tables(home / "small")
    _, other_sids = write_tables(home / "other", items=20)
    found = {"tables": tables, "sids": sids, "other_sids": other_sids}
    for name, model in SMALL.items():
        from models import checkpoint

        setup = set_up(model, FitConfig(batch_size=8), Inputs(tables, sids))
        checkpoint.save(home / name, setup.model, setup.checkpoint(epoch=1), {"cursor": {"epoch": 1}})
        found[name] = str(home / name)
    return found


def test_a_directory_without_a_manifest(command: Command, made: dict[str, str], tmp_path: Path) -> None:
    tables = shutil.copytree(made["tables"], tmp_path / "tables")
    (tables / "items/manifest.json").unlink()
    line = command.error(
        "train", "--config", str(CONFIGS / "sasrec.yaml"), "--tables", str(tables), "--storage", str(tmp_path / "runs"),
        "--name", "x",
    )  # fmt: skip
    assert f"--tables is {tables}, which holds no table items; give a folder that jobs.prepare made" in line
    assert not (tmp_path / "runs").exists()
    line = command.error("audit", "--tables", f"{made['tables']}s")
    assert line.endswith(f", where nothing is; give a folder that jobs.prepare made: the nearest is {made['tables']}")


def test_a_truncated_part_of_a_table(command: Command, made: dict[str, str], tmp_path: Path) -> None:
    tables = shutil.copytree(made["tables"], tmp_path / "tables")
    part = next((tables / "sequences").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-20])
    line = command.error("evaluate", "--checkpoint", made["sasrec"], "--tables", str(tables))
    assert "truncated" in line


def test_a_trie_of_other_sids(command: Command, made: dict[str, str], tmp_path: Path) -> None:
    sids = shutil.copytree(made["sids"], tmp_path / "sids")
    shutil.rmtree(sids / "trie")
    shutil.copytree(Path(made["other_sids"]) / "trie", sids / "trie")
    line = command.error("evaluate", "--checkpoint", made["tiger"], "--tables", made["tables"], "--sids", str(sids))
    assert "trie was made from other sids" in line


def test_a_model_without_its_sids(command: Command, made: dict[str, str]) -> None:
    assert "--sids" in command.error("evaluate", "--checkpoint", made["tiger"], "--tables", made["tables"])


def test_a_checkpoint_of_another_model(command: Command, made: dict[str, str], tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(made["sasrec"], tmp_path / "checkpoint"))
    shutil.copy(Path(made["tiger"]) / "model.safetensors", checkpoint / "model.safetensors")
    line = command.error("evaluate", "--checkpoint", str(checkpoint), "--tables", made["tables"])
    assert "model.safetensors" in line or "weights" in line


def test_a_damaged_manifest(command: Command, made: dict[str, str], tmp_path: Path) -> None:
    tables = shutil.copytree(made["tables"], tmp_path / "tables")
    manifest = tables / "sequences/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()))[:-50])
    assert "is damaged" in command.error("evaluate", "--checkpoint", made["sasrec"], "--tables", str(tables))
