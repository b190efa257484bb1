"""Compare the results of the commands on small simulated logs before and after a change.

    python tests/same_results.py --write before.json                      # this checkout
    python tests/same_results.py --checkout ../other --compare before.json
    python tests/same_results.py --kinds search actions --compare before.json

Results of a log of each kind are: all tables, the codes of three tokenizers, and every
model's weights after a short training and its validation metrics; of some models the
rankings of all users and a test evaluation; the trials of a sweep; the answers of a
served model per kind, and the metrics of its MLflow run.

Nothing is imported from the project. The commands run, and their tables, tensors and
metrics are compared by content, so files and tensors may have other names. Every model
is trained by jobs.train with one worker. Compare on one
machine, as other processors sum in another order. It takes ten minutes on two cores.
Logs, models and requests stand in same_results.yaml.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import pyarrow.parquet as pq
import safetensors.numpy
import yaml

CASES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
LOGS, MODELS, SERVED = CASES["logs"], CASES["models"], CASES["served"]
SIZE = ["--users", "200", "--items", "120", "--events", "2400", "--seed", "3"]
MODEL_OPTIONS = ("teacher", "encoder")
"""Options that name another model."""
RANKED = ("sasrec", "tiger", "sid_mlp_pp", "lc_rec", "nezha", "atspeed_s")
"""Models that rank all users by batch inference."""
TESTED = ("popularity", "tiger", "qgs", "attn_mvp")
SWEPT = {"sid_mlp": {"model.alpha": [0.3, 0.7]}}

SERVE = """
import json, sys, mlflow, pandas
uri, name, config, params, rows = json.loads(sys.argv[1])
mlflow.set_tracking_uri(uri)
model = mlflow.pyfunc.load_model(f"models:/{name}/1", model_config=config)
answers = model.predict(pandas.DataFrame(rows), params=params).to_dict("records")
runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
(training,) = [run for run in runs if run.info.run_name == name]
metrics = {k: v for k, v in training.data.metrics.items() if not k.startswith("system/")}
print(json.dumps([answers, metrics], default=lambda x: x.tolist()))
"""


def hash_table(folder: Path) -> str:
    """Return a hash of the rows of a folder of Parquet files, in any order."""
    parts = [pq.read_table(part) for part in folder.glob("*.parquet")]
    rows = [
        json.dumps(row, sort_keys=True) for part in parts for row in part.to_pylist()
    ]
    lines = [str(parts[0].schema.types), *sorted(rows)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def hash_tensor(tensor: Any) -> str:
    """Return a short hash of a tensor's type, shape and values."""
    header = f"{tensor.dtype}{tensor.shape}".encode()
    return hashlib.sha256(header + tensor.tobytes()).hexdigest()[:16]


def read_training(run: Path) -> dict[str, Any]:
    """Read the best checkpoints below a folder.

    Returns:
        The sorted hashes of all tensors as `tensors`, and the sorted values of each
        metric.
    """
    values: dict[str, list[Any]] = {"tensors": []}
    for file in run.rglob("best/*.safetensors"):
        tensors = safetensors.numpy.load_file(file).values()
        values["tensors"] += [hash_tensor(tensor) for tensor in tensors]
    for file in run.rglob("best/*.json"):
        for name, value in json.loads(file.read_text()).get("metrics", {}).items():
            if value is not None:
                values.setdefault(name, []).append(float(f"{value:.12g}"))
    return {name: sorted(items) for name, items in values.items()}


