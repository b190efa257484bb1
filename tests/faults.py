"""Kills at random moments, on a cluster of three Ray nodes on this machine, and what
came of them.

    python -m tests.faults --kills 100 --seed 1

Each of prepare, tokenize, train (two workers), evaluate and sweep is first run
undisturbed. Then, as often as asked for, one of them is started in a fresh folder and
at a random moment one of these is killed with SIGKILL: its driver, a worker process, a
whole node (its raylet and all that runs on it), or the MLflow server, which comes back
after `AWAY` seconds. A command that ends with an error is run again by the same command
until it ends well, as a user would do.

The result has to be that of the undisturbed run: the same tables, weights and rankings,
in MLflow one run per name and each point of a metric once, with the same validation. A
line that is no single `error: ...`, a command that needs more than `TRIES` starts, and
one that is silent for `LONGEST` seconds is a finding. About 40 seconds a kill on 2
cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[1]
TARGETS = ("driver", "worker", "node", "mlflow")
AWAY = 15.0
"""Seconds for which the MLflow server is gone."""
TRIES = 4
"""Starts of one command at most."""
IDLE = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes that run nothing of a job. Without its agents a node ends, or starts no
worker any more."""
LONGEST = 900.0
"""Seconds after which a command is said to hang."""

MODEL = {
    "name": "sasrec",
    "dim": 16,
    "num_layers": 1,
    "num_heads": 1,
    "dropout": 0.0,
    "max_history": 12,
}
FIT = {
    "batch_size": 32,
    "max_epochs": 4,
    "patience": 0,
    "log_every_steps": 5,
    "checkpoint_every_steps": 10,
}
FIT |= {"seed": 3, "lr": 0.005}
TRIALS = {f"model.{key}": value for key, value in MODEL.items()} | {
    f"fit.{key}": value for key, value in FIT.items()
}
GRID = {
    "source": "a test",
    "fixed": {**TRIALS, "fit.max_epochs": 2},
    "axes": {"fit.lr": [0.01, 0.002]},
}


