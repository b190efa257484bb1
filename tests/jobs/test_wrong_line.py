"""Test that wrong command lines and damaged inputs are refused before Ray starts.

The error is one line that names the mistake, and nothing is written.
"""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from jobs import cli
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit import FitConfig
from tests.fixtures.search_tables import write_search
from tests.fixtures.trainings import build_training

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def paths(
    small: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Write tables of both kinds, semantic IDs, text and a TIGER's run.

    Return their folders by the names that the command lines use.
    """
    home = tmp_path_factory.mktemp("wrong")
    tiger = {"name": "tiger", "d_model": 8, "d_ff": 8, "num_heads": 1, "d_kv": 4}
    setup = build_training(tiger, FitConfig(batch_size=8), Inputs(*small))
    checkpoint.save(home / "runs/teacher/best", setup.model, setup.checkpoint(epoch=1))
    (home / "runs/teacher/run.json").write_text("{}")
    (home / "log.csv").write_text("user,item,ms\na,b,1600000000000\n")
    (home / "source.yaml").write_text(
        "{files: log.csv, user: user, item: item, time: {column: ms, unit: ms}}"
    )
    search, text = write_search(home)
    return {
        "home": str(home),
        "tables": small[0],
        "sids": small[1],
        "search": search,
        "text": text,
        "runs": str(home / "runs"),
    }


TRAIN = "train --storage {runs} --name new --config jobs/configs"
SWEEP = "sweep --storage {runs} --name new --grid tuning/grids"
TIGERS = f"{SWEEP}/tiger.yaml --tables {{tables}} --sids {{sids}}"
PREPARE = "prepare --source {home}/source.yaml --input {home} --output {runs}/out"
EVALUATE = "evaluate --checkpoint {runs}/teacher/best"
WRONG_LINES = [
    (
        f"{TRAIN}/sasrec.yaml --tables {{tables}} --fit.metric ndcg10",
        "'ndcg10', which .* the nearest is 'ndcg@10'",
    ),
    (
        f"{TRAIN}/sasrec.yaml --tables {{tables}} --ray.num_workers 4096 --fit.batch_size 4096",
        "4,096 workers need 4096 CPUs, 1 CPU for each; this machine has .*; lower --ray.num_workers or ",
    ),
    (f"{TRAIN}/sasrec.yaml --tables {{tables}} --name a/b", "the run's name is 'a/b'"),
    (
        f"{TRAIN}/tiger_small.yaml --tables {{tables}}",
        "the model 'tiger' needs semantic IDs",
    ),
    (
        f"{TRAIN}/qgs.yaml --tables {{tables}}",
        "'qgs' is of search, and {tables} holds tables of retrieval; models of retrieval are .*sasrec, .*: "
        "give a config of one .*, or tables that jobs.prepare made with --kind search",
    ),
    (
        f"{TRAIN}/tiger_small.yaml --tables {{search}}",
        "'tiger' is of retrieval, .* models of search are pair_ctr, .*hllm, qgs: ",
    ),
    (
        f"{TRAIN}/sid_mlp.yaml --tables {{tables}} --sids {{sids}}",
        "model.teacher is not set; .* which is STORAGE/NAME of",
    ),
    (
        f"{TRAIN}/sid_mlp.yaml --tables {{tables}} --sids {{sids}} --model.teacher teacher",
        "model.teacher is teacher, the name of a run",
    ),
    (
        f"{TRAIN}/sasrec.yaml --tables {{tables}} --model.nam x",
        "unknown key 'model.nam'; .*'model.name'",
    ),
    (
        "train --tables {tables} --storage {runs} --name new",
        "no model is named",
    ),
    (
        f"{TRAIN}/sasrec.yaml --tables {{tables}} --model tiger --model.dim 8",
        "--model is 'tiger', it must be a mapping",
    ),
    (
        f"{SWEEP}/sid_mlp_alpha.yaml --tables {{tables}} --model.teacher t",
        "needs semantic IDs",
    ),
    (
        f"{SWEEP}/sid_mlp_alpha.yaml --tables {{tables}} --sids {{sids}} --model.teacher gone",
        "the teacher .*/gone is neither a checkpoint nor a finished run",
    ),
    (
        f"{TIGERS} --fit.metric ndcg10",
        "the grid tiger ranks by val/ndcg@10",
    ),
    (
        f"{TIGERS} --ray.num_workers 4096 --fit.batch_size 4096",
        "4,096 workers need 4096 CPUs",
    ),
    (
        f"{EVALUATE} --tables {{tables}}",
        "the model 'tiger' needs semantic IDs",
    ),
    (
        "evaluate --checkpoint {runs}/gone --tables {tables}",
        "--checkpoint is {runs}/gone, which does not exist",
    ),
    (
        f"{EVALUATE} --tables {{tables}} --sids {{sids}} --draft_beam 5",
        "the model 'tiger' has no option --draft_beam when recommending",
    ),
    (f"{EVALUATE} --tables {{tables}} --sids {{sids}} --beam 0", "beam is 0"),
    (
        f"{EVALUATE} --tables {{tables}} --sids {{sids}} --allowed {{home}}/log.csv",
        "--allowed is given without",
    ),
    (
        f"{EVALUATE} --tables {{tables}} --sids {{sids}} --nearest {{runs}}/near --unseen true",
        "--unseen is given with --nearest, which ranks no requests",
    ),
    (
        f"{EVALUATE} --tables {{tables}} --sids {{sids}} --batch_inference {{runs}}/out --allowed {{home}}/log.csv",
        "log.csv has the row 'user,item,ms'",
    ),
    (
        f"{EVALUATE} --tables {{tables}} --sids {{sids}} --batch_inference=",
        "--batch_inference is empty",
    ),
    (f"{EVALUATE} --tables {{search}} --sids {{sids}}", "'tiger' is of retrieval"),
    (
        "tokenize --tables {tables} --output {runs}/out --encoder tfdf --tokenizer rqkmeans",
        "the encoder tfdf is neither a folder nor .*; the nearest is 'tfidf'",
    ),
    (
        "encode --tables {tables} --output {runs}/out --encoder tfdf",
        "the encoder tfdf is neither a folder nor .*; the nearest is 'tfidf'",
    ),
    (
        f"{TRAIN}/qgs.yaml --tables {{search}} --text {{text}} --fit.metric ndcg@10",
        "'ndcg@10', .* known are gauc, ",
    ),
    (
        f"{TRAIN}/sasrec.yaml --tables {{tables}} --tracking_uri http://me-the-user:pa55%2Fw0rd@127.0.0.1:5000",
        "holds a user, password or key",
    ),
    (
        "train --tables t --storage s --name n --config nowhere.yaml",
        r"cannot read nowhere\.yaml \(no such file\)",
    ),
    *[
        (f"{TRAIN}/sasrec.yaml --tables t {words}", message)
        for words, message in (
            ("--fit.lrr 1", "unknown key 'fit.lrr'; the nearest key is 'fit.lr'"),
            (
                "--model.num_layer 1",
                "unknown key 'model.num_layer'; the nearest key is 'model.num_layers'",
            ),
            (
                "--fit.device cpu",
                "unknown key 'fit.device'; the nearest key is 'ray.use_gpu'",
            ),
            ("--model.lr 1", "unknown key 'model.lr'; the nearest key is 'fit.lr'"),
            ("--model.num_layers 0", "num_layers is 0, it must be at least 1"),
            ("--model.name tigre", "unknown model 'tigre'; the nearest is 'tiger'"),
            ("--fit.batch_size 0", "fit.batch_size is 0, it must be at least 1"),
            ("--fit.lr fast", "fast"),
            ("--ray.num_workers 0", "ray.num_workers is 0"),
            ("--fit.schedule linear", "linear"),
        )
    ],
    *[
        (f"{SWEEP}/sid_mlp_alpha.yaml {words}", message)
        for words, message in (
            ("", "--tables is missing"),
            ("--dry-run --smok", "unknown key 'smok'; the nearest key is 'smoke'"),
            ("--dry-run --model.alpha", r"--model\.alpha has no value"),
            (
                "--dry-run --ray.max_failures -1",
                "max_failures is -1, it must be at least 0",
            ),
            (
                "--tables t --axes.model.alpha 0.5",
                "--axes.model.alpha is 0.5, it must be ",
            ),
            (
                "--tables t --model.alpha 0.5",
                "'model.alpha' is an axis of the grid sid_mlp_alpha",
            ),
            (
                "--tables t --axes.model.alfa [1]",
                "has no axis 'model.alfa' to give values to; .* is 'model.alpha'",
            ),
            (
                "--tables t --axes.model.alpha []",
                "the axis 'model.alpha' of the grid sid_mlp_alpha has no values",
            ),
            ("--tables t --model.teechar x", "the nearest key is 'model.teacher'"),
            ("--tables t --samples 0", "--samples is 0"),
        )
    ],
    *[
        (f"tokenize --tables t --output {{runs}}/out {words}", message)
        for words, message in (
            ("--tokenizer rqvae --rqvae.epoch 3", "nearest key is 'rqvae.epochs'"),
            ("--tokenizer bpe", "bpe"),
            ("--tokenizer rqvae --pca -1", "pca is -1"),
            ("--tokenizer published", "--tokenizer published needs --published FILE"),
            (
                "--tokenizer published --published f --embeddings e",
                "published SIDs need none",
            ),
            ("--tokenizer psid --psid.width 0", "psid.width is 0"),
        )
    ],
    *[
        (f"{PREPARE} {words}", message)
        for words, message in (
            ("--input /nowhere", "/nowhere"),
            ("--source /nowhere.yaml", "cannot read /nowhere.yaml"),
            ("--core -3", "core is -3, it must be at least 0"),
            ("--core five", "core"),
            (
                "--split.kind random",
                "--split.kind is 'random', it must be one of auto, ",
            ),
            ("--cores 3", "unknown key 'cores'; the nearest key is 'core'"),
        )
    ],
    *[
        (f"simulate --output {{runs}}/out {words}", message)
        for words, message in (
            ("--users 0", "users is 0"),
            ("--users many", "users"),
            ("--evnts 5", "the nearest key is 'events'"),
        )
    ],
]


def test_a_wrong_line_is_refused_before_ray_starts(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr(
        cli, "start_ray", lambda **options: pytest.fail("Ray is started")
    )
    monkeypatch.chdir(ROOT)
    files = sorted(Path(paths["runs"]).rglob("*"))
    for line, message in WRONG_LINES:
        with subtests.test(line=line):
            name, *words = line.format(**paths).split()
            job = importlib.import_module(f"jobs.{name}")
            with pytest.raises(UserError) as raised:
                job.run(cli.config_from_words(job, words))
            assert re.search(message.format(**paths), str(raised.value)), raised.value
            assert "\n" not in str(raised.value)
            assert "pa55" not in str(raised.value)
            assert sorted(Path(paths["runs"]).rglob("*")) == files


def truncate(file: Path) -> None:
    """Remove the last 20 bytes of a file."""
    file.write_bytes(file.read_bytes()[:-20])


def replace_weights(best: Path) -> None:
    """Replace the weights of a checkpoint by a tensor that no model has."""
    save_file({"x": torch.zeros(2)}, best / "model.safetensors")


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda home: (home / "tables/items/manifest.json").unlink(),
        "which holds no table items",
    ),
    (
        lambda home: truncate(next((home / "tables/sequences").glob("*.parquet"))),
        "truncated",
    ),
    (lambda home: truncate(home / "tables/sequences/manifest.json"), "is damaged"),
    (lambda home: truncate(home / "sids/trie/manifest.json"), "is damaged"),
    (
        lambda home: replace_weights(home / "runs/teacher/best"),
        "model.safetensors|weights",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_input_is_named_before_ray_starts(
    paths: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], object],
    message: str,
) -> None:
    monkeypatch.setattr(cli, "start_ray", lambda: pytest.fail("Ray is started"))
    copies = {name: tmp_path / name for name in ("tables", "sids", "runs")}
    for name, copy in copies.items():
        shutil.copytree(paths[name], copy)
    damage(tmp_path)
    line = f"{EVALUATE} --tables {{tables}} --sids {{sids}}"
    _, *words = line.format(**copies).split()
    evaluate = importlib.import_module("jobs.evaluate")

    with pytest.raises(UserError, match=message):
        evaluate.run(cli.config_from_words(evaluate, words))
