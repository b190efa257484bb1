"""The sequence step beside bare polars: the same log, in turn, each run in processes of its own.

`python -m jobs.benchmark sequences` and, with larger logs in an object store of 1 GiB, `python -m jobs.benchmark scale`
print what `run` yields. The log is simulated and written once, as
Parquet in time order. Both variants read it, sort by user and time, index the items, build every list
column with requests, histories and a temporal split, and write Parquet; the rows are equal (a test holds
that). `trieline` calls the functions of jobs.prepare, shuffle included, and so also drops duplicates,
keeps an events table, checks that each user is in one part, and commits with hashes. `polars` is one
process with the whole log in memory, on all cores.

Timed is the work from the first read to the last byte written, without imports and the start of Ray. Peak
memory is the sum over all processes of the variant, Ray's own included, shared pages counted once; the
part of it that lies in Ray's object store is `object_store_mb`, what went through the shuffle `shuffled_mb`,
and what the store put on disk `spilled_mb`. `exponent` is how processor time has grown since the size before:
1 as the log, 2 as its square. A run that fails, as polars does where the log exceeds the memory, is a line with its
`error`.

With several `nodes` one more variant has so many Ray nodes on this machine, which share its CPUs: no time is saved;
what is seen is what the exchange between nodes costs, and `crossed_mb` is what they sent to each other. One node then
has as many partitions as they, so both make the same files.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import polars as pl
import psutil

from models.tables import join, read_manifest
from pipelines.data.events import partitions_for
from pipelines.data.kinds.retrieval.simulator import simulate_retrieval
from pipelines.data.log import log_of
from pipelines.data.prepare import prepare
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.ray_data_config import WORKERS
from pipelines.data.splits import SplitConfig

EVENTS_PER_USER, EVENTS_PER_ITEM = 20, 400
VARIANTS = ("trieline", "polars")
SPLIT = SplitConfig("temporal")
EXTRA = ("shuffled_mb", "spilled_mb", "crossed_mb")
PARTITIONS_PER_NODE = 4
"""At least, where there are several nodes: what is one partition never leaves its node."""
REPORTS_MS = 1000
"""Milliseconds between two reports of what nodes have sent each other."""


LOG: dict[str, Any] = {
    "files": "events-*.parquet",
    "user": "user_id",
    "item": "item_id",
    "time": {"column": "timestamp_ms", "unit": "ms"},
}
"""Mapping of the simulated log."""


def run_trieline(log: str, output: str, partitions: int | None = None) -> None:
    """The log to committed tables with the functions of jobs.prepare."""
    config = PrepareConfig(core=0, split=SPLIT, partitions=partitions)
    prepare(log_of(LOG), log, output, config, overwrite=True, say=lambda line: None)


def run_polars(log: str, output: str) -> None:
    """The log to one Parquet file of sequences with polars alone."""
    frame = pl.read_parquet(f"{log}/events-*.parquet")
    items = frame.select("item_id").unique().sort("item_id").with_row_index("item_index")
    last = max(frame.height - 1, 1)
    ranks = [
        int(frame.height * share) for share in (1 - SPLIT.val_fraction - SPLIT.test_fraction, 1 - SPLIT.test_fraction)
    ]
    cuts = [frame["timestamp_ms"].quantile((rank + 0.5) / last, "lower") for rank in ranks]
    user, stamp, row = pl.col("user_id"), pl.col("timestamp_ms"), pl.int_range(pl.len(), dtype=pl.Int32)
    new_user = (user != user.shift(1)).fill_null(True)
    new_time = new_user | (stamp != stamp.shift(1)).fill_null(True)

    def begin(starts: pl.Expr) -> pl.Expr:
        return pl.when(starts).then(row).forward_fill()

    sequences = (
        frame.lazy()
        .join(items.lazy().with_columns(pl.col("item_index").cast(pl.Int32)), on="item_id")
        .sort("user_id", "timestamp_ms", "item_id")
        .with_columns(
            (begin(new_time) - begin(new_user)).alias("history_end"),
            pl.when(stamp < cuts[0]).then(pl.lit("train")).when(stamp < cuts[1]).then(pl.lit("val"))
            .otherwise(pl.lit("test")).alias("split"),
            pl.lit(None, dtype=pl.String).alias("query"),
            pl.concat_list("item_index").alias("candidates"),
        )
        .group_by("user_id", maintain_order=True)
        .agg(
            "item_index",
            "timestamp_ms",
            "query",
            pl.struct("timestamp_ms", "query", "history_end", "split", "candidates").alias("requests"),
        )
    )  # fmt: skip
    Path(output).mkdir(parents=True, exist_ok=True)
    sequences.collect().write_parquet(f"{output}/sequences.parquet", compression="zstd", compression_level=1)


class Watch:
    """Memory and processor time of a process and all below it, sampled."""

    def __init__(self, pid: int) -> None:
        self.root = psutil.Process(pid)
        self.peak_mb = 0.0
        """Highest sum of memory, shared pages counted once."""
        self.store_mb = 0.0
        """Highest sum of shared memory: Ray's object store."""
        self.cpu: dict[int, float] = {}
        """Seconds of processor time of every process seen, as last seen."""

    def sample(self) -> None:
        total = shared = 0
        with suppress(psutil.Error):
            for process in [self.root, *self.root.children(recursive=True)]:
                with suppress(psutil.Error, OSError):
                    times = process.cpu_times()
                    self.cpu[process.pid] = times.user + times.system
                    rollup = Path(f"/proc/{process.pid}/smaps_rollup")
                    if not rollup.exists():  # not Linux: shared pages count once per process
                        total += process.memory_info().rss
                        continue
                    values = {line.split(":")[0]: line.split()[1] for line in rollup.read_text().splitlines()[1:]}
                    total += int(values["Pss"]) << 10
                    shared += int(values.get("Pss_Shmem", 0)) << 10
        self.peak_mb = max(self.peak_mb, total / 2**20)
        self.store_mb = max(self.store_mb, shared / 2**20)


