"""Test that the jobs give the same tables and weights at `s3://` as on a local disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pyarrow import fs
from safetensors.torch import load_file

from core.files import file_info, write_file
from core.tables import read_manifest
from models.training import checkpoint
from tests.fixtures.trainings import SASREC

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]

RUN_JOBS = """
import importlib, json, shlex, sys
from jobs import cli
for line in json.loads(sys.argv[1]):
    print("$", *line, flush=True)
    module = importlib.import_module(f"jobs.{line[0]}")
    sys.argv = [line[0], *line[1:]]
    getattr(module, "run")(cli.config_from_words(module, line[1:]))
"""
"""A program that runs jobs one after the other in one process."""


@dataclass
class Storages:
    """A folder on S3 and one on disk, and an environment for jobs that use both."""

    env: dict[str, str]
    s3: str
    disk: Path
    store: str
    """URI of the MLflow store."""

    def start(self, *lines: str) -> subprocess.Popen:
        """Start a process that runs jobs; lines may name {s3}, {disk} and {store}."""
        jobs = [
            line.format(s3=self.s3, disk=self.disk, store=self.store).split()
            for line in lines
        ]
        return subprocess.Popen(
            [sys.executable, "-c", RUN_JOBS, json.dumps(jobs)],
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *lines: str) -> str:
        """Run jobs; return their output."""
        process = self.start(*lines)
        output, _ = process.communicate()
        assert process.returncode == 0, output[-4000:]
        return str(output)


@pytest.fixture(scope="module")
def storages(in_ray, s3, new_store, tmp_path_factory) -> Storages:
    """Prepare and tokenize a simulated log on S3 and on disk."""
    disk = tmp_path_factory.mktemp("flow")
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    # The variables reach the workers of the shared Ray as those of `ray job submit
    # --runtime-env` do.
    job_config = json.dumps({"runtime_env": {"env_vars": aws}})
    env = {**in_ray, **aws, "RAY_JOB_CONFIG_JSON_ENV_VAR": job_config}
    storages = Storages(env, s3, disk, new_store(disk))
    prepare = "prepare --source jobs/configs/sources/simulated.yaml --input {disk}/raw --partitions 2 --output "
    tokenize = "tokenize --tokenizer rqkmeans --encoder tfidf --tokenizer.codebook_size 16 --tables "
    storages.run(
        "simulate --output {disk}/raw --users 120 --items 60 --events 1500",
        prepare + "{disk}/tables",
        prepare + "{s3}/tables",
        "audit --tables {s3}/tables",
        tokenize + "{disk}/tables --output {disk}/sids",
        tokenize + "{s3}/tables --output {s3}/sids",
    )
    return storages


MODEL = {**SASREC, "dropout": 0.2}
FIT = {"batch_size": 64, "max_epochs": 15, "patience": 0}


def load_weights(run: str) -> dict[str, torch.Tensor]:
    """Load the best weights of a finished run."""
    with checkpoint.local(f"{run}/best") as local:
        return load_file(local / checkpoint.WEIGHTS)


def test_tables_on_s3_equal_those_on_disk(storages):
    tables = ["tables/events", "tables/items", "tables/sequences", "tables/rejects"]
    for table in [*tables, "sids/embeddings", "sids/trie"]:
        on_disk = read_manifest(f"{storages.disk}/{table}")
        on_s3 = read_manifest(f"{storages.s3}/{table}")
        hashes_on_disk = [part.sha256 for part in on_disk.files]
        assert [part.sha256 for part in on_s3.files] == hashes_on_disk


def test_a_killed_training_on_s3_continues_to_the_weights_of_one_on_disk(storages):
    (storages.disk / "one.yaml").write_text(json.dumps({"model": MODEL, "fit": FIT}))
    command = (
        "train --config {disk}/one.yaml --tables {s3}/tables --storage {s3}/runs --name one --ray.threads 1 "
        "--tracking_uri {store} --experiment retrieval/s3 --log_model false"
    )
    run = f"{storages.s3}/runs/one"
    lock = f"{storages.s3}/runs/.one.lock"
    killed = storages.start(command)
    while not (last := checkpoint.last(run)):
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    assert file_info(lock).type == fs.FileType.File  # a killed process releases no lock
    # as a kill within the next upload, whose files are sent at once, may leave it
    config = last.to_json().encode()
    write_file(f"{run}/step-{last.step + 1:08}/{checkpoint.CONFIG}", config)

    output = storages.run(
        command.replace("{s3}", "{disk}"),
        command,
        "evaluate --tables {s3}/tables --split test --checkpoint {s3}/runs/one",
        "evaluate --tables {s3}/tables --checkpoint {s3}/runs/one --batch_inference {s3}/top --k 5",
    )

    assert "continuing " in output
    assert "recall@10" in output
    assert file_info(lock).type == fs.FileType.NotFound
    assert read_manifest(f"{storages.s3}/top").rows == 120
    steps = checkpoint.list_steps(run)
    assert steps == checkpoint.list_steps(f"{storages.disk}/runs/one")
    on_s3, on_disk = load_weights(run), load_weights(f"{storages.disk}/runs/one")
    assert on_s3.keys() == on_disk.keys()
    for name, value in on_disk.items():
        torch.testing.assert_close(on_s3[name], value, rtol=1e-5, atol=1e-6)
