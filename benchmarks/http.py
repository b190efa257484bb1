"""Requests over HTTP by several clients at once: Ray Serve beside `mlflow models serve`.

`python -m benchmarks http` prints what `http` yields. All serve one registered QGS, that of `benchmarks/serve.py`, and
are asked for the same requests, with whole histories. `mlflow` is one process of two threads, `mlflow_2` two workers of
one thread each; `ray_serve` one replica of two threads, `ray_serve_2` two replicas of one thread each. Clients are
threads of this process, on the same machine; each sends its next request once it has an answer. `median_s` and `p99_s`
are over all requests, `items_per_s` is answers per second to all clients together.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, row
from benchmarks.serve import CANDIDATES, request, save
from jobs import cli
from pipelines import tracking
from pipelines.serving import package
from pipelines.serving.registered_model import register

HISTORY, CLIENTS, REQUESTS_PER_RUN, THREADS = 100, (1, 8), 32, 2
MODEL = "models:/qgs/1"


def make(folder: str) -> str:
    """The MLflow store with the model; its URI."""
    uri = f"sqlite:///{folder}/mlflow.db"
    config = {
        "model": {"name": "qgs"},
        "tables": f"{folder}/tables",
        "text": f"{folder}/text",
    }
    run = tracking.open_run(
        uri, "search/benchmark", "qgs", folder, config=config, hashes={}
    )
    save(folder, "qgs", HISTORY, tracking=run.to_dict())
    tracking.Logger(run).tag(checkpoint=f"{folder}/checkpoint")
    with warnings.catch_warnings(action="ignore"):  # random text has no encoder
        register(run, "qgs")
    return uri


def ports(count: int) -> list[int]:
    """Free ones."""
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [each.getsockname()[1] for each in free]
    for each in free:
        each.close()
    return found


@contextmanager
def servers(uri: str) -> Iterator[dict[str, str]]:
    """By variant the URL of a server that answers."""
    from ray import serve

    from pipelines.serving.ray_serve import Options, build

    *of_mlflow, of_ray = ports(3)
    urls, started = {}, []
    for workers, port in enumerate(of_mlflow, 1):
        urls[f"mlflow_{workers}" if workers > 1 else "mlflow"] = (
            f"http://127.0.0.1:{port}"
        )
        options = ["--env-manager", "local", "--port", port, "--workers", workers]
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "models",
            "serve",
            "--model-uri",
            MODEL,
            *options,
        ]
        path = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        )  # where uvicorn is
        more = {
            "MLFLOW_TRACKING_URI": uri,
            "OMP_NUM_THREADS": str(THREADS // workers),
            "PATH": path,
        }
        started.append(
            subprocess.Popen(
                [*map(str, command)],
                env={**os.environ, **more},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
    cli.start_ray(num_cpus=2 * THREADS)
    serve.start(http_options={"port": of_ray})
    with package.at(uri):
        for replicas in (1, THREADS):
            name = f"ray_serve_{replicas}" if replicas > 1 else "ray_serve"
            urls[name] = f"http://127.0.0.1:{of_ray}/{name}"
            built = build(
                Options(
                    model=MODEL, num_replicas=replicas, num_cpus=THREADS // replicas
                )
            )
            serve.run(built, name=name, route_prefix=f"/{name}")
    try:
        for url in urls.values():
            wait(f"{url}/ping")
        yield urls
    finally:
        serve.shutdown()
        for process in started:
            os.killpg(process.pid, 15)
            process.wait()


def wait(url: str, seconds: float = 120) -> None:
    """Until somebody answers there."""
    end = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url).close()
            return
        except urllib.error.URLError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def http(runs: int = 5, clients: Iterable[int] = CLIENTS) -> Iterator[Row]:
    """`runs` of REQUESTS_PER_RUN requests to each server in turn, by each number of clients."""
    rows = [
        request("qgs", HISTORY, "whole", number) for number in range(REQUESTS_PER_RUN)
    ]
    bodies = [json.dumps({"dataframe_records": [row]}).encode() for row in rows]

    def ask(url: str, body: bytes) -> float:
        """Seconds until the answer."""
        asked = urllib.request.Request(
            f"{url}/invocations", body, {"Content-Type": "application/json"}
        )
        begin = time.perf_counter()
        with urllib.request.urlopen(asked) as answer:
            answer.read()
        return time.perf_counter() - begin

    with (
        tempfile.TemporaryDirectory(prefix="trieline-benchmark-") as folder,
        servers(make(folder)) as urls,
    ):
        for count in clients:
            params: Row = {
                "model": "qgs",
                "history": HISTORY,
                "candidates": CANDIDATES,
                "clients": count,
            }
            seconds: dict[str, list[float]] = {name: [] for name in urls}
            whole = dict.fromkeys(urls, 0.0)
            with ThreadPoolExecutor(count) as pool:
                for run in range(runs + 1):
                    for name, url in urls.items():
                        begin = time.perf_counter()
                        times = list(pool.map(ask, [url] * len(bodies), bodies))
                        if run:  # the first one warms up
                            whole[name] += time.perf_counter() - begin
                            seconds[name] += times
            for name, times in seconds.items():
                p99 = round(float(np.percentile(times, 99)), 5)
                per_s = round(len(times) / whole[name], 2)
                yield row("http", name, params, times, 1, p99_s=p99, items_per_s=per_s)
