"""Checkpoints: what was saved comes back, and what does not belong together is refused
in one line.
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

import pytest
import torch
from pyarrow import fs
from torch import nn

from models.build import build_model, load_model
from models.retrieval.data import Catalogue, HistoryBatch
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import TableVersion, UserError, add_seal, check_seal
from models.storage.uri import open_uri
from models.train import main
from models.training.fit import FitConfig
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
    folder = tmp_path_factory.mktemp("checkpoint")
    tables, sids = write_tables(folder / "small")
    other, other_sids = write_tables(folder / "other", items=20)
    for name, model in {"sasrec": SASREC, "tiger": TIGER}.items():
        setup = build_training(model, FitConfig(batch_size=8), Inputs(tables, sids))
        checkpoint.save(
            folder / name,
            setup.model,
            setup.checkpoint(epoch=3),
            {"cursor": {"epoch": 3}},
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
def test_a_loaded_model_ranks_as_the_saved_one(
    saved: dict[str, str], name: str
) -> None:
    catalogue = Catalogue.load(saved["tables"], saved["sids"])
    model, about = load_model(saved[name], catalogue)
    again, _ = load_model(saved[name], catalogue, name=name)
    assert about.epoch == 3
    assert set(about.hashes) == (
        {"sequences", "items", "sids", "trie"}
        if name == "tiger"
        else {"sequences", "items"}
    )
    batch = HistoryBatch(
        history=torch.tensor([[1, 2, 3]]),
        history_length=torch.tensor([3]),
        user=torch.tensor([7]),
    )
    for ours, theirs in zip(
        model.recommend(batch, 10), again.recommend(batch, 10), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert checkpoint.load_state(saved[name]) == {"cursor": {"epoch": 3}}


def test_what_does_not_belong_together_is_refused(saved: dict[str, str]) -> None:
    catalogue = Catalogue.load(saved["tables"], saved["sids"])
    wider = build_model({**SASREC, "dim": 32}, catalogue)
    other_trie = replace(
        catalogue, versions={**catalogue.versions, "trie": TableVersion("0" * 64)}
    )
    for load, said in (
        (
            lambda: load_model(saved["sasrec"], catalogue, name="tiger"),
            "of the model 'sasrec', not of 'tiger'",
        ),
        (
            lambda: checkpoint.load_weights(wider, saved["sasrec"]),
            "does not fit the model.*size mismatch",
        ),
        (
            lambda: load_model(saved["sasrec"], Catalogue.load(saved["other"])),
            "another table 'items'.*evaluate on",
        ),
        (
            lambda: load_model(saved["tiger"], Catalogue.load(saved["tables"])),
            "table 'sids' that is not given",
        ),
        (
            lambda: Catalogue.load(saved["tables"], saved["other_sids"]),
            "sids was made from other items",
        ),
        (
            lambda: load_model(saved["tiger"], other_trie),
            "another table 'trie'.*give the --sids",
        ),
    ):
        with pytest.raises(UserError, match=said):
            load()


def test_damage_is_named(saved: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a checkpoint: it holds no config\.json"):
        checkpoint.read(tmp_path)
    broken = Path(shutil.copytree(saved["sasrec"], tmp_path / "broken"))
    weights, state, config = (
        broken / name for name in ("model.safetensors", "state.pt", "config.json")
    )
    state.unlink()
    with pytest.raises(UserError, match=r"holds no state\.pt"):
        checkpoint.load_state(broken)
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(
        UserError,
        match=r"model\.safetensors has \d+ bytes, config\.json says \d+: truncated",
    ):
        checkpoint.read(broken)
    weights.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        checkpoint.read(broken)
    config.write_text("{")
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        checkpoint.read(broken)


def test_training_with_pytorch_alone_goes_on_where_it_was(
    saved: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = tmp_path / "sasrec.yaml"
    config.write_text(
        json.dumps({"model": SASREC, "fit": {"batch_size": 8, "max_epochs": 3}})
    )
    arguments = [
        "--config",
        str(config),
        "--tables",
        saved["tables"],
        "--output",
        str(tmp_path / "run"),
    ]
    main(arguments)
    assert "epoch   3/3" in capsys.readouterr().out
    main(arguments)
    again = capsys.readouterr().out
    assert "continuing after epoch 3" in again
    assert "val ndcg" not in again
    assert (
        checkpoint.read(tmp_path / "run/best").metrics["ndcg@10"] > 0.3
    )  # random order: about 0.19
    config.write_text(
        json.dumps({"model": SASREC, "fit": {"batch_size": 8, "max_epochs": 4}})
    )
    with pytest.raises(
        SystemExit,
        match=r"run was started with fit.max_epochs 3, not 4; give another --output",
    ):
        main(arguments)
    config.write_text(json.dumps({"model": TIGER}))
    with pytest.raises(SystemExit, match="needs semantic IDs"):
        main(arguments)


def linear(epoch: int) -> tuple[nn.Module, checkpoint.Checkpoint, dict]:
    """A small model with what is saved beside it, all of `epoch`, in a run whose best
    is the first.
    """
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, epoch)
    about = checkpoint.Checkpoint(
        {"name": "linear"}, epoch=epoch, step=epoch, best={"step": 1}
    )
    return model, about, {"epoch": epoch, "moments": torch.full((5,), float(epoch))}


def used(folder: Path) -> tuple[checkpoint.Checkpoint, list[float], dict]:
    """All that is in a checkpoint of `linear`."""
    model = nn.Linear(3, 2)
    checkpoint.load_weights(model, folder)
    state = checkpoint.load_state(folder)
    return (
        checkpoint.read(folder),
        model.weight.flatten().tolist(),
        {**state, "moments": state["moments"].tolist()},
    )


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "config.json"])
def test_a_flipped_bit_is_found_when_the_checkpoint_is_used(
    tmp_path: Path, name: str
) -> None:
    checkpoint.save(tmp_path / "best", *linear(1))
    right = used(tmp_path / "best")
    file = tmp_path / "best" / name
    whole, said = file.read_bytes(), []
    places = range(0, len(whole), 1 if len(whole) < 300 else 7)
    for place in places:
        file.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        try:
            assert used(tmp_path / "best") == right
        except UserError as error:
            said.append(str(error))
    assert all(
        name in line and "use another checkpoint or train again" in line
        for line in said
    )
    assert not any("\n" in line for line in said)
    assert len(said) >= (
        len(places) * 0.8 if name == "config.json" else len(places)
    )  # some of its bits are spaces


def test_files_of_other_folders_are_none_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "best", *linear(1))
    config = tmp_path / "best/config.json"
    content = check_seal(config.read_text())
    for files in (
        {"../model.safetensors": 3},
        {"/etc/passwd": 3},
        ["model.safetensors"],
        3,
    ):
        config.write_text(add_seal({**content, "files": files}))
        with pytest.raises(
            UserError,
            match=r"config\.json is damaged \(.*\); use another checkpoint or train again",
        ):
            checkpoint.read(tmp_path / "best")


STEPS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "open"}
"""What a process does to files, as Python tells its audit hooks beforehand."""


def forked(work: Callable[[], None]) -> int:
    """The process id of a child that does `work` and ends with 0, or 1 where it fails."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def killed_at(step: int, work: Callable[[], None]) -> bool:
    """Does `work` in a process that is killed before its step of this number; whether
    it came to that.
    """
    left = step

    def hook(event: str, arguments: tuple) -> None:
        nonlocal left
        left -= event in STEPS
        if event in STEPS and left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        sys.addaudithook(hook)
        work()

    status = os.waitpid(forked(child), 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_run_that_is_killed_while_it_saves_has_a_whole_checkpoint(
    tmp_path: Path,
) -> None:
    def stand(epoch: int) -> None:
        checkpoint.keep(str(tmp_path), *linear(epoch))

    step, found = 0, set()
    while True:
        shutil.rmtree(tmp_path)
        stand(1)
        stand(3)
        killed = killed_at(step, lambda: stand(4))
        last = checkpoint.last(str(tmp_path))
        assert last is not None
        about, weights, state = used(tmp_path / f"step-{last.step:08d}")
        assert weights == [about.epoch] * 6
        assert state == {"epoch": about.epoch, "moments": [about.epoch] * 5}
        found.add(about.epoch)
        assert (
            checkpoint.read(tmp_path / "step-00000001").epoch == 1
        )  # the best is kept
        stand(4)  # writes over what is half done
        stand(5)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [
            "step-00000001",
            "step-00000005",
        ]
        best = checkpoint.publish(str(tmp_path), linear(5)[1])
        assert (checkpoint.read(best).epoch, sorted(checkpoint.read(best).files)) == (
            1,
            ["model.safetensors"],
        )
        if not killed:
            break
        step += 1
    assert step >= 4  # new folder, config.json, in its place, the old one's files
    assert found == {3, 4}


def test_a_checkpoint_that_is_cut_off_is_not_gone_on_from(tmp_path: Path) -> None:
    for step in (8, 16, 24, 32):
        checkpoint.save(tmp_path / f"step-{step:08d}", *linear(step))
    (tmp_path / "step-00000032/config.json").unlink()
    (tmp_path / "step-00000024/state.pt").write_bytes(b"")
    last = checkpoint.last(str(tmp_path))
    assert last is not None
    assert last.step == 16
    assert checkpoint.last(str(tmp_path / "nothing")) is None


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.bias[1] = float("nan")
    checkpoint.save(
        tmp_path / "best", model, checkpoint.Checkpoint(model={"name": "any"})
    )
    with pytest.raises(
        UserError,
        match=r"weights of .*best are not all finite \(bias\): its training diverged",
    ):
        checkpoint.load_weights(torch.nn.Linear(3, 2), tmp_path / "best")


def test_a_checkpoint_on_its_way_to_a_storage_is_none_until_it_is_there(
    s3: str,
) -> None:
    way: list[Callable[[], None]] = []

    class Held(checkpoint.Uploads):
        def __call__(self, upload: Callable[[], None]) -> None:
            way.append(upload)

    run = f"{s3}/uploads"
    checkpoint.keep(run, *linear(1), first := checkpoint.Uploads())
    first.wait()
    for epoch in (
        2,
        3,
    ):  # what is sent is what the model was, whatever has become of it
        checkpoint.keep(run, *linear(epoch), Held())
    steps = []
    for upload in [lambda: None, *way]:
        upload()
        last = checkpoint.last(run)
        assert last is not None
        with checkpoint.local(f"{run}/step-{last.step:08d}") as folder:
            assert used(folder)[1] == [last.epoch] * 6
        steps.append(last.step)
    assert steps == [1, 2, 3]
    filesystem, path = open_uri(run)
    left = [info.base_name for info in filesystem.get_file_info(fs.FileSelector(path))]
    assert left == ["step-00000001", "step-00000003"]  # the best and the last

    def fail() -> None:
        raise OSError("no room")

    uploads = checkpoint.Uploads()
    uploads(fail)
    with pytest.raises(OSError, match="no room"):
        uploads(way[0])