class Checkout:
    """A checkout whose commands run two at a time, and their results."""

    def __init__(self, checkout: Path, work: Path) -> None:
        self.checkout = checkout
        self.work = work
        self.start_time = time.monotonic()
        self.cores = Semaphore(2)
        self.pool = ThreadPoolExecutor(100)
        self.steps: dict[str, Future[None]] = {}
        self.results_by_step: dict[str, Any] = {}
        self.error = ""

    def python(self, *words: Any) -> str:
        """Run Python with these arguments; return its output.

        Raises:
            SystemExit: if this or an earlier command failed.
        """
        # One thread: sums by another number of threads differ in their last digits.
        settings = {"PYTHONPATH": str(self.checkout), "OMP_NUM_THREADS": "1"}
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("MLFLOW_", "RAY_"))
        }
        command = [sys.executable, *map(str, words)]
        with self.cores:
            if self.error:
                raise SystemExit(self.error)
            process = subprocess.run(
                command,
                cwd=self.checkout,
                env=environment | settings,
                capture_output=True,
                text=True,
            )
        if process.returncode:
            self.error = f"error: {' '.join(command)} failed in {self.checkout}:\n{process.stderr[-2000:]}"
            raise SystemExit(self.error)
        return process.stdout

    def add_step(
        self,
        name: str,
        requires: list[str],
        compute: Callable[[str], Any],
        result_name: str,
    ) -> None:
        """Submit a step, which waits for the steps that it requires.

        Args:
            name: Name of the model or the kind of log.
            requires: Steps that were added before.
            compute: Computes the result from `name`.
            result_name: Name of the result; the step is called `name result_name`.
        """
        step = f"{name} {result_name}"

        def run() -> None:
            for required in requires:
                self.steps[required].result()
            self.results_by_step[step] = compute(name)
            print(f"{time.monotonic() - self.start_time:4.0f} s  {step}", flush=True)

        self.steps[step] = self.pool.submit(run)

    def add_steps(self, kind: str) -> None:
        """Submit the steps of a log of one kind."""
        log, served = LOGS[kind], SERVED[kind]
        raw, outputs, runs = (
            self.work / kind / name for name in ("raw", "outputs", "runs")
        )
        is_retrieval = kind == "retrieval"
        tables = outputs / "tables"
        inputs = [
            "--tables",
            tables,
            log["inputs"],
            outputs / ("rqkmeans" if is_retrieval else "text"),
        ]
        evaluate = ["-m", "jobs.evaluate", *inputs, "--checkpoint"]

        def write_tables(_: str) -> dict[str, str]:
            """Simulate, prepare, tokenize and encode; return hashes of all tables."""
            self.python("-m", "jobs.simulate", *log["simulate"], *SIZE, "--output", raw)
            words = [
                "--source",
                f"jobs/configs/sources/{log['source']}.yaml",
                "--input",
                raw,
                "--partitions",
                2,
                *log["prepare"],
            ]
            self.python("-m", "jobs.prepare", *words, "--output", tables)
            encoder = ["--tables", tables, "--encoder", "tfidf"]
            for name, options in CASES["tokenizers"].items() if is_retrieval else ():
                words = [
                    "--embeddings",
                    outputs / "embeddings",
                    "--tokenizer",
                    name,
                    *options,
                ]
                self.python(
                    "-m", "jobs.tokenize", *encoder, *words, "--output", outputs / name
                )
            if not is_retrieval:
                self.python("-m", "jobs.encode", *encoder, "--output", outputs / "text")
            folders = {part.parent for part in outputs.rglob("*.parquet")}
            return {
                str(folder.relative_to(outputs)): hash_table(folder)
                for folder in folders
            }

        def train(name: str) -> dict[str, Any]:
            """Train a model; return its tensors and metrics."""
            model = {
                k: f"{runs}/{v}/best" if k in MODEL_OPTIONS else v
                for k, v in MODELS[kind][name].items()
            }
            config = runs.parent / f"{name}.yaml"
            fit = {**CASES["fits"][kind], **CASES["fits"].get(name, {})}
            config.write_text(
                yaml.safe_dump({"model": {"name": name, **model}, "fit": fit})
            )
            words = ["--name", name, "--experiment", kind, "--ray.threads", 1]
            self.python(
                "-m",
                "jobs.train",
                "--config",
                config,
                *inputs,
                "--storage",
                runs,
                *words,
            )
            return read_training(runs / name)

        def test(name: str) -> dict[str, Any]:
            """Evaluate a model on test; return its metrics."""
            self.python(*evaluate, runs / name / "best")
            return read_training(runs / name)

        def rank(name: str) -> str:
            """Rank all users by batch inference; return a hash of the table."""
            top = self.work / kind / "top" / name
            self.python(
                *evaluate, runs / name / "best", "--batch-inference", top, "--k", 10
            )
            return hash_table(top)

        def sweep(name: str) -> dict[str, Any]:
            """Sweep a setting of a model; return tensors and metrics of the trials."""
            grid, storage = self.work / kind / "grid.yaml", self.work / kind / "sweeps"
            content = {
                "source": "a test",
                "config": f"{name}.yaml",
                "axes": SWEPT[name],
                "metric": "val/ndcg@10",
            }
            grid.write_text(yaml.safe_dump(content))
            words = [
                "--grid",
                grid,
                *inputs,
                "--storage",
                storage,
                "--name",
                "swept",
                "--ray.threads",
                1,
            ]
            self.python("-m", "jobs.sweep", *words)
            # a copy of the best trial, which older versions do not make
            shutil.rmtree(storage / "swept/best", ignore_errors=True)
            return read_training(storage)

        def serve(name: str) -> dict[str, Any]:
            """Register a model; return its answers and the metrics of its run."""
            uri = f"sqlite:///{runs}/mlflow.db"
            self.python(
                "-m",
                "jobs.compare",
                "--experiment",
                kind,
                "--tracking_uri",
                uri,
                "--register",
                name,
            )
            config = {"counts": str(tables / "counts")} if kind == "search" else {}
            words = [uri, name, config, served["params"], served["requests"]]
            printed = self.python("-c", SERVE, json.dumps(words))
            answers, logged = json.loads(printed.splitlines()[-1])
            times = ("seconds", "_per_s", "data_wait")
            return {"answers": answers} | {
                k: float(f"{v:.12g}")
                for k, v in logged.items()
                if not k.endswith(times)
            }

        self.add_step(kind, [], write_tables, "tables")
        models = MODELS[kind]
        for name, options in models.items():
            needed = [
                f"{options[key]} trained" for key in MODEL_OPTIONS if key in options
            ]
            self.add_step(name, [f"{kind} tables", *needed], train, "trained")
        for result_name, names, compute in (
            ("tested", TESTED, test),
            ("ranked", RANKED, rank),
            ("swept", SWEPT, sweep),
        ):
            for name in models.keys() & set(names):
                self.add_step(name, [f"{name} trained"], compute, result_name)
        name = served["model"]
        self.add_step(name, [f"{name} tested"], serve, "served")

    def compute_results(self, kinds: list[str]) -> dict[str, Any]:
        """Run all steps of these kinds of logs; return the results by step."""
        for kind in kinds:
            self.add_steps(kind)
        for step in self.steps.values():
            step.result()
        return {name: self.results_by_step[name] for name in self.steps}


