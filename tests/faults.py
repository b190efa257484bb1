"""Kill processes and nodes of running commands at random times and compare the results.

    python -m tests.faults --kills 100 --seed 1

The commands run on a cluster of three Ray nodes on one machine. Each of prepare,
tokenize, train (two workers), evaluate and sweep first runs undisturbed. Then, `--kills`
times, one command starts in a fresh folder, and at a random time SIGKILL ends its driver,
a worker process, a whole node (its raylet and all child processes), or the MLflow server,
which comes back after `MLFLOW_DOWNTIME_S`. A command that ends with an error is repeated
until it succeeds, as a user would do.

The result must equal the undisturbed one: the same tables, weights and rankings, and in
MLflow one run per name, each point of a metric once, with the same validation. These are
reported as problems: an error that is not a single line `error: ...`, a command that
needs more than `MAX_STARTS` starts, and one that runs for more than `TIMEOUT_S`. A kill
takes about 40 seconds on 2 cores.
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
MLFLOW_DOWNTIME_S = 15.0
"""Seconds between the kill and the restart of the MLflow server."""
MAX_STARTS = 4
"""Limit on the starts of one command."""
IDLE_PROCESSES = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes that are not killed: idle workers run nothing of a job, and a node without
its agents ends or starts no more workers."""
TIMEOUT_S = 900.0
"""Seconds after which a command counts as hanging."""

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
TRIAL_OPTIONS = {f"model.{key}": value for key, value in MODEL.items()} | {
    f"fit.{key}": value for key, value in FIT.items()
}
GRID = {
    "source": "a test",
    "fixed": {**TRIAL_OPTIONS, "fit.max_epochs": 2},
    "axes": {"fit.lr": [0.01, 0.002]},
}


def find_free_address() -> str:
    """Return the HTTP address of a free local port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def start_mlflow(address: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start an MLflow server on the SQLite file of the folder and wait until it answers.

    The server runs in its own process group, so that a kill reaches its workers.
    """
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        address.rpartition(":")[2],
    ]
    command += ["--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", f"{folder}/artifacts"]
    # MLflow's job execution would start seven more processes.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(folder / "server.log", "a") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )

    while True:
        assert server.poll() is None, (folder / "server.log").read_text()[-2000:]
        with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=60):
            return server
        time.sleep(0.2)


