"""Whether a change of structure changes results: what the commands make of small simulated logs, as hashes.

    python tests/same_results.py --write before.json                      # this checkout
    python tests/same_results.py --checkout ../other --compare before.json

Of one log of each kind the hashes of all tables, of models of each family the weights after a short training (tensor
by tensor, whatever their names), and the items that the retrieval models rank for every user. It runs nothing but
commands, so the same script reads a checkout from before a change and one from after it, on one machine: other
processors sum in other orders. About four minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import safetensors.numpy
import yaml

FIT = {"batch_size": 64, "max_epochs": 1, "warmup_share": 0.1, "lr": 0.002, "seed": 7}
TIGER = {"d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16, "num_encoder_layers": 2, "num_decoder_layers": 2}
STUDENT = {"attention_heads": 2, "attention_width": 32, "ffn_width": 32, "head_width": 32}
ACTIONS = {"width": 16, "num_layers": 2, "num_heads": 2, "ffn": 32, "expert_width": 16, "tower_width": 8}
SEARCH_FIT = {"batch_size": 20, "metric": "gauc"}

LOGS: dict[str, tuple[str, list[str], list[str] | None]] = {
    "retrieval": ("simulated", [], ["--tokenizer", "rqkmeans", "--rqkmeans.codebook_size", "16"]),
    "search": ("simulated_search", ["--kind", "search"], []),
    "actions": ("simulated_feed", ["--kind", "feed"], None),
}
"""By kind: mapping file, options of the simulator, and of what makes the extra folder, where there is one."""

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sasrec": ("retrieval", {}, {}),
    "tiger": ("retrieval", {**TIGER, "beam": 20}, {}),
    "sid_mlp": ("retrieval", {**STUDENT, "teacher": "tiger", "beam": 20}, {}),
    "sid_mlp_pp_encoder": (
        "retrieval", {"teacher": "tiger", "encoder_layers": 2, "encoder_width": 32}, {"metric": "neg_mse"}
    ),
    "sid_mlp_pp": ("retrieval", {**STUDENT, "encoder": "sid_mlp_pp_encoder", "beam": 20}, {}),
    "base": ("search", {}, SEARCH_FIT),
    "hstu": ("search", {"width": 16, "num_layers": 2, "num_heads": 2}, SEARCH_FIT),
    "hllm": ("search", {"width": 16, "num_layers": 2, "num_heads": 2, "ffn": 32}, SEARCH_FIT),
    "qgs": ("search", {"width": 16, "num_layers": 2}, SEARCH_FIT),
    "interleaved": ("actions", ACTIONS, {"batch_size": 16, "metric": "mean/rig"}),
    "attn_lfa": ("actions", ACTIONS, {"batch_size": 16, "metric": "mean/rig"}),
    "attn_mvp": ("actions", ACTIONS, {"batch_size": 16, "metric": "mean/rig"}),
}  # fmt: skip
"""By model: family, options, and settings of the training; models that others name come before these."""

RANKED = ("sasrec", "tiger", "sid_mlp", "sid_mlp_pp")
NAMED = ("teacher", "encoder")
"""Options that name the run of another model."""


class Checkout:
    """Runs a checkout's commands and says which."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, module: str, *words: str) -> None:
        print(f"{module} {' '.join(words)}"[:110], flush=True)
        # One thread: sums by another number of threads differ in their last digits.
        environment = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", module, *words], cwd=self.root, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"error: {module} failed in {self.root}: {done.stderr.strip().splitlines()[-1]}")


def table_hashes(folder: Path) -> dict[str, str]:
    """Content hashes of all tables below a folder, by path."""
    return {
        str(manifest.parent.relative_to(folder)): json.loads(manifest.read_text())["hash"]
        for manifest in sorted(folder.rglob("manifest.json"))
    }


def weights(file: Path) -> list[str]:
    """A hash per tensor, sorted."""
    tensors = safetensors.numpy.load_file(file).values()
    return sorted(
        hashlib.sha256(f"{x.dtype}{x.shape}".encode() + x.tobytes()).hexdigest()[:16] for x in tensors
    )  # fmt: skip


def ranked(folder: Path) -> str:
    """A hash of which items are ranked for whom."""
    rows = [
        (row["user_id"], row["item_id"])
        for part in sorted(folder.glob("*.parquet"))
        for row in pq.read_table(part, columns=["user_id", "item_id"]).to_pylist()
    ]
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()


def results(checkout: Path, work: Path) -> dict[str, Any]:
    """What the checkout makes, by log and model."""
    here, found = Checkout(checkout), {}
    for kind, (source, simulate, extra) in LOGS.items():
        raw, tables, made = (str(work / kind / name) for name in ("raw", "tables", "extra"))
        size = ["--users", "300", "--items", "120", "--events", "4000", "--seed", "3"]
        here.run("jobs.simulate", *simulate, *size, "--output", raw)
        config = f"jobs/configs/sources/{source}.yaml"
        here.run("jobs.prepare", "--source", config, "--input", raw, "--output", tables, "--partitions", "2")
        if extra is not None:
            job = "jobs.tokenize" if kind == "retrieval" else "jobs.encode"
            here.run(job, "--tables", tables, "--encoder", "tfidf", *extra, "--output", made)
        found[f"{kind} tables"] = table_hashes(work / kind)
    for name, (kind, options, fit) in MODELS.items():
        tables, made, run = (work / kind / "tables", work / kind / "extra", work / "runs" / name)
        options = {k: str(work / "runs" / v / "best") if k in NAMED else v for k, v in options.items()}
        config = work / f"{name}.yaml"
        config.write_text(yaml.safe_dump({"model": {"name": name, **options}, "fit": {**FIT, **fit}}))
        extra = {"retrieval": ["--sids", str(made)], "search": ["--text", str(made)], "actions": []}[kind]
        where = ["--tables", str(tables), *(extra if name != "sasrec" else [])]
        here.run("models.train", "--config", str(config), *where, "--output", str(run))
        found[f"{name} weights"] = weights(run / "best" / "model.safetensors")
        if name in RANKED:
            top = ["--batch_inference", str(work / "top" / name), "--k", "10"]
            here.run("jobs.evaluate", "--checkpoint", str(run / "best"), *where, *top)
            found[f"{name} ranked"] = ranked(work / "top" / name)
    return found


def main() -> None:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", default=str(Path(__file__).parents[1]), help="the checkout whose commands run")
    parser.add_argument("--write", help="file for the hashes")
    parser.add_argument("--compare", help="file of --write that they are held against")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = results(Path(options.checkout).absolute(), Path(work))
    if options.write:
        Path(options.write).write_text(json.dumps(found, indent=2) + "\n")
    if options.compare:
        before = json.loads(Path(options.compare).read_text())
        other = [name for name in {**before, **found} if before.get(name) != found.get(name)]
        print("\n".join(f"differs: {name}" for name in other) or f"the same: {', '.join(found)}")
        sys.exit(1 if other else 0)


if __name__ == "__main__":
    main()