def free_address() -> str:
    """Where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def start_mlflow(address: str, folder: Path) -> subprocess.Popen[bytes]:
    """An MLflow server on the SQLite file of the folder, once it answers; in a session
    of its own.
    """
    line = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        address.rpartition(":")[2],
    ]
    line += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    line += ["--artifacts-destination", f"{folder}/artifacts"]
    # without the processes for jobs of its own, of which it starts seven
    settings = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(folder / "server.log", "a") as log:
        server = subprocess.Popen(
            line, env=settings, stdout=log, stderr=log, start_new_session=True
        )
    while True:
        assert server.poll() is None, (folder / "server.log").read_text()[-2000:]
        with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=60):
            return server
        time.sleep(0.2)


class World:
    """A cluster, an MLflow server, a raw log, and what each command makes of it
    undisturbed.
    """

    def __init__(self, folder: Path, head_cpus: int = 2) -> None:
        os.environ.setdefault(
            "RAY_AUTH_MODE", "token"
        )  # which Ray reads when it is imported
        import ray

        if (
            not ray.is_initialized()
        ):  # else this process has a token, that of the user's file, and keeps it
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        from ray.cluster_utils import Cluster

        self.folder, self.addresses = folder, 0
        head = {**self._node(), "num_cpus": head_cpus}
        del head["node_ip_address"]
        self.cluster: Any = Cluster(
            initialize_head=True, head_node_args=head, shutdown_at_exit=False
        )
        self.nodes = [self.cluster.add_node(**self._node()) for _ in range(2)]
        self.store = free_address()
        self.server = start_mlflow(self.store, folder)
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RAY_TRAIN")
        }
        self.environment = {
            **ours,
            "RAY_ADDRESS": self.cluster.address,
            "MLFLOW_TRACKING_URI": self.store,
            "TRIELINE_SHARED": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        self.raw = folder / "raw"
        (folder / "model.yaml").write_text(yaml.safe_dump({"model": MODEL, "fit": FIT}))
        (folder / "rates.yaml").write_text(yaml.safe_dump(GRID))
        simulate = [
            "--users",
            "300",
            "--items",
            "400",
            "--events",
            "6000",
            "--seed",
            "3",
            "--output",
            str(self.raw),
        ]
        done = self.start(["jobs.simulate", *simulate])
        assert done.wait() == 0, said(done)

    def _node(self) -> dict[str, Any]:
        self.addresses += (
            1  # one each, as on machines of their own; a driver is on the head
        )
        return {
            "node_ip_address": f"127.0.0.{1 + self.addresses}",
            "num_cpus": 2,
            "object_store_memory": 200 << 20,
            "include_dashboard": False,
        }

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        """`python -m` of the words, on the cluster."""
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def mend(self) -> None:
        """Brings back the nodes that are gone."""
        for node in [node for node in self.nodes if not node.any_processes_alive()]:
            self.nodes.remove(node)
            self.nodes.append(self.cluster.add_node(**self._node()))

    def workers(self) -> list[psutil.Process]:
        """Worker processes that run something."""
        return [worker for node in self.workers_by_node() for worker in node]

    def workers_by_node(self) -> list[list[psutil.Process]]:
        """Those of each node, the head first."""
        found = []
        for node in [self.cluster.head_node, *self.nodes]:
            found.append(busy := [])
            for raylet in node.all_processes.get("raylet", []):
                with suppress(psutil.Error):
                    children = psutil.Process(raylet.process.pid).children(
                        recursive=True
                    )
                    busy += [
                        c
                        for c in children
                        if named(c).startswith("ray::")
                        and not named(c).startswith(IDLE)
                    ]
        return found

    def lose_node(self, draw: random.Random) -> None:
        """Kills a node and all that runs on it; another one comes in its place."""
        node = self.nodes.pop(draw.randrange(len(self.nodes)))
        below = [
            child
            for raylet in node.all_processes.get("raylet", [])
            for child in psutil.Process(raylet.process.pid).children(recursive=True)
        ]
        self.cluster.remove_node(node, allow_graceful=False)
        for child in below:
            with suppress(psutil.Error):
                child.kill()
        self.nodes.append(self.cluster.add_node(**self._node()))

    def lose_server(self) -> None:
        """Kills the MLflow server and starts it again after a while."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
        time.sleep(AWAY)
        self.server = start_mlflow(self.store, self.folder)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.cluster.shutdown()
        import ray
        from ray.experimental import internal_kv

        if (
            ray.is_initialized()
        ):  # the cluster's end has taken the store of this process's own Ray along
            internal_kv._initialize_internal_kv(
                ray._private.worker.global_worker.gcs_client
            )


@contextmanager
def world(head_cpus: int = 2) -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
    made = None
    try:
        made = World(folder, head_cpus)
        yield made
    finally:
        if made:
            made.close()
        shutil.rmtree(folder, ignore_errors=True)