class Deployment:
    """A cluster of three nodes, an MLflow server and a simulated raw log."""

    def __init__(self, folder: Path, head_cpus: int = 2) -> None:
        # Ray reads the mode when it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        import ray

        # An initialised Ray keeps the token of the user's file.
        if not ray.is_initialized():
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        from ray.cluster_utils import Cluster

        self.folder = folder
        self.num_addresses = 0
        head = {**self._node_options(), "num_cpus": head_cpus}
        del head["node_ip_address"]
        self.cluster: Any = Cluster(
            initialize_head=True, head_node_args=head, shutdown_at_exit=False
        )
        self.nodes = [self.cluster.add_node(**self._node_options()) for _ in range(2)]
        self.store = find_free_address()
        self.server = start_mlflow(self.store, folder)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RAY_TRAIN")
        }
        self.environment = {
            **environment,
            "RAY_ADDRESS": self.cluster.address,
            "MLFLOW_TRACKING_URI": self.store,
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
        simulation = self.start(["jobs.simulate", *simulate])
        assert simulation.wait() == 0, read_output(simulation)

    def _node_options(self) -> dict[str, Any]:
        """Return options of a new node, with its own IP address as on a real cluster."""
        self.num_addresses += 1
        return {
            "node_ip_address": f"127.0.0.{1 + self.num_addresses}",
            "num_cpus": 2,
            "object_store_memory": 200 << 20,
            "include_dashboard": False,
        }

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Start `python -m` with these arguments on the cluster."""
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def replace_lost_nodes(self) -> None:
        """Start a new node for each node that has no live process."""
        lost_nodes = [node for node in self.nodes if not node.any_processes_alive()]
        for node in lost_nodes:
            self.nodes.remove(node)
            self.nodes.append(self.cluster.add_node(**self._node_options()))

    def list_busy_workers(self) -> list[psutil.Process]:
        """Return the busy worker processes of all nodes."""
        return [worker for node in self.list_workers_by_node() for worker in node]

    def list_workers_by_node(self) -> list[list[psutil.Process]]:
        """Return the busy worker processes per node, the head node first."""
        workers_by_node = []
        for node in [self.cluster.head_node, *self.nodes]:
            busy: list[psutil.Process] = []
            for raylet in node.all_processes.get("raylet", []):
                with suppress(psutil.Error):
                    children = psutil.Process(raylet.process.pid).children(
                        recursive=True
                    )
                    busy += [child for child in children if is_busy_worker(child)]
            workers_by_node.append(busy)
        return workers_by_node

    def kill_node(self, draw: random.Random) -> None:
        """Kill a random node with all its processes, and start a node to replace it."""
        node = self.nodes.pop(draw.randrange(len(self.nodes)))
        children = [
            child
            for raylet in node.all_processes.get("raylet", [])
            for child in psutil.Process(raylet.process.pid).children(recursive=True)
        ]
        self.cluster.remove_node(node, allow_graceful=False)
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        self.nodes.append(self.cluster.add_node(**self._node_options()))

    def restart_server(self) -> None:
        """Kill the MLflow server and start it again after `MLFLOW_DOWNTIME_S`."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
        time.sleep(MLFLOW_DOWNTIME_S)
        self.server = start_mlflow(self.store, self.folder)

    def close(self) -> None:
        """Stop the MLflow server and the cluster."""
        with suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.cluster.shutdown()
        import ray
        from ray.experimental import internal_kv

        # The cluster's shutdown also resets the key-value store of this process's Ray.
        if ray.is_initialized():
            internal_kv._initialize_internal_kv(
                ray._private.worker.global_worker.gcs_client
            )


@contextmanager
def open_deployment(head_cpus: int = 2) -> Iterator[Deployment]:
    """Start a deployment in a temporary folder, and remove both at the end."""
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
    deployment = None
    try:
        deployment = Deployment(folder, head_cpus)
        yield deployment
    finally:
        if deployment:
            deployment.close()
        shutil.rmtree(folder, ignore_errors=True)


def read_command_line(process: psutil.Process) -> str:
    """Return the command line of a process, or an empty string if it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def is_busy_worker(process: psutil.Process) -> bool:
    """Return whether the process is a Ray worker that runs a task or an actor."""
    command_line = read_command_line(process)
    return command_line.startswith("ray::") and not command_line.startswith(
        IDLE_PROCESSES
    )


def read_output(process: subprocess.Popen[str]) -> str:
    """Return the process's output up to its end."""
    assert process.stdout is not None
    return process.stdout.read()


@dataclass(frozen=True)
class Step:
    """A command and the result that must survive a kill."""

    command: Callable[[Deployment, Path], list[str]]
    """Arguments of `python -m`, for an output folder."""
    read_result: Callable[[Deployment, Path], Any]
    """Reads from the output folder what must equal the undisturbed result."""
    requires: tuple[str, ...] = ()
    """Names of the commands whose results this command reads."""


def read_table_hashes(folder: Path) -> dict[str, str]:
    """Return the content hashes of all tables below the folder."""
    return {
        str(path.parent.relative_to(folder)): json.loads(path.read_text())["hash"]
        for path in sorted(folder.rglob("manifest.json"))
    }


def read_weight_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the best weights of each run below the folder."""
    return {
        str(path.parent.parent.relative_to(folder)): json.loads(path.read_text())[
            "sha256"
        ]["model.safetensors"]
        for path in sorted(folder.rglob("best/config.json"))
    }


def read_logged_metrics(deployment: Deployment, folder: Path) -> dict[str, Any]:
    """Return the logged points (step, value) of each metric, by run name.

    Measured times vary between runs, so their values are replaced by None.

    Raises:
        ValueError: if two runs share a name, a run is not finished, or a metric has two
            points at one step.
    """
    from mlflow import MlflowClient

    client = MlflowClient(deployment.store)
    experiment = client.get_experiment_by_name(f"retrieval/{folder.name}")
    if experiment is None:
        raise ValueError(f"there is no experiment retrieval/{folder.name}")
    metrics_by_run: dict[str, Any] = {}
    for run in client.search_runs([experiment.experiment_id]):
        name = str(run.info.run_name)
        if name in metrics_by_run:
            raise ValueError(f"two runs are named {name}")
        if run.info.status != "FINISHED":
            raise ValueError(f"the run {name} is {run.info.status}")
        metrics_by_run[name] = {}
        for key in run.data.metrics:
            if key.startswith("system/"):
                continue
            points = client.get_metric_history(run.info.run_id, key)
            counts = Counter(point.step for point in points)
            repeated_steps = [step for step, count in counts.items() if count > 1]
            if repeated_steps:
                raise ValueError(
                    f"{name} has {key} twice at the steps {repeated_steps}"
                )
            is_time = any(word in key for word in ("seconds", "per_s", "wait"))
            metrics_by_run[name][key] = sorted(
                (point.step, None if is_time else point.value) for point in points
            )
    return metrics_by_run


def read_training(deployment: Deployment, folder: Path) -> dict[str, Any]:
    """Return the weight hashes and logged metrics of the runs below the folder."""
    return {
        "weights": read_weight_hashes(folder),
        "logged": read_logged_metrics(deployment, folder),
    }


STEPS = {
    "prepare": Step(
        lambda deployment, out: [
            "jobs.prepare",
            "--source",
            "jobs/configs/sources/simulated.yaml",
            "--input",
            str(deployment.raw),
            "--output",
            str(out),
            "--partitions",
            "6",
        ],
        lambda deployment, out: read_table_hashes(out),
    ),
    "tokenize": Step(
        lambda deployment, out: [
            "jobs.tokenize",
            "--tables",
            str(deployment.folder / "prepare"),
            "--tokenizer",
            "rqkmeans",
            "--encoder",
            "tfidf",
            "--rqkmeans.codebook_size",
            "16",
            "--output",
            str(out),
        ],
        lambda deployment, out: read_table_hashes(out),
        requires=("prepare",),
    ),
    "train": Step(
        lambda deployment, out: [
            "jobs.train",
            "--config",
            str(deployment.folder / "model.yaml"),
            "--tables",
            str(deployment.folder / "prepare"),
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
        read_training,
        requires=("prepare",),
    ),
    "evaluate": Step(
        lambda deployment, out: [
            "jobs.evaluate",
            "--checkpoint",
            str(deployment.folder / "train/one"),
            "--tables",
            str(deployment.folder / "prepare"),
            "--batch_inference",
            str(out),
            "--shards",
            "2",
        ],
        lambda deployment, out: read_table_hashes(out),
        requires=("prepare", "train"),
    ),
    "sweep": Step(
        lambda deployment, out: [
            "jobs.sweep",
            "--grid",
            str(deployment.folder / "rates.yaml"),
            "--tables",
            str(deployment.folder / "prepare"),
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
        read_training,
        requires=("prepare",),
    ),
}
"""Commands in an order in which each follows the commands that it requires."""


@dataclass
class Reference:
    """The result and duration of an undisturbed command."""

    result: Any
    seconds: float


@dataclass
class Kill:
    """One kill and the outcome of its command."""

    step: str
    target: str
    delay_s: float
    """Seconds between the command's start and the kill."""
    killed: str = ""
    """The killed process; empty if the target had ended."""
    exit_codes: list[int] = field(default_factory=list)
    """Exit code of each start."""
    error_lines: list[str] = field(default_factory=list)
    """Last line of each start that exited with an error."""
    seconds: float = 0.0
    """Duration of all starts together."""
    problem: str = ""
    """The difference or failure; empty if the result equals the undisturbed one."""


def run_references(deployment: Deployment, steps: list[str]) -> dict[str, Reference]:
    """Run the commands and their requirements undisturbed, one after the other."""
    needed = {other for step in steps for other in (step, *STEPS[step].requires)}
    references = {}
    for name in (step for step in STEPS if step in needed):
        start_time = time.monotonic()
        out = deployment.folder / name
        process = deployment.start(STEPS[name].command(deployment, out))
        output = read_output(process)
        assert process.wait() == 0, output
        result = STEPS[name].read_result(deployment, out)
        references[name] = Reference(result, time.monotonic() - start_time)
        print(f"{name}: {references[name].seconds:.0f} s undisturbed", flush=True)
    return references


def kill_target(
    deployment: Deployment,
    target: str,
    driver: subprocess.Popen[str],
    draw: random.Random,
) -> str:
    """Kill the target; return its description, or an empty string if it had ended."""
    if target == "driver":
        os.killpg(driver.pid, signal.SIGKILL)
        return f"driver {driver.pid}"
    if target == "node":
        deployment.kill_node(draw)
        return "a node"
    if target == "mlflow":
        deployment.restart_server()
        return f"the MLflow server, for {MLFLOW_DOWNTIME_S:.0f} s"
    list_busy_workers = deployment.list_busy_workers()
    if not list_busy_workers:
        return ""
    worker = draw.choice(list_busy_workers)
    name = read_command_line(worker)
    with suppress(psutil.Error):
        worker.kill()
        return name
    return ""


def read_error_line(output: str) -> str:
    """Return the last line of a failed command's output.

    Raises:
        ValueError: if it is no `error: ...` line, or the output has a traceback.
    """
    lines = [line for line in output.strip().splitlines() if line]
    last = lines[-1] if lines else ""
    has_traceback = any(line.startswith("Traceback (most recent") for line in lines)
    if not last.startswith("error: ") or has_traceback:
        raise ValueError("it failed without one line: " + " | ".join(lines)[-6000:])
    return last


def run_with_kill(
    deployment: Deployment,
    name: str,
    target: str,
    moment: float,
    draw: random.Random,
    number: int,
    reference: Reference,
) -> Kill:
    """Run a command in a fresh folder with one kill, until it succeeds, and compare.

    Args:
        deployment: Cluster, MLflow server and raw log.
        name: Name of the command in `STEPS`.
        target: Process to kill, one of `TARGETS`.
        moment: Time of the kill as a share of the undisturbed duration, 0 to 1.
        draw: Source of random choices.
        number: Number of the output folder.
        reference: Result of the undisturbed command.
    """
    step = STEPS[name]
    out = deployment.folder / f"{name}-{number}"
    deployment.replace_lost_nodes()
    kill = Kill(name, target, round(moment * reference.seconds, 2))
    start_time = time.monotonic()
    try:
        while not kill.exit_codes or kill.exit_codes[-1] != 0:
            if len(kill.exit_codes) == MAX_STARTS:
                raise ValueError(f"it did not end well in {MAX_STARTS} starts")
            process = deployment.start(step.command(deployment, out))
            if not kill.exit_codes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(kill.delay_s)
                if process.poll() is None:
                    kill.killed = kill_target(deployment, target, process, draw)
            try:
                output, _ = process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise ValueError(
                    f"it hangs: {' | '.join(read_output(process).splitlines()[-3:])}"
                ) from None
            kill.exit_codes.append(process.returncode)
            if process.returncode > 0:
                kill.error_lines.append(read_error_line(output))
        result = step.read_result(deployment, out)
        if result != reference.result:
            raise ValueError(f"the result differs: {result}")
    except ValueError as error:
        kill.problem = str(error)
    kill.seconds = round(time.monotonic() - start_time, 1)
    shutil.rmtree(out, ignore_errors=True)
    return kill


def format_table(kills: list[Kill]) -> str:
    """Return a Markdown table with a row per command and target."""
    rows = [
        "| command | killed | times | succeeded by itself | succeeded after the command was repeated | failed |"
    ]
    rows.append("|---|---|---|---|---|---|")
    kills_by_row: dict[tuple[str, str], list[Kill]] = {}
    for kill in kills:
        kills_by_row.setdefault((kill.step, kill.target), []).append(kill)

    order = list(STEPS)
    for step, target in sorted(kills_by_row, key=lambda k: (order.index(k[0]), k[1])):
        row_kills = kills_by_row[step, target]
        alone = sum(kill.exit_codes[:1] == [0] for kill in row_kills)
        repeated = len(row_kills) - alone
        failed = sum(bool(kill.problem) for kill in row_kills)
        rows.append(
            f"| {step} | {target} | {len(row_kills)} | {alone} | {repeated} | {failed} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    draw = random.Random(options.seed)
    steps = list(STEPS)
    kills: list[Kill] = []
    with open_deployment() as deployment:
        references = run_references(deployment, steps)
        for number in range(options.kills):
            step = steps[number % len(steps)]
            targets = [
                t for t in TARGETS if t != "mlflow" or step in ("train", "sweep")
            ]
            target = draw.choice(targets)
            kill = run_with_kill(
                deployment, step, target, draw.random(), draw, number, references[step]
            )
            kills.append(kill)
            end = kill.problem or "same result"
            print(
                f"{step:>9} {target:>7} at {kill.delay_s:5.1f} s: {kill.killed[:40] or 'nothing left'}; "
                f"{kill.exit_codes} in {kill.seconds:.0f} s; {end}",
                flush=True,
            )
    print(format_table(kills))
    failed_kills = [kill for kill in kills if kill.problem]
    print(f"{len(kills)} kills, {len(failed_kills)} with another result or end")
    sys.exit(bool(failed_kills))


if __name__ == "__main__":
    main()
