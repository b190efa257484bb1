"""The teacher's cache: training as without it, made once, unpadded, and refused where
it is not the right one.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from models.retrieval.data import RequestBatch, RetrievalDataset
from models.retrieval.distillation.teacher_cache import CachedStates
from models.retrieval.parts import History
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.locks import LOCK, hold_lock
from models.storage.tables import (
    UserError,
    add_seal,
    check_seal,
    open_uri,
    read_manifest,
    read_table,
)
from models.training.fit import EpochEvent, FitConfig, fit
from models.training_run import TrainingRun
from tests.fixtures.batches import fill_batch
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training

ROOT = Path(__file__).parents[3]
TIGER = {
    "name": "tiger",
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "n_user_tokens": 2,
    "max_history": 6,
}
HEADS = {
    "attention_heads": 2,
    "attention_width": 24,
    "ffn_width": 32,
    "head_width": 20,
    "dropout": 0.0,
}
ENCODER = {"name": "sid_mlp_pp_encoder", "encoder_layers": 1, "encoder_width": 24}
FIT = FitConfig(
    batch_size=32, max_epochs=1, lr=5e-3, warmup_share=0.0, patience=0, seed=2
)


@dataclass
class World:
    """Tables and a teacher; nothing is said of how good it is."""

    folder: Path
    tables: str
    sids: str

    def build(
        self, cache: Path | str | None, fit: FitConfig = FIT, **model: Any
    ) -> TrainingRun:
        options = {
            "name": "sid_mlp",
            "teacher": str(self.folder / "tiger"),
            "teacher_cache": str(cache or ""),
            **model,
        }
        if options["name"] in ("sid_mlp", "sid_mlp_pp"):
            options = {**HEADS, **options}
        return build_training(options, fit, Inputs(self.tables, self.sids))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("cache")
    made = World(folder, *write_tables(folder, users=30))
    setup = build_training(TIGER, FIT, Inputs(made.tables, made.sids))
    torch.nn.init.normal_(
        setup.model.backbone.embedding.weight, std=2.0
    )  # an opinion that is far from uniform
    checkpoint.save(folder / "tiger/best", setup.model, setup.checkpoint(epoch=1))
    stage_1 = made.build(None, **ENCODER)
    checkpoint.save(folder / "encoder/best", stage_1.model, stage_1.checkpoint(epoch=1))
    return made


@pytest.fixture(scope="module")
def cache(world: World) -> Path:
    world.build(world.folder / "kept")
    return world.folder / "kept"


def run(setup: TrainingRun) -> list[EpochEvent]:
    events = fit(setup.model, setup.train, setup.validate, setup.fit, means=setup.means)
    return [event for event in events if isinstance(event, EpochEvent)]


def requests(world: World, split: Any) -> RetrievalDataset:
    return RetrievalDataset.load(f"{world.tables}/sequences", split, max_history=6)


def tables(cache: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in cache.iterdir() if path.is_dir())


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"alpha": 0.3, "tau": 2.0, "logits": "vocabulary", "readout": "per_digit"},
        {"alpha": 0.0, "path": "plain"},
        {"name": "one_layer", "m": 1},
        ENCODER,
        {"name": "sid_mlp_pp", "encoder": "encoder"},
        {"name": "sid_mlp_pp", "end_to_end": True},
    ],
)
def test_it_trains_as_without_up_to_half_precision(
    world: World, cache: Path, model: dict[str, Any]
) -> None:
    if "encoder" in model:
        model = {
            **model,
            "encoder": str(world.folder / model["encoder"]),
            "teacher": "",
        }
    options = FitConfig(
        **{**vars(FIT), "metric": "neg_mse" if model is ENCODER else "ndcg@10"}
    )
    plain, kept = (
        world.build(None, options, **model),
        world.build(cache, options, **model),
    )
    before = {name: value.clone() for name, value in plain.model.state_dict().items()}
    expected, found = run(plain), run(kept)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=2e-3)
        assert ours.metrics[options.metric] == pytest.approx(
            theirs.metrics[options.metric], rel=0.1, abs=0.02
        )
    ours, theirs = kept.model.state_dict(), plain.model.state_dict()
    moved = [
        name for name, value in theirs.items() if not torch.equal(value, before[name])
    ]
    assert moved
    for name in moved:
        change = (theirs[name] - before[name]).norm()
        assert (ours[name] - theirs[name]).norm() < 0.1 * change


def test_epochs_and_validation_ask_neither_encoder_nor_teacher(
    world: World, cache: Path
) -> None:
    setup = world.build(cache)
    teacher = setup.model.teacher
    for module in (
        setup.model.backbone.encoder,
        teacher.decoder.stack,
        teacher.backbone.encoder,
    ):
        for parameter in module.parameters():
            parameter.fill_(math.nan)
    assert all(
        math.isfinite(event.loss) and event.metrics["recall@20"] > 0
        for event in run(setup)
    )
    for split in ("test", "next"):  # the numbers of `next` are those of other requests
        examples = requests(world, split)
        batch = examples.collate(next(examples.evaluation_batches(8)))
        assert setup.model.teacher_outputs("encoder", batch) is None


def test_it_holds_each_request_once_without_padding_at_half_precision(
    world: World, cache: Path
) -> None:
    train, val = requests(world, "train"), requests(world, "val")
    encoder, decoder = (
        next(cache.glob(f"{name}-*")) for name in ("encoder", "decoder")
    )
    table = read_table(str(encoder), "encoder")
    assert sorted(table["request"].to_pylist()) == sorted(
        [*train.request_numbers, *val.request_numbers]
    )
    lengths = {
        n: 2 + 3 * length
        for part in (train, val)
        for n, length in zip(part.request_numbers, part.lengths, strict=True)
    }
    assert {
        n: len(states) // 16
        for n, states in zip(*table.to_pydict().values(), strict=True)
    } == lengths
    assert str(table.schema.field("states").type.value_type) == "halffloat"
    table = read_table(str(decoder), "decoder")
    assert sorted(table["request"].to_pylist()) == sorted(train.request_numbers)
    assert {len(states) for states in table["states"].to_pylist()} == {3 * 16}

    setup = world.build(cache)
    counts = {"encoder": len(train) + len(val), "decoder": len(train)}
    for line, (name, count) in zip(setup.messages[:2], counts.items(), strict=True):
        assert f"{name} states of {count:,} requests, " in line
        assert "MiB in half precision, reused" in line
    batch = train.collate(np.array([5, 0, 9]))
    found, expected = (
        setup.model.teacher_outputs("encoder", batch),
        setup.model.teacher.encode(batch),
    )
    assert torch.equal(found.lengths, expected.lengths)
    real = (found.padding == 0)[:, 0, 0]
    torch.testing.assert_close(
        found.states[real], expected.states[real], rtol=1e-3, atol=1e-4
    )
    assert (found.states[~real] == 0).all()


def test_runs_share_what_is_the_same(world: World, tmp_path: Path) -> None:
    world.build(tmp_path, alpha=0.0)
    assert tables(tmp_path) == ["encoder"]  # the targets alone need no teacher's logits
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    world.build(tmp_path, **ENCODER)
    world.build(tmp_path, logits="vocabulary")
    world.build(tmp_path, m=2)
    assert tables(tmp_path) == ["decoder", "encoder"]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    world.build(tmp_path, name="sid_mlp_pp", end_to_end=True)
    assert tables(tmp_path) == ["decoder", "encoder"]
    world.build(tmp_path, name="sid_mlp_pp", encoder=str(world.folder / "encoder"))
    assert tables(tmp_path) == ["decoder", "encoder", "encoder"]


def test_half_written_it_is_made_anew(world: World, tmp_path: Path) -> None:
    world.build(tmp_path, **ENCODER)
    uri = next(tmp_path.glob("encoder-*"))
    content = read_table(str(uri))
    (uri / "manifest.json").unlink()
    (uri / "part-00000000000000000000.parquet").write_bytes(b"cut o")
    setup = world.build(tmp_path, **ENCODER)
    assert "computed in" in setup.messages[0]
    assert read_table(str(uri)).equals(content)
    assert files(str(uri)) == sorted(
        ["manifest.json", *(part.path for part in read_manifest(str(uri)).files)]
    )


def test_a_wrong_one_is_refused_with_what_to_do(
    world: World, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIELINE_CACHE", str(tmp_path / "decoded"))
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    tables = (
        path
        for path in copy.glob("encoder-*")
        if "encoder_width" not in read_manifest(str(path)).config
    )
    uri = next(tables)
    manifest = check_seal((uri / "manifest.json").read_text())

    def refused(why: str) -> None:
        with pytest.raises(
            UserError,
            match=rf"the teacher cache {uri} cannot be used \(.*{why}.*\); remove the folder",
        ):
            world.build(copy)

    def changed(**change: Any) -> None:
        (uri / "manifest.json").write_text(add_seal({**manifest, **change}))

    changed(files=[])
    refused("it lacks .* requests")
    (uri / "manifest.json").write_text("{")
    refused("is damaged")
    changed()
    part = next(uri.glob("*.parquet"))
    whole = part.read_bytes()
    middle = len(whole) // 2
    part.write_bytes(whole[:middle] + bytes([whole[middle] ^ 16]) + whole[middle + 1 :])
    refused("is damaged: its SHA-256 is")
    part.write_bytes(whole[:-7])
    refused("truncated or replaced")
    shutil.rmtree(uri)
    assert "computed in" in world.build(copy).messages[0]

    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"cannot write to .*; give model\.teacher_cache a folder"
    ):
        world.build(tmp_path / "file")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.data())
def test_vectors_of_any_requests_in_any_order(
    lengths: list[int], data: st.DataObject
) -> None:
    """Padded to the longest that is asked for, as one by one from the file; None where
    a number is not in it.
    """
    numbers = data.draw(st.permutations([3 * i + 2 for i in range(len(lengths))]))
    values = np.arange(4 * sum(lengths), dtype=np.float16).reshape(-1, 4)
    own = dict(zip(numbers, np.split(values, np.cumsum(lengths)[:-1]), strict=True))
    states = CachedStates(np.array(numbers), np.array(lengths), values)
    asked = data.draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=6))

    def find(numbers: list[int], target: int = 0) -> History | None:
        request, targets = torch.tensor(numbers), torch.full((len(numbers),), target)
        return states.pad_states(
            fill_batch(RequestBatch, {}, request=request, target=targets)
        )

    found = find(asked)
    assert found is not None
    longest = max(len(own[number]) for number in asked)
    states_of, padding = found.states, found.padding
    assert states_of.shape == (len(asked), longest, 4)
    assert (padding is None) == all(len(own[number]) == longest for number in asked)
    for row, number in enumerate(asked):
        length = len(own[number])
        assert (
            states_of[row, :length].numpy().tolist()
            == own[number].astype(np.float32).tolist()
        )
        assert (states_of[row, length:] == 0).all()
        assert padding is None or (padding[row, 0, 0] == 0).tolist() == [
            i < length for i in range(longest)
        ]
    for missing in (0, 1, 3 * len(lengths) + 2):
        assert find([*asked, missing]) is None
    assert find(asked, target=-1) is None


def make(rank: int, rendezvous: str, world: World, cache: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2
    )
    options = {
        "name": "sid_mlp",
        "teacher": str(world.folder / "tiger"),
        "teacher_cache": str(cache),
        **HEADS,
    }
    setup = build_training(
        options, FIT, Inputs(world.tables, world.sids), rank=rank, world=2
    )
    mine = np.concatenate(
        [setup.train.dataset.request_numbers, setup.val.request_numbers]
    )
    assert sorted(setup.model._teacher_outputs["encoder"].requests) == sorted(mine)
    dist.destroy_process_group()


@pytest.mark.long
def test_workers_make_it_together(world: World, cache: Path, tmp_path: Path) -> None:
    arguments = (str(tmp_path / "rendezvous"), world, tmp_path / "cache")
    mp.start_processes(make, arguments, nprocs=2, start_method="forkserver")
    for whole in (tmp_path / "cache").glob("[!.]*"):
        ours, alone = (
            read_table(str(folder / whole.name)).sort_by("request")
            for folder in (tmp_path / "cache", cache)
        )
        assert len(read_manifest(str(tmp_path / "cache" / whole.name)).files) == 2
        assert ours["request"].equals(alone["request"])
        torch.testing.assert_close(
            *(
                torch.tensor(t["states"].combine_chunks().flatten().to_numpy())
                for t in (ours, alone)
            ),
            rtol=2e-3,
            atol=1e-3,
        )


def make_alone(world: World, cache: str, began: Any, notes: Any) -> None:
    torch.set_num_threads(1)
    began.put(None)
    notes.put(world.build(cache).messages)


def test_of_two_processes_at_a_uri_one_makes_it_and_the_other_waits(
    world: World, cache: Path, s3: str
) -> None:
    processes = mp.get_context(
        "spawn"
    )  # the server's address is in this process's environment
    began, notes = processes.Queue(), processes.Queue()
    runs = [
        processes.Process(target=make_alone, args=(world, f"{s3}/kept", began, notes))
        for _ in range(2)
    ]
    names = sorted(
        path.name
        for path in cache.iterdir()
        if path.name.startswith(("encoder-", "decoder-"))
    )
    names = [
        name
        for name in names
        if "encoder_width" not in read_manifest(str(cache / name)).config
    ]
    with ExitStack() as stack:
        for name in names:  # so that both ask for it before it is there
            stack.enter_context(hold_lock(f"{s3}/kept/{name}/{LOCK}", "it is held"))
        for run in runs:
            run.start()
        for _ in runs:
            began.get()
    said = [notes.get()[:2] for _ in runs]  # the lines about the teacher cache
    for run in runs:
        run.join()
    for name, lines in zip(
        ("encoder", "decoder"), zip(*said, strict=True), strict=True
    ):
        assert sorted("reused" in line for line in lines) == [False, True], (
            name,
            lines,
        )
    for name in names:
        assert read_table(f"{s3}/kept/{name}").equals(read_table(str(cache / name)))
        assert files(f"{s3}/kept/{name}") == files(str(cache / name))


HOLDS = """
import sys
from models.storage.locks import LOCK, hold_lock
from models.storage.tables import open_uri
with hold_lock(f"{sys.argv[1]}/{LOCK}", "it is held"):
    filesystem, path = open_uri(f"{sys.argv[1]}/part-00000000000000000000.parquet")
    with filesystem.open_output_stream(path) as stream:
        stream.write(b"PAR1")
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.exhaustive
def test_the_lock_of_a_killed_run_at_a_uri_is_taken_over(
    world: World, cache: Path, s3: str
) -> None:
    name = next(
        p.name
        for p in cache.glob("encoder-*")
        if "encoder_width" not in read_manifest(str(p)).config
    )
    uri = f"{s3}/killed/{name}"
    line = [sys.executable, "-c", HOLDS, uri]
    killed = subprocess.Popen(
        line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == "held\n"
    killed.kill()
    killed.wait()
    assert "part-00000000000000000000.parquet" in files(uri)
    assert "computed in" in world.build(f"{s3}/killed").messages[0]
    assert read_table(uri).equals(read_table(str(cache / name)))
    assert files(uri) == files(str(cache / name))


def files(uri: str) -> list[str]:
    """The names in a folder, but for a local lock, which stays."""
    filesystem, path = open_uri(uri)
    names = (
        entry.base_name for entry in filesystem.get_file_info(fs.FileSelector(path))
    )
    return sorted(name for name in names if name != LOCK)