def named(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read()


@dataclass(frozen=True)
class Step:
    """A command and what it makes."""

    words: Callable[[World, Path], list[str]]
    """The command with its output in a folder of its own."""
    result: Callable[[World, Path], Any]
    """What has to be the same as undisturbed."""
    needs: tuple[str, ...] = ()
    """Commands whose results it reads."""


def hashes(folder: Path) -> dict[str, str]:
    """Content hashes of all tables below the folder."""
    return {
        str(path.parent.relative_to(folder)): json.loads(path.read_text())["hash"]
        for path in sorted(folder.rglob("manifest.json"))
    }


def weights(folder: Path) -> dict[str, str]:
    """SHA-256 of the best weights of each run below the folder."""
    return {
        str(path.parent.parent.relative_to(folder)): json.loads(path.read_text())[
            "sha256"
        ]["model.safetensors"]
        for path in sorted(folder.rglob("best/config.json"))
    }


def logged(world: World, folder: Path) -> dict[str, Any]:
    """Of each name its validation metrics by step; ValueError where a name has two runs
    or a point is there twice.
    """
    from mlflow import MlflowClient

    client = MlflowClient(world.store)
    experiment = client.get_experiment_by_name(f"retrieval/{folder.name}")
    if experiment is None:
        raise ValueError(f"there is no experiment retrieval/{folder.name}")
    found: dict[str, Any] = {}
    for run in client.search_runs([experiment.experiment_id]):
        name = str(run.info.run_name)
        if name in found:
            raise ValueError(f"two runs are named {name}")
        if run.info.status != "FINISHED":
            raise ValueError(f"the run {name} is {run.info.status}")
        found[name] = {}
        for key in run.data.metrics:
            if key.startswith("system/"):
                continue
            points = client.get_metric_history(run.info.run_id, key)
            twice = [
                step
                for step, times in Counter(point.step for point in points).items()
                if times > 1
            ]
            if twice:
                raise ValueError(f"{name} has {key} twice at the steps {twice}")
            timed = any(word in key for word in ("seconds", "per_s", "wait"))
            found[name][key] = sorted(
                (p.step, None if timed else p.value) for p in points
            )
    return found


def trained(world: World, folder: Path) -> dict[str, Any]:
    return {"weights": weights(folder), "logged": logged(world, folder)}


STEPS = {
    "prepare": Step(
        lambda world, out: [
            "jobs.prepare",
            "--source",
            "jobs/configs/sources/simulated.yaml",
            "--input",
            str(world.raw),
            "--output",
            str(out),
            "--partitions",
            "6",
        ],
        lambda world, out: hashes(out),
    ),
    "tokenize": Step(
        lambda world, out: [
            "jobs.tokenize",
            "--tables",
            str(world.folder / "prepare"),
            "--tokenizer",
            "rqkmeans",
            "--encoder",
            "tfidf",
            "--rqkmeans.codebook_size",
            "16",
            "--output",
            str(out),
        ],
        lambda world, out: hashes(out),
        needs=("prepare",),
    ),
    "train": Step(
        lambda world, out: [
            "jobs.train",
            "--config",
            str(world.folder / "model.yaml"),
            "--tables",
            str(world.folder / "prepare"),
            "--storage",
            str(out),
            "--name",
            "one",
            "--experiment",
            f"retrieval/{out.name}",
            "--ray.num_workers",
            "2",
            "--ray.threads",
            "1",
        ],
        trained,
        needs=("prepare",),
    ),
    "evaluate": Step(
        lambda world, out: [
            "jobs.evaluate",
            "--checkpoint",
            str(world.folder / "train/one"),
            "--tables",
            str(world.folder / "prepare"),
            "--batch_inference",
            str(out),
            "--shards",
            "2",
        ],
        lambda world, out: hashes(out),
        needs=("prepare", "train"),
    ),
    "sweep": Step(
        lambda world, out: [
            "jobs.sweep",
            "--grid",
            str(world.folder / "rates.yaml"),
            "--tables",
            str(world.folder / "prepare"),
            "--storage",
            str(out),
            "--name",
            "swept",
            "--experiment",
            f"retrieval/{out.name}",
            "--options.test",
            "false",
            "--ray.threads",
            "1",
        ],
        trained,
        needs=("prepare",),
    ),
}
"""In the order in which each needs what those before have made."""


@dataclass
class Undisturbed:
    """What a command makes, and how long it takes."""

    result: Any
    seconds: float


@dataclass
class Kill:
    """One kill and what came of it."""

    step: str
    target: str
    at_s: float
    """Seconds after the command's start."""
    killed: str = ""
    """What was killed; empty where there was nothing any more."""
    codes: list[int] = field(default_factory=list)
    """How each start ended."""
    lines: list[str] = field(default_factory=list)
    """The last line of those that failed by themselves."""
    seconds: float = 0.0
    """Of all starts."""
    wrong: str = ""
    """What was found; empty where the result is the undisturbed one."""


def undisturbed(world: World, steps: list[str]) -> dict[str, Undisturbed]:
    """Runs the commands, and first those that they need, one after the other."""
    needed = {other for step in steps for other in (step, *STEPS[step].needs)}
    found = {}
    for name in (step for step in STEPS if step in needed):
        began, out = time.monotonic(), world.folder / name
        process = world.start(STEPS[name].words(world, out))
        words = said(process)
        assert process.wait() == 0, words
        found[name] = Undisturbed(
            STEPS[name].result(world, out), time.monotonic() - began
        )
        print(f"{name}: {found[name].seconds:.0f} s undisturbed", flush=True)
    return found


def strike(
    world: World, target: str, driver: subprocess.Popen[str], draw: random.Random
) -> str:
    """Kills it; what it was, or nothing."""
    if target == "driver":
        os.killpg(driver.pid, signal.SIGKILL)
        return f"driver {driver.pid}"
    if target == "node":
        world.lose_node(draw)
        return "a node"
    if target == "mlflow":
        world.lose_server()
        return f"the MLflow server, for {AWAY:.0f} s"
    workers = world.workers()
    if not workers:
        return ""
    worker = draw.choice(workers)
    name = named(worker)
    with suppress(psutil.Error):
        worker.kill()
        return name
    return ""


def one_line(words: str) -> str:
    """The last line of a command that failed, which has to say why; else a ValueError."""
    lines = [line for line in words.strip().splitlines() if line]
    last = lines[-1] if lines else ""
    if not last.startswith("error: ") or any(
        line.startswith("Traceback (most recent") for line in lines
    ):
        raise ValueError("it failed without one line: " + " | ".join(lines)[-6000:])
    return last


def kill(
    world: World,
    name: str,
    target: str,
    moment: float,
    draw: random.Random,
    number: int,
    reference: Undisturbed,
) -> Kill:
    """Starts a command in a fresh folder, kills, starts it again as often as it needs,
    and compares.
    """
    step, out = STEPS[name], world.folder / f"{name}-{number}"
    world.mend()
    found = Kill(name, target, round(moment * reference.seconds, 2))
    began = time.monotonic()
    try:
        while not found.codes or found.codes[-1] != 0:
            if len(found.codes) == TRIES:
                raise ValueError(f"it did not end well in {TRIES} starts")
            process = world.start(step.words(world, out))
            if not found.codes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(found.at_s)
                if process.poll() is None:
                    found.killed = strike(world, target, process, draw)
            try:
                words, _ = process.communicate(timeout=LONGEST)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise ValueError(
                    f"it hangs: {' | '.join(said(process).splitlines()[-3:])}"
                ) from None
            found.codes.append(process.returncode)
            if process.returncode > 0:
                found.lines.append(one_line(words))
        if step.result(world, out) != reference.result:
            raise ValueError(f"the result differs: {step.result(world, out)}")
    except ValueError as error:
        found.wrong = str(error)
    found.seconds = round(time.monotonic() - began, 1)
    shutil.rmtree(out, ignore_errors=True)
    return found


def table(found: list[Kill]) -> str:
    """A row per command and what was killed: how often, how it ended, what was lost."""
    rows = [
        "| command | killed | times | succeeded by itself | succeeded after the command was repeated | failed |"
    ]
    rows.append("|---|---|---|---|---|---|")
    for step, target in sorted(
        {(k.step, k.target) for k in found},
        key=lambda k: (list(STEPS).index(k[0]), k[1]),
    ):
        some = [k for k in found if (k.step, k.target) == (step, target)]
        alone = sum(k.codes[:1] == [0] for k in some)
        wrong = sum(bool(k.wrong) for k in some)
        rows.append(
            f"| {step} | {target} | {len(some)} | {alone} | {len(some) - alone} | {wrong} |"
        )
    return "\n".join(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    draw, steps, found = random.Random(options.seed), list(STEPS), list[Kill]()
    with world() as made:
        references = undisturbed(made, steps)
        for number in range(options.kills):
            step = steps[number % len(steps)]
            target = draw.choice(
                [t for t in TARGETS if t != "mlflow" or step in ("train", "sweep")]
            )
            one = kill(
                made, step, target, draw.random(), draw, number, references[step]
            )
            found.append(one)
            end = one.wrong or "same result"
            print(
                f"{step:>9} {target:>7} at {one.at_s:5.1f} s: {one.killed[:40] or 'nothing left'}; "
                f"{one.codes} in {one.seconds:.0f} s; {end}",
                flush=True,
            )
    print(table(found))
    wrong = [each for each in found if each.wrong]
    print(f"{len(found)} kills, {len(wrong)} with another result or end")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
