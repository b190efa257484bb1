"""The whole flow with everything at `s3://` on a local S3 server: the same tables and
weights as on a local disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pyarrow import fs
from safetensors.torch import load_file

from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import file_info, read_manifest
from models.training.fit import FitConfig
from pipelines.training.config import RayOptions
from tests.fixtures.trainings import train
from tuning.sweep import resolve_best_trial

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]

LINES = """
import importlib, json, shlex, sys
from jobs import cli
for line in json.loads(sys.argv[1]):
    print("$", *line, flush=True)
    module = importlib.import_module(f"jobs.{line[0]}")
    sys.argv = [line[0], *line[1:]]
    getattr(module, "run")(cli.config_from_words(module, line[1:]))
"""
"""Commands one after the other in one process, as each would run in its own."""

GRID = """\
name: rates
source: a test
fixed: {model.name: sasrec, model.dim: 16, model.num_layers: 1, model.dropout: 0.0, model.max_history: 12,
  fit.batch_size: 64, fit.max_epochs: 1, fit.patience: 0}
axes: {fit.lr: [0.01, 0.001]}
"""


@dataclass
class World:
    """A Ray whose workers know the S3 server, and folders on S3 and on disk."""

    env: dict[str, str]
    s3: str
    here: Path
    store: str

    def start(self, *lines: str) -> subprocess.Popen:
        """Start a process that runs the commands."""
        words = [
            line.format(s3=self.s3, here=self.here, store=self.store).split()
            for line in lines
        ]
        return subprocess.Popen(
            [sys.executable, "-c", LINES, json.dumps(words)],
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *lines: str) -> str:
        """Run the commands and return their output."""
        process = self.start(*lines)
        said, _ = process.communicate()
        assert process.returncode == 0, said[-4000:]
        return str(said)


@pytest.fixture(scope="module")
def world(
    in_ray: dict[str, str],
    s3: str,
    new_store: Callable[[Path], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    here = tmp_path_factory.mktemp("flow")
    (here / "grid.yaml").write_text(GRID)
    known = {
        name: value for name, value in os.environ.items() if name.startswith("AWS_")
    }
    # what `ray job submit --runtime-env` hands to a job: workers of the shared Ray do
    # not know this server
    submitted = json.dumps({"runtime_env": {"env_vars": known}})
    world = World(
        {**in_ray, **known, "RAY_JOB_CONFIG_JSON_ENV_VAR": submitted},
        s3,
        here,
        new_store(here),
    )
    prepare = "prepare --source jobs/configs/sources/simulated.yaml --input {here}/raw --partitions 2 --output "
    tokenize = "tokenize --tokenizer rqkmeans --encoder tfidf --rqkmeans.codebook_size 16 --tables "
    world.run(
        "simulate --output {here}/raw --users 120 --items 60 --events 1500",
        prepare + "{here}/tables",
        prepare + "{s3}/tables",
        "audit --tables {s3}/tables",
        tokenize + "{here}/tables --output {here}/sids",
        tokenize + "{s3}/tables --output {s3}/sids",
    )
    return world


MODEL = {
    "name": "sasrec",
    "dim": 16,
    "num_layers": 1,
    "dropout": 0.0,
    "max_history": 12,
}
FIT = {"batch_size": 64, "max_epochs": 40, "patience": 0}


def weights(folder: str) -> dict[str, torch.Tensor]:
    """Return the weights of a finished run."""
    with checkpoint.local(f"{folder}/best") as local:
        return load_file(local / checkpoint.WEIGHTS)


def test_tables_are_those_of_a_local_disk(world: World) -> None:
    for table in (
        "tables/events",
        "tables/items",
        "tables/sequences",
        "tables/rejects",
        "sids/embeddings",
        "sids/trie",
    ):
        on_disk, on_s3 = (
            read_manifest(f"{place}/{table}") for place in (world.here, world.s3)
        )
        assert [part.sha256 for part in on_s3.files] == [
            part.sha256 for part in on_disk.files
        ]
        assert on_s3.rows == on_disk.rows


def test_a_killed_training_goes_on_and_ends_with_the_weights_of_an_undisturbed_one(
    world: World,
) -> None:
    (world.here / "one.yaml").write_text(json.dumps({"model": MODEL, "fit": FIT}))
    line = (
        "train --config {here}/one.yaml --tables {s3}/tables --storage {s3}/runs --name one --ray.threads 1 "
        "--tracking_uri {store} --experiment retrieval/s3 --log_model false"
    )
    killed = world.start(line)
    while not checkpoint.last(f"{world.s3}/runs/one"):
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    assert (
        file_info(f"{world.s3}/runs/.one.lock").type == fs.FileType.File
    )  # nobody let go of it
    train(
        model=MODEL,
        fit=FitConfig(**FIT),
        ray=RayOptions(threads=1),
        inputs=Inputs(f"{world.here}/tables"),
        storage=f"{world.here}/runs",
        name="one",
        tracking_uri=world.store,
        experiment="retrieval/disk",
        log_model=False,
        on_checkpoint=lambda about: None,
    )
    said = world.run(
        line,
        "evaluate --tables {s3}/tables --split test --checkpoint {s3}/runs/one",
        "evaluate --tables {here}/tables --split test --checkpoint {here}/runs/one",
        "evaluate --tables {s3}/tables --checkpoint {s3}/runs/one --batch_inference {s3}/top --k 5",
    )
    assert "continuing " in said
    assert file_info(f"{world.s3}/runs/.one.lock").type == fs.FileType.NotFound
    on_s3, on_disk = weights(f"{world.s3}/runs/one"), weights(f"{world.here}/runs/one")
    assert on_s3.keys() == on_disk.keys()
    for name, value in on_disk.items():
        torch.testing.assert_close(on_s3[name], value, rtol=1e-5, atol=1e-6)
    rows = [
        line
        for line in said.splitlines()
        if line.lstrip().startswith(("recall", "ndcg"))
    ]
    assert len(rows) == 4
    assert rows[:2] == rows[2:]
    assert read_manifest(f"{world.s3}/top").rows == 120


def test_a_sweep_and_its_comparison(world: World) -> None:
    said = world.run(
        "sweep --grid {here}/grid.yaml --tables {s3}/tables --storage {s3}/runs --name rates --tracking_uri {store} "
        "--experiment retrieval/rates",
        "compare --experiment retrieval/rates --tracking_uri {store} --markdown {here}/compare.md",
    )
    assert "Swept 2 trials of rates" in said
    assert resolve_best_trial(f"{world.s3}/runs/rates").startswith(
        f"{world.s3}/runs/rates/lr-"
    )
    told = (world.here / "compare.md").read_text()
    assert "sasrec" in told
