"""Checkpoints: a saved model is loaded unchanged, and damaged or mismatched files are
rejected in one line.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from core.errors import UserError
from core.schemas import Inputs
from models.loaded_model import build_model, load_model
from models.retrieval.data import Catalogue
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines.training.backends import LocalBackend
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import TIGER, build_training


@pytest.fixture
def saved(small, tmp_path) -> Path:
    """Folder of a checkpoint of TIGER."""
    setup = build_training(TIGER, FitConfig(batch_size=8), Inputs(*small))
    state = {"position": {"epoch": 3}}
    checkpoint.save(tmp_path / "tiger", setup.model, setup.checkpoint(epoch=3), state)
    return tmp_path / "tiger"


@pytest.mark.parametrize("bytes_left", [100, 250_000])
def test_a_file_that_cannot_be_written_is_an_error_of_the_system(
    bytes_left, small, tmp_path
):
    setup = build_training(TIGER, FitConfig(batch_size=8), Inputs(*small))
    state = {"position": {"epoch": 3}, "filler": torch.zeros(1_000_000)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, limits[1]))
    try:
        with pytest.raises(OSError, match="tiger"):
            checkpoint.save(tmp_path / "tiger", setup.model, setup.checkpoint(), state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_checkpoint_belongs_to_its_model_and_tables(saved, small, tmp_path):
    catalogue = Catalogue.load(Inputs(*small))
    _, metadata = load_model(saved, catalogue)
    assert set(metadata.hashes) == {"sequences", "items", "sids", "trie"}
    assert checkpoint.load_state(saved) == {"position": {"epoch": 3}}

    other, other_sids = write_tables(tmp_path / "other", items=20)
    versions = dict(catalogue.versions)
    versions["trie"] = replace(versions["trie"], hash="0" * 64)
    for tables, message in (
        (Catalogue.load(Inputs(other, other_sids)), "another table 'items'"),
        (Catalogue.load(Inputs(small[0])), "table 'sids' that is not given"),
        (replace(catalogue, versions=versions), "another table 'trie'"),
    ):
        with pytest.raises(UserError, match=message):
            load_model(saved, tables)
    with pytest.raises(UserError, match="'tiger', not of 'sasrec'"):
        checkpoint.check(metadata, saved, catalogue.versions, "sasrec")
    wider = build_model({**TIGER, "d_model": 32}, catalogue)
    with pytest.raises(UserError, match="size mismatch"):
        checkpoint.load_weights(wider, saved)
    with pytest.raises(UserError, match="from other items"):
        Catalogue.load(Inputs(small[0], other_sids))


def test_a_damaged_file_is_named(saved):
    weights, config = saved / "model.safetensors", saved / "config.json"
    content = json.loads(config.read_text())

    def read_damaged(message: str) -> None:
        with pytest.raises(UserError, match=message) as error:
            checkpoint.read(saved)
        assert "\n" not in str(error.value)

    (saved / "state.pt").unlink()
    with pytest.raises(UserError, match=r"state\.pt"):
        checkpoint.load_state(saved)
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"safetensors is damaged"):
        checkpoint.weights_hash(str(saved))
    for damaged in (7, {"uri": 5}, {"experiment": "x"}):
        config.write_text(json.dumps({**content, "tracking": damaged}))
        read_damaged(r"config\.json is damaged")
    config.write_text("{")
    read_damaged(r"config\.json is damaged")
    config.unlink()
    read_damaged("not a checkpoint")


def build_linear(epoch: int) -> tuple[nn.Module, checkpoint.Checkpoint, dict]:
    """Build a small model, its metadata and its state after `epoch`, in a run whose best
    step is the first.
    """
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, epoch)
    metadata = checkpoint.Checkpoint(
        {"name": "linear"}, epoch=epoch, step=epoch, best={"step": 1}
    )
    return model, metadata, {"epoch": epoch}


def load_linear(folder: Path) -> tuple[list[float], dict]:
    """Return the weights and the state of a saved `build_linear`."""
    model = nn.Linear(3, 2)
    checkpoint.load_weights(model, folder)
    return model.weight.flatten().tolist(), checkpoint.load_state(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
def test_a_flipped_bit_is_detected(tmp_path, name):
    checkpoint.save(tmp_path, *build_linear(1))
    content = bytearray((tmp_path / name).read_bytes())
    for position in range(0, len(content), 7):
        content[position] ^= 1 << position % 8
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            load_linear(tmp_path)


FILE_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "open"}
"""Changes of files that Python reports to its audit hooks beforehand."""


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

    child = os.fork()
    if child == 0:
        try:
            sys.addaudithook(kill_process)
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_run_killed_while_saving_has_a_complete_checkpoint(tmp_path):
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

        last = backend.find_last()
        assert last is not None
        weights, state = load_linear(tmp_path / last.folder)
        assert weights == [last.epoch] * 6
        assert state == {"epoch": last.epoch}
        loaded_epochs.add(last.epoch)

        keep(4)  # overwrites the partial checkpoint
        keep(5)
        # the best and the last
        steps = checkpoint.list_steps(str(tmp_path))
        assert steps == ["step-00000005", "step-00000001"]
        num_events += 1
    # new folder, config.json, its rename, deleted files of the old checkpoint
    assert num_events > 4
    assert loaded_epochs == {3, 4}