def describe_differences(before: Any, after: Any) -> list[str]:
    """Return a line per value of a result that differs."""
    if not isinstance(before, dict):
        before = {"": before}
    if not isinstance(after, dict):
        after = {"": after}
    lines = []
    for key in dict.fromkeys([*before, *after]):
        old, new = json.dumps(before.get(key)), json.dumps(after.get(key))
        if old != new:
            lines.append(f"  {key}\n    before {old[:300]}\n    after  {new[:300]}")
    return lines


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkout",
        default=str(Path(__file__).parents[1]),
        help="the checkout whose commands run",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=list(LOGS),
        choices=list(LOGS),
        help="logs; by default all",
    )
    parser.add_argument("--write", help="file for the results")
    parser.add_argument(
        "--compare", help="file of --write with the results to compare with"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        checkout = Checkout(Path(options.checkout).absolute(), Path(work))
        results = checkout.compute_results(options.kinds)
    if options.write:
        Path(options.write).write_text(json.dumps(results, indent=2) + "\n")
    if options.compare:
        before = json.loads(Path(options.compare).read_text())
        num_different = 0
        for name, result in results.items():
            lines = describe_differences(before.get(name), result)
            if lines:
                num_different += 1
                print(f"differs: {name}", *lines[:10], sep="\n")
        num_same = len(results) - num_different
        print(f"{num_same} of {len(results)} results are the same")
        sys.exit(1 if num_different else 0)


if __name__ == "__main__":
    main()