def _measure(
    variant: str, log: str, output: str, store_mb: int | None = None, nodes: int = 1, partitions: int | None = None
) -> dict[str, Any]:
    """One run in a process of its own: seconds of work, of processor time, and memory in MB; or its error."""
    options = {"store_mb": store_mb, "nodes": nodes, "partitions": partitions}
    given = [word for name, value in options.items() if value for word in (f"--{name}", str(value))]
    of_nodes = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # nobody else can join the nodes or give them work
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # else Ray stays on loopback, where it takes one node alone
        "RAY_metrics_report_interval_ms": str(REPORTS_MS),
    }
    return measured(["benchmarks.sequences", variant, log, output, *given], **(of_nodes if nodes > 1 else {}))


def measured(command: list[str], **more: str) -> dict[str, Any]:
    """What `python -m` of the command says in its last line, as JSON, with the processor time (s) and the memory (MB)
    of all its processes; or its error. more: environment variables."""
    command = [sys.executable, "-m", *command]
    settings = {
        "RAY_raylet_start_wait_time_s": "180",  # a busy machine starts Ray slowly
        "RAY_worker_niceness": "0",  # Ray's workers else give way to all other processes, and polars does not
    }
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **settings, **more}
    )
    watch = Watch(process.pid)
    while process.poll() is None:
        watch.sample()
        time.sleep(0.25)
    out, err = process.communicate()
    found = {"cpu_s": sum(watch.cpu.values()), "peak_mb": watch.peak_mb, "store_mb": watch.store_mb}
    if process.returncode:
        killed = "killed, as by a machine out of memory" if process.returncode < 0 else ""
        return {**found, "error": killed or (err.strip().splitlines() or ["no words"])[-1][:300]}
    return {**found, **json.loads(out.splitlines()[-1])}


