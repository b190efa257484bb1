"""Whether a change of structure changes results: what the commands make of small
simulated logs, before and after it.

    python tests/same_results.py --write before.json                      # this checkout
    python tests/same_results.py --checkout ../other --compare before.json
    python tests/same_results.py --kinds search actions --compare before.json

Of one log of each kind: all tables, the codes of three tokenizers, every model's
weights after a short training and its validation; of some models the ranking of all
users and a test; the trials of a sweep; the answers of a served model of each family,
and what MLflow holds of its run. Nothing is imported from the project: commands run,
and their tables, tensors and metrics are compared by content, whatever files and
tensors are called. So the script reads any checkout whose commands are the same.
Compare on one machine: other processors sum in other orders. Eight minutes on two
cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
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

LOGS: dict[str, tuple[str, list[str], list[str], str]] = {
    "retrieval": ("simulated", [], [], "--sids"),
    "search": (
        "simulated_search",
        ["--kind", "search"],
        ["--counts_as_of", "2024-03-01"],
        "--text",
    ),
    "actions": ("simulated_feed", ["--kind", "feed"], [], "--text"),
}
"""By kind: mapping file, options of the simulator and of jobs.prepare, and the option
for what is made beside."""
SIZE = ["--users", "200", "--items", "120", "--events", "2400", "--seed", "3"]
TOKENIZERS = {
    "rqkmeans": "--rqkmeans.codebook_size 16",
    "rqvae": "--rqvae.codebook_size 16 --rqvae.hidden [32] --rqvae.latent 8 --rqvae.epochs 20",
    "psid": "--rqkmeans.codebook_size 16",
}
"""Options of each; models have the codes of the first."""
FIT = {"max_epochs": 1, "warmup_share": 0.1, "lr": 0.002, "seed": 7}
FITS: dict[str, dict[str, Any]] = {
    "retrieval": {"batch_size": 64},
    "search": {"batch_size": 20, "metric": "gauc"},
    "actions": {"batch_size": 16, "metric": "mean/rig"},
    "sid_mlp_pp_encoder": {"metric": "neg_mse"},
}
"""Settings of the trainings of a kind, or of one model."""
TIGER = {
    "d_model": 32,
    "d_ff": 64,
    "num_heads": 2,
    "d_kv": 16,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}
LC_REC = {"width": 32, "num_layers": 2, "num_heads": 2, "ffn_width": 32}
STUDENT = {"teacher": "tiger", "beam": 20}
READOUT = {"attention_heads": 2, "ffn_width": 32, "head_width": 32}
DRAFT = {"draft_beam": 30, "draft_d_ff": 32, "draft_heads": 2}
SEQUENCE = {"width": 16, "num_layers": 2, "num_heads": 2, "ffn": 32}
ACTIONS = {**SEQUENCE, "expert_width": 16, "tower_width": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "popularity": ("retrieval", {}),
    "own_items": ("retrieval", {}),
    "item_knn": ("retrieval", {}),
    "ease": ("retrieval", {}),
    "sasrec": ("retrieval", {}),
    "tiger": ("retrieval", {**TIGER, "beam": 20}),
    "lc_rec": ("retrieval", {**LC_REC, "beam": 20}),
    "lc_rec_sid_mlp": ("retrieval", {**READOUT, "width": 32, "teacher": "lc_rec"}),
    "lc_rec_nezha": ("retrieval", {"teacher": "lc_rec"}),
    "sid_mlp": ("retrieval", {**STUDENT, **READOUT, "attention_width": 32}),
    "one_layer": ("retrieval", STUDENT),
    "gdn": (
        "retrieval",
        {**STUDENT, "num_layers": 2, "heads": 2, "head_width": 8, "ffn_width": 32},
    ),
    "mamba2": (
        "retrieval",
        {**STUDENT, "num_layers": 2, "width": 32, "head_width": 8, "state": 8},
    ),
    "earn": ("retrieval", STUDENT),
    "nezha": ("retrieval", STUDENT),
    "atspeed_s": ("retrieval", {**STUDENT, **DRAFT}),
    "atspeed_r": ("retrieval", {**STUDENT, **DRAFT}),
    "sid_mlp_pp_encoder": (
        "retrieval",
        {"teacher": "tiger", "encoder_layers": 2, "encoder_width": 32},
    ),
    "sid_mlp_pp": (
        "retrieval",
        {**READOUT, "attention_width": 32, "encoder": "sid_mlp_pp_encoder", "beam": 20},
    ),
    "pair_ctr": ("search", {}),
    "boosted": ("search", {"num_iterations": 20, "min_data_in_leaf": 20}),
    "base": ("search", {}),
    "hstu": ("search", SEQUENCE),
    "hllm": ("search", SEQUENCE),
    "qgs": ("search", SEQUENCE),
    "item_rate": ("actions", {}),
    "boosted_actions": ("actions", {"num_iterations": 20, "min_data_in_leaf": 20}),
    "interleaved": ("actions", ACTIONS),
    "attn_lfa": ("actions", ACTIONS),
    "attn_mvp": ("actions", ACTIONS),
    "attn_dhn": ("actions", ACTIONS),
    "lac": ("actions", ACTIONS),
    "genrank": ("actions", ACTIONS),
}
"""By model: kind of log, and options; models that others name come before these."""
NAMED = ("teacher", "encoder")
"""Options that name another model."""
RANKED = ("sasrec", "tiger", "sid_mlp_pp", "lc_rec", "nezha", "atspeed_s")
"""Models that rank all users by batch inference."""
TESTED = ("popularity", "tiger", "qgs", "attn_mvp")
SWEPT = {"sid_mlp": {"model.alpha": [0.3, 0.7]}}

NOW = 1710028800000
SEEN = {"history": ["i044", "i006"], "history_query": ["tripod", "steel lamp"]}
ASKED = {
    "query": "tripod",
    "candidates": ["i094", "i000", "i007", "none"],
    "timestamp_ms": NOW,
}
NEW = [
    {
        "item_id": "new1",
        "title": "Husky running",
        "description": "A dog running in the forest.",
        "kind": "dog",
    },
    {
        "item_id": "new2",
        "title": "Manx asleep",
        "description": "A cat asleep in the attic.",
        "kind": "cat",
    },
]
SHOWN = [[0.8, 1, 0, 0, 0, 0], [0.2, 0, 0, 0, 0, 1]]
ACTED = {"history_actions": SHOWN, "history_time_ms": [NOW - 9000, NOW - 5000]}
FEED = {
    "candidates": ["i002", "new2", "i077", "none"],
    "new_items": NEW,
    "timestamp_ms": NOW,
}
SERVED: dict[str, tuple[str, dict[str, Any], list[list[dict[str, Any]]]]] = {
    "retrieval": (
        "tiger",
        {"k": 10},
        [[{"history": ["i001", "i017", "none"]}, {"history": []}]],
    ),
    "search": (
        "qgs",
        {"label": "click"},
        [
            [{**ASKED, **SEEN}, {**ASKED, **SEEN, "query": "a query of nobody"}],
        ],
    ),
    "actions": (
        "attn_mvp",
        {"label": "like"},
        [
            [{**FEED, **ACTED, "history": ["i001", "new1"]}],
        ],
    ),
}
"""By kind: the model that jobs.train trains and that is served, options of its answers,
and the frames it is asked."""

SERVE = """
import json, sys, mlflow, pandas
uri, name, config, params, frames = json.loads(sys.argv[1])
mlflow.set_tracking_uri(uri)
model = mlflow.pyfunc.load_model(f"models:/{name}/1", model_config=config)
answers = [row for rows in frames for row in model.predict(pandas.DataFrame(rows), params=params).to_dict("records")]
runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
found = [{k: v for k, v in run.data.metrics.items() if not k.startswith("system/")} for run in runs]
print(json.dumps([answers, found], default=lambda x: x.tolist()))
"""


def table(folder: Path) -> str:
    """A hash of the rows of a folder of Parquet files, in any order."""
    parts = [pq.read_table(part) for part in folder.glob("*.parquet")]
    rows = [
        json.dumps(row, sort_keys=True) for part in parts for row in part.to_pylist()
    ]
    return hashlib.sha256(
        "\n".join([str(parts[0].schema.types), *sorted(rows)]).encode()
    ).hexdigest()


def trained(run: Path) -> dict[str, Any]:
    """A hash per tensor of the best checkpoints below a folder, and what was measured
    of them: by name, all values.
    """
    tensors = [
        x
        for file in run.rglob("best/*.safetensors")
        for x in safetensors.numpy.load_file(file).values()
    ]
    found: dict[str, list[Any]] = {
        "tensors": [
            hashlib.sha256(f"{x.dtype}{x.shape}".encode() + x.tobytes()).hexdigest()[
                :16
            ]
            for x in tensors
        ]
    }
    for file in run.rglob("best/*.json"):
        for name, value in json.loads(file.read_text()).get("metrics", {}).items():
            found.setdefault(name, []).append(float(f"{value:.12g}"))
    return {name: sorted(values) for name, values in found.items()}


class Proof:
    """Runs a checkout's commands, two at a time, and keeps what they make."""

    def __init__(self, checkout: Path, work: Path) -> None:
        self.checkout, self.work, self.started = checkout, work, time.monotonic()
        self.cores, self.pool = Semaphore(2), ThreadPoolExecutor(100)
        self.steps: dict[str, Future[None]] = {}
        self.found, self.error = dict[str, Any](), ""

    def python(self, *words: Any) -> str:
        """What Python prints."""
        # One thread: sums by another number of threads differ in their last digits.
        own = {"PYTHONPATH": str(self.checkout), "OMP_NUM_THREADS": "1"}
        outer = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("MLFLOW_", "RAY_"))
        }
        command = [sys.executable, *map(str, words)]
        with self.cores:
            if self.error:
                raise SystemExit(self.error)
            done = subprocess.run(
                command,
                cwd=self.checkout,
                env=outer | own,
                capture_output=True,
                text=True,
            )
        if done.returncode:
            self.error = f"error: {' '.join(command)} failed in {self.checkout}:\n{done.stderr[-2000:]}"
            raise SystemExit(self.error)
        return done.stdout

    def step(
        self, name: str, after: list[str], do: Callable[[str], Any], what: str
    ) -> None:
        """Does something of that name after other steps, which are given before it, and
        keeps what it finds.
        """

        def run() -> None:
            for other in after:
                self.steps[other].result()
            self.found[f"{name} {what}"] = do(name)
            print(
                f"{time.monotonic() - self.started:4.0f} s  {name} {what}", flush=True
            )

        self.steps[f"{name} {what}"] = self.pool.submit(run)

    def follow(self, kind: str) -> None:
        """Gives the steps of a log of one kind."""
        source, simulate, prepare, option = LOGS[kind]
        raw, made, runs = (self.work / kind / name for name in ("raw", "made", "runs"))
        retrieval, at = kind == "retrieval", made / "tables"
        inputs = [
            "--tables",
            at,
            option,
            made / (next(iter(TOKENIZERS)) if retrieval else "text"),
        ]
        evaluate = ["-m", "jobs.evaluate", *inputs, "--checkpoint"]
        served, params, frames = SERVED[kind]

        def make(_: str) -> dict[str, str]:
            self.python("-m", "jobs.simulate", *simulate, *SIZE, "--output", raw)
            words = [
                "--source",
                f"jobs/configs/sources/{source}.yaml",
                "--input",
                raw,
                "--partitions",
                2,
                *prepare,
            ]
            self.python("-m", "jobs.prepare", *words, "--output", at)
            encoder = ["--tables", at, "--encoder", "tfidf"]
            for name, options in TOKENIZERS.items() if retrieval else ():
                words = [
                    "--embeddings",
                    made / "embeddings",
                    "--tokenizer",
                    name,
                    *options.split(),
                ]
                self.python(
                    "-m", "jobs.tokenize", *encoder, *words, "--output", made / name
                )
            if not retrieval:
                self.python("-m", "jobs.encode", *encoder, "--output", made / "text")
            return {
                str(at.relative_to(made)): table(at)
                for at in {part.parent for part in made.rglob("*.parquet")}
            }

        def train(name: str) -> dict[str, Any]:
            model = {
                k: f"{runs}/{v}/best" if k in NAMED else v
                for k, v in MODELS[name][1].items()
            }
            config = runs.parent / f"{name}.yaml"
            fit = {**FIT, **FITS[kind], **FITS.get(name, {})}
            config.write_text(
                yaml.safe_dump({"model": {"name": name, **model}, "fit": fit})
            )
            if name == served:
                where = [
                    "--storage",
                    runs,
                    "--name",
                    name,
                    "--experiment",
                    kind,
                    "--ray.threads",
                    1,
                ]
                self.python("-m", "jobs.train", "--config", config, *inputs, *where)
            else:
                self.python(
                    "-m",
                    "models.train",
                    "--config",
                    config,
                    *inputs,
                    "--output",
                    runs / name,
                )
            return trained(runs / name)

        def test(name: str) -> dict[str, Any]:
            self.python(*evaluate, runs / name / "best")
            return trained(runs / name)

        def rank(name: str) -> str:
            top = self.work / kind / "top" / name
            self.python(
                *evaluate, runs / name / "best", "--batch-inference", top, "--k", 10
            )
            return table(top)

        def sweep(name: str) -> dict[str, Any]:
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
            return trained(storage)

        def serve(name: str) -> dict[str, Any]:
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
            config = {"counts": str(at / "counts")} if kind == "search" else {}
            printed = self.python(
                "-c", SERVE, json.dumps([uri, name, config, params, frames])
            )
            answers, (logged,) = json.loads(printed.splitlines()[-1])
            times = ("seconds", "_per_s", "data_wait")
            return {"answers": answers} | {
                k: float(f"{v:.12g}")
                for k, v in logged.items()
                if not k.endswith(times)
            }

        self.step(kind, [], make, "tables")
        models = {
            name: options for name, (log, options) in MODELS.items() if log == kind
        }
        for name, options in models.items():
            needed = [f"{options[key]} trained" for key in NAMED if key in options]
            self.step(name, [f"{kind} tables", *needed], train, "trained")
        for what, names, do in (
            ("tested", TESTED, test),
            ("ranked", RANKED, rank),
            ("swept", SWEPT, sweep),
        ):
            for name in models.keys() & set(names):
                self.step(name, [f"{name} trained"], do, what)
        self.step(served, [f"{served} tested"], serve, "served")

    def results(self, kinds: list[str]) -> dict[str, Any]:
        """What the checkout makes of logs of these kinds."""
        for kind in kinds:
            self.follow(kind)
        for step in self.steps.values():
            step.result()
        return {name: self.found[name] for name in self.steps}


def differences(before: Any, after: Any) -> list[str]:
    """Lines that say what of a result is not the same."""
    lines, pairs = (
        [],
        [one if isinstance(one, dict) else {"": one} for one in (before, after)],
    )
    for key in dict.fromkeys([*pairs[0], *pairs[1]]):
        old, new = (json.dumps(pair.get(key)) for pair in pairs)
        if old != new:
            lines.append(f"  {key}\n    before {old[:300]}\n    after  {new[:300]}")
    return lines


def main() -> None:
    """The command line: see the module."""
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
    parser.add_argument("--write", help="file for what is found")
    parser.add_argument("--compare", help="file of --write that it is held against")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        found = Proof(Path(options.checkout).absolute(), Path(work)).results(
            options.kinds
        )
    if options.write:
        Path(options.write).write_text(json.dumps(found, indent=2) + "\n")
    if options.compare:
        before = json.loads(Path(options.compare).read_text())
        other = {
            name: lines
            for name in found
            if (lines := differences(before.get(name), found[name]))
        }
        for name, lines in other.items():
            print(f"differs: {name}", *lines[:10], sep="\n")
        print(f"{len(found) - len(other)} of {len(found)} results are the same")
        sys.exit(1 if other else 0)


if __name__ == "__main__":
    main()
