"""Checkpoints: a saved model is loaded unchanged, and damaged or mismatched files are
rejected in one line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.errors import UserError
from core.schemas import Inputs
from models.build import build_model, load_model
from models.retrieval.data import Catalogue, HistoryBatch
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines.training.backends import LocalBackend
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training

SASREC = {"name": "sasrec", "dim": 16, "num_layers": 1, "max_history": 12}
TIGER = {
    "name": "tiger",
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "beam": 24,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of the tables of two logs and of a checkpoint of each model, by name."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tables, sids = write_tables(folder / "small")
    other, other_sids = write_tables(folder / "other", items=20)
    for name, model in {"sasrec": SASREC, "tiger": TIGER}.items():
        setup = build_training(model, FitConfig(batch_size=8), Inputs(tables, sids))
        checkpoint.save(
            folder / name,
            setup.model,
            setup.checkpoint(epoch=3),
            {"position": {"epoch": 3}},
        )
    return {
        "tables": tables,
        "sids": sids,
        "other": other,
        "other_sids": other_sids,
        "sasrec": str(folder / "sasrec"),
        "tiger": str(folder / "tiger"),
    }


@pytest.mark.parametrize("name", ["sasrec", "tiger"])
def test_a_saved_model_is_loaded_with_its_state_and_table_hashes(
    saved: dict[str, str], name: str
) -> None:
    catalogue = Catalogue.load(saved["tables"], saved["sids"])
    batch = HistoryBatch(
        history=torch.tensor([[1, 2, 3]]),
        history_length=torch.tensor([3]),
        user=torch.tensor([7]),
    )

    model, metadata = load_model(saved[name], catalogue)
    model_by_name, _ = load_model(saved[name], catalogue, name=name)

    assert metadata.epoch == 3
    tables = {"sequences", "items"}
    if name == "tiger":
        tables |= {"sids", "trie"}
    assert set(metadata.hashes) == tables
    items, scores = model.recommend(batch, 10)
    same_items, same_scores = model_by_name.recommend(batch, 10)
    assert torch.equal(items, same_items)
    assert torch.equal(scores, same_scores)
    assert checkpoint.load_state(saved[name]) == {"position": {"epoch": 3}}


def test_a_checkpoint_is_rejected_with_other_tables_than_in_training(
    saved: dict[str, str],
) -> None:
    catalogue = Catalogue.load(saved["tables"], saved["sids"])
    versions = dict(catalogue.versions)
    versions["trie"] = replace(versions["trie"], hash="0" * 64)
    other_trie = replace(catalogue, versions=versions)
    with pytest.raises(UserError, match="another table 'items'"):
        load_model(saved["sasrec"], Catalogue.load(saved["other"]))
    with pytest.raises(UserError, match="table 'sids' that is not given"):
        load_model(saved["tiger"], Catalogue.load(saved["tables"]))
    with pytest.raises(UserError, match="another table 'trie'"):
        load_model(saved["tiger"], other_trie)
    with pytest.raises(UserError, match="of the model 'sasrec', not of 'tiger'"):
        load_model(saved["sasrec"], catalogue, name="tiger")
    wider = build_model({**SASREC, "dim": 32}, catalogue)
    with pytest.raises(UserError, match="size mismatch"):
        checkpoint.load_weights(wider, saved["sasrec"])
    with pytest.raises(UserError, match="sids was made from other items"):
        Catalogue.load(saved["tables"], saved["other_sids"])


def test_a_damaged_file_is_named(saved: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a checkpoint: it holds no config\.json"):
        checkpoint.read(tmp_path)
    broken = Path(shutil.copytree(saved["sasrec"], tmp_path / "broken"))
    weights = broken / "model.safetensors"

    (broken / "state.pt").unlink()
    with pytest.raises(UserError, match=r"holds no state\.pt"):
        checkpoint.load_state(broken)

    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"has \d+ bytes|truncated"):
        checkpoint.read(broken)

    weights.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        checkpoint.read(broken)

    (broken / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        checkpoint.read(broken)


@pytest.mark.parametrize(
    "tracking", ["http://host", {"uri": 5}, {"experiment": "x"}, 7]
)
def test_a_damaged_mlflow_run_is_refused_when_a_checkpoint_is_read(
    tracking: Any, saved: dict[str, str], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(saved["sasrec"], tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "tracking": tracking}))
    with pytest.raises(UserError, match="is damaged") as error:
        checkpoint.read(broken)
    assert "\n" not in str(error.value)


def build_linear(epoch: int) -> tuple[nn.Module, checkpoint.Checkpoint, dict]:
    """Build a small model, its metadata and its state after `epoch`, in a run whose best
    step is the first.
    """
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, epoch)
    metadata = checkpoint.Checkpoint(
        {"name": "linear"}, epoch=epoch, step=epoch, best={"step": 1}
    )
    return model, metadata, {"epoch": epoch, "moments": torch.full((5,), float(epoch))}


def load_linear(folder: Path) -> tuple[checkpoint.Checkpoint, list[float], dict]:
    """Return the metadata, weights and state of a saved `build_linear`."""
    model = nn.Linear(3, 2)
    checkpoint.load_weights(model, folder)
    state = checkpoint.load_state(folder)
    return (
        checkpoint.read(folder),
        model.weight.flatten().tolist(),
        {**state, "moments": state["moments"].tolist()},
    )


def flip_bit(content: bytes, position: int) -> bytes:
    """Return the content with one bit of the byte at `position` flipped."""
    flipped = content[position] ^ (1 << position % 8)
    return content[:position] + bytes([flipped]) + content[position + 1 :]


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
def test_a_flipped_bit_is_detected_when_the_checkpoint_is_loaded(
    tmp_path: Path, name: str
) -> None:
    checkpoint.save(tmp_path / "best", *build_linear(1))
    expected = load_linear(tmp_path / "best")
    file = tmp_path / "best" / name
    content = file.read_bytes()
    positions = range(0, len(content), 1 if len(content) < 300 else 7)

    messages = []
    for position in positions:
        file.write_bytes(flip_bit(content, position))
        try:
            assert load_linear(tmp_path / "best") == expected
        except UserError as error:
            messages.append(str(error))

    for message in messages:
        assert name in message
        assert "\n" not in message
    assert len(messages) == len(positions)


FILE_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "open"}
"""Changes of files that Python reports to its audit hooks beforehand."""


def fork(work: Callable[[], None]) -> int:
    """Start a child process that calls `work` and exits with 0, or with 1 if it fails.

    Returns:
        The child's process ID.
    """
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def kill_at_file_event(number: int, work: Callable[[], None]) -> bool:
    """Call `work` in a process that is killed before its file event with this number.

    Returns:
        Whether the process was killed, rather than done before.
    """
    remaining = number

    def kill_process(event: str, arguments: tuple) -> None:
        nonlocal remaining
        if event not in FILE_EVENTS:
            return
        remaining -= 1
        if remaining < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def work_with_hook() -> None:
        sys.addaudithook(kill_process)
        work()

    _, status = os.waitpid(fork(work_with_hook), 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_run_killed_while_saving_has_a_complete_checkpoint(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path), torch.device("cpu"), print)

    def keep(epoch: int) -> None:
        backend.keep(*build_linear(epoch))

    num_events = 0
    loaded_epochs = set()
    killed = True
    while killed:
        shutil.rmtree(tmp_path)
        keep(1)
        keep(3)
        killed = kill_at_file_event(num_events, lambda: keep(4))

        last = checkpoint.last(str(tmp_path))
        assert last is not None
        metadata, weights, state = load_linear(tmp_path / f"step-{last.step:08d}")
        assert weights == [metadata.epoch] * 6
        assert state == {"epoch": metadata.epoch, "moments": [metadata.epoch] * 5}
        loaded_epochs.add(metadata.epoch)
        # the best step is never deleted
        assert checkpoint.read(tmp_path / "step-00000001").epoch == 1

        keep(4)  # overwrites the partial checkpoint
        keep(5)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [
            "step-00000001",
            "step-00000005",
        ]
        num_events += 1
    # new folder, config.json, its rename, deleted files of the old checkpoint
    assert num_events > 4
    assert loaded_epochs == {3, 4}


def test_weights_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.bias[1] = float("nan")
    metadata = checkpoint.Checkpoint(model={"name": "any"})
    checkpoint.save(tmp_path / "best", model, metadata)

    with pytest.raises(
        UserError,
        match=r"not all finite \(bias\)",
    ):
        checkpoint.load_weights(torch.nn.Linear(3, 2), tmp_path / "best")


def test_a_checkpoint_on_s3_is_loaded_as_it_was_saved(s3: str) -> None:
    backend = LocalBackend(f"{s3}/kept", torch.device("cpu"), print)
    for step in (1, 2, 3):
        backend.keep(*build_linear(step))

    last = backend.find_last()
    assert last is not None
    with checkpoint.local(f"{s3}/kept/{last.folder}") as folder:
        _, weights, _ = load_linear(folder)
    assert weights == [3.0] * 6
    # the best and the last
    assert checkpoint.list_steps(f"{s3}/kept") == ["step-00000003", "step-00000001"]
