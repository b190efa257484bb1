"""Test where a job's Ray listens, and the checks of RAY_ADDRESS before joining."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from jobs import cli
from models.storage.tables import UserError
from pipelines import cluster
from pipelines.data.engine import Engine, RayDataConfig
from pipelines.evaluation.checks import Workers
from pipelines.ray_inside import shorten_raylet_errors
from pipelines.training.config import RayOptions
from pipelines.training.run import check_cluster

PRINT_LISTENING_SOCKETS = """
import ipaddress, json, psutil
from jobs import cli

cli.set_ray_defaults()
import ray

cli.start_ray(num_cpus=2)
where = ray.remote(lambda: ray.util.get_node_ip_address())
ray.get([where.remote() for _ in range(4)])
driver = psutil.Process()
listening = []
for process in [driver, *driver.children(recursive=True)]:
    try:
        sockets = process.net_connections("inet")
    except psutil.Error:  # the process has ended
        continue
    for connection in sockets:
        if connection.status == psutil.CONN_LISTEN:
            ip, port = connection.laddr.ip, connection.laddr.port
            address = ipaddress.ip_address(ip)
            is_loopback = (getattr(address, "ipv4_mapped", None) or address).is_loopback
            listening.append((is_loopback, ip, port, " ".join(process.cmdline())[:80]))
print("SOCKETS", json.dumps(listening))
"""


@pytest.mark.long
def test_a_local_ray_listens_only_on_loopback() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PRINT_LISTENING_SOCKETS], capture_output=True, text=True
    )

    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("SOCKETS")]
    sockets = json.loads(line.removeprefix("SOCKETS"))
    assert len(sockets) > 3  # the servers of the node and of its workers
    assert [where for is_loopback, *where in sockets if not is_loopback] == []


@pytest.fixture
def server_address() -> Iterator[str]:
    """Listen on a local port; return its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_joining_a_cluster_without_a_token_is_refused(
    server_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError) as raised:
        cli.join_cluster(server_address)
    message = str(raised.value)
    assert f"no token for the Ray cluster at RAY_ADDRESS={server_address}" in message
    assert "ray get-auth-token --generate" in message
    assert "export RAY_AUTH_MODE=token" in message


@pytest.mark.long  # Ray waits for the answer
def test_joining_a_server_that_is_no_ray_cluster_is_refused(
    server_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(
        UserError, match=f"the server at RAY_ADDRESS={server_address} is no Ray cluster"
    ):
        cli.join_cluster(server_address)


def test_joining_an_address_without_a_server_is_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(
        UserError,
        match=f"nothing answers at RAY_ADDRESS=127.0.0.1:{port} .*; start the cluster",
    ):
        cli.join_cluster(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address",
    ["head", "head:", "head:x", "head:70000", "http://head:8265", "a b:6379", ":6379"],
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(
        UserError, match="is no address of a Ray cluster; give HOST:PORT"
    ):
        cli.join_cluster(address)


def start_prepare() -> None:
    """Start Ray as prepare does before its first task."""
    Engine(RayDataConfig(memory_gb=8), start=lambda: None)._start_ray()


@pytest.mark.parametrize(
    ("request_resources", "demand"),
    [
        (
            lambda: check_cluster(RayOptions(), 4, use_gpu=False),
            "4 workers need 4 CPUs, 1 CPU for each on one node",
        ),
        (
            lambda: Workers(device="cpu").needs_gpu(2),
            "1 worker needs 1 CPUs, 1 CPU for each on one node",
        ),
        (
            lambda: Workers(device="cuda").needs_gpu(2),
            "2 workers need 2 GPUs, 1 GPU for each on one node",
        ),
        (
            start_prepare,
            "1 worker needs 1 CPUs, 8 GiB memory, 1 CPU and 8 GiB memory for each on one node",
        ),
    ],
    ids=["training", "evaluation", "evaluation on GPUs", "prepare"],
)
def test_a_job_on_a_cluster_of_zero_nodes_prints_its_demand_once(
    request_resources: Callable[[], object],
    demand: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(cli, "start_ray", lambda: None)
    monkeypatch.setattr(cluster, "alive_nodes", list)
    monkeypatch.setattr(cluster, "has_autoscaler", lambda: True)

    cli.preflight(tables="s3://bucket/tables")
    request_resources()

    (note,) = capsys.readouterr().out.splitlines()
    assert note.startswith(f"note: {demand}; the cluster has 0 ")
    assert note.endswith("so this waits for its autoscaler to start more")


def test_rays_report_of_a_lost_raylet_is_shortened_to_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = ray._private.worker
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    logs = "".join(f"\n    [state-dump] line {number}" for number in range(20))
    lost = f"Raylet is terminated. Last 20 lines of the Raylet logs:{logs}"
    infeasible = (
        "There are tasks with infeasible resource requests that cannot be scheduled."
    )

    shorten_raylet_errors()
    for text in (lost, infeasible):
        worker.print_to_stdstream(
            {"lines": [text], "pid": "raylet", "is_err": False}, ignore_prefix=False
        )

    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("Raylet is terminated.")