def run(
    sizes: list[int], runs: int = 3, store_mb: int | None = None, name: str = "sequences", nodes: int = 1
) -> Iterator[dict[str, Any]]:
    """One line per size and variant, as `python -m jobs.benchmark` prints them. `items` are events; store_mb: of Ray's
    object store on each node, None for Ray's own choice."""
    before: dict[str, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory(prefix="trieline-benchmark-") as folder:
        for events in sizes:
            log = f"{folder}/log-{events}"
            users, items = max(1, events // EVENTS_PER_USER), max(8, events // EVENTS_PER_ITEM)
            simulate_retrieval(log, users, items, events, seed=42)
            params = {"events": events, "users": users, "items": items, "cpus": os.cpu_count()}
            ways: dict[str, dict[str, Any]] = {variant: {"variant": variant} for variant in VARIANTS}
            if nodes > 1:
                files = [join(log, file) for file in log_of(LOG).event_files(log)]
                partitions = max(partitions_for(files), PARTITIONS_PER_NODE * nodes)
                params["partitions"] = ways["trieline"]["partitions"] = partitions
                ways[f"trieline_{nodes}_nodes"] = {**ways["trieline"], "nodes": nodes}
            results: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for _ in range(runs):
                for way, options in ways.items():
                    results[way].append(_measure(log=log, output=f"{folder}/{way}", store_mb=store_mb, **options))
            for variant, found in results.items():
                if errors := [result["error"] for result in found if "error" in result]:
                    yield {"benchmark": name, "variant": variant, "params": params, "runs": runs, "error": errors[0]}
                    continue
                cpu = statistics.median(result["cpu_s"] for result in found)
                growth = {}
                if variant in before:
                    smaller, then = before[variant]
                    growth = {"exponent": round(math.log(cpu / then) / math.log(events / smaller), 3)}
                before[variant] = events, cpu
                seconds = [result["seconds"] for result in found]
                median = statistics.median(seconds)
                yield {
                    "benchmark": name,
                    "variant": variant,
                    "params": params,
                    "runs": runs,
                    "median_s": round(median, 3),
                    "min_s": round(min(seconds), 3),
                    "max_s": round(max(seconds), 3),
                    "items_per_s": round(events / median),
                    "peak_memory_mb": round(max(result["peak_mb"] for result in found)),
                    "object_store_mb": round(max(result["store_mb"] for result in found)),  # within the peak
                    "cpu_s": round(cpu, 2),
                    **{key: max(result[key] for result in found) for key in EXTRA if key in found[0]},
                    **growth,
                }


def main() -> None:
    """Runs one variant in this process and prints its seconds as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("log")
    parser.add_argument("output")
    parser.add_argument("--store_mb", type=int)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--partitions", type=int)
    arguments = parser.parse_args()
    log, output = arguments.log, arguments.output
    if arguments.variant == "polars":
        print(json.dumps({"seconds": _seconds(run_polars, log, output)}))
        return
    with _ray(arguments.nodes, arguments.store_mb and arguments.store_mb << 20):
        seconds = _seconds(run_trieline, log, output, arguments.partitions)
        print(json.dumps({"seconds": seconds, **_of_ray(output)}))


def _seconds(work: Callable[..., None], *arguments: Any) -> float:
    begin = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begin


@contextmanager
def _ray(nodes: int, store: int | None) -> Iterator[None]:
    """Ray with so many nodes on this machine, the CPUs dealt out to them, and so many bytes of object store each.

    Several nodes are started as docs/cluster.md does, each with its own ports and folder, and ended by their process
    ids. The driver is on the first one.
    """
    import ray

    settings: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "runtime_env": WORKERS}
    with ExitStack() as stack:
        if nodes == 1:
            ray.init(address="local", include_dashboard=False, object_store_memory=store, **settings)
            stack.callback(ray.shutdown)
            yield
            return
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        port, client, *agents = _free_ports(2 + nodes)
        head = ["--head", "--include-dashboard", "false", "--port", str(port), "--ray-client-server-port", str(client)]
        other = ["--address", f"127.0.0.1:{port}"]
        each = ["--num-cpus", str(max(1, (os.cpu_count() or 1) // nodes)), "--disable-usage-stats"]
        each += ["--min-worker-port", "0", "--max-worker-port", "0"]
        each += ["--object-store-memory", str(store)] if store else []
        for node, agent in enumerate(agents):
            own = ["--temp-dir", f"{folder}/{node}", "--dashboard-agent-listen-port", str(agent)]
            said = stack.enter_context(open(f"{folder}/{node}.log", "w+"))
            line = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *(other if node else head)]
            process = subprocess.Popen([*line, *each, *own], stdout=said, stderr=said)
            stack.callback(_end, process)
            if node == 0:
                _wait(partial(_answers, port), process, said)
                ray.init(address=other[-1], **settings)
                stack.callback(ray.shutdown)
            _wait(partial(_joined, node + 1), process, said)
        yield


def _wait(ready: Callable[[], bool], node: subprocess.Popen[bytes], said: IO[str]) -> None:
    """Waits until a node of Ray is there; an error with what it `said` where it ends instead."""
    while not ready():
        if node.poll() is not None:
            said.seek(0)
            raise RuntimeError(f"a Ray node did not start: {' '.join(said.read().split())[-300:]}")
        time.sleep(0.1)


def _end(node: subprocess.Popen[bytes]) -> None:
    """Ends a node and, as it was started with --block, all that it has started."""
    below = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
    node.terminate()
    _, alive = psutil.wait_procs(below, timeout=30)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    node.kill()
    node.wait()


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def _joined(nodes: int) -> bool:
    import ray

    return len(ray.nodes()) >= nodes


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _of_ray(output: str) -> dict[str, int]:
    """Megabytes that Ray says went through the shuffle, on disk because the object store was full, and, of several
    nodes, from one to another."""
    import ray
    from ray._private.internal_api import memory_summary

    said = memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True)
    spilled = sum(int(megabytes) for megabytes in re.findall(r"Spilled (\d+) MiB", said))
    stats = read_manifest(join(output, "events")).timings["ray_data"]
    maps = re.findall(r"HashShuffleMap\(.*?\* Output size bytes per block: [^\n]* (\d+) total", str(stats), re.DOTALL)
    found = {"shuffled_mb": sum(map(int, maps)) >> 20, "spilled_mb": spilled}
    nodes = ray.nodes()
    if len(nodes) == 1:
        return found
    time.sleep(3 * REPORTS_MS / 1000)
    received = 0.0
    for node in nodes:
        uri = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(uri, timeout=30) as answer:
            told = answer.read().decode()
        received += sum(
            map(float, re.findall(r'^ray_object_manager_bytes{.*Type="Received".*} (\S+)$', told, re.MULTILINE))
        )
    return {**found, "crossed_mb": int(received) >> 20}


if __name__ == "__main__":
    main()
