"""Where a job's Ray is: a local one listens on loopback alone, and RAY_ADDRESS is
checked before Ray waits for it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from jobs import cli
from models.storage.tables import UserError
from pipelines.ray_inside import shorten_raylet_errors

LISTENING = """
import ipaddress, json, psutil
from jobs import cli

cli.set_ray_defaults()
import ray

cli.start_ray(num_cpus=2)
where = ray.remote(lambda: ray.util.get_node_ip_address())
ray.get([where.remote() for _ in range(4)])
me = psutil.Process()
found = []
for process in [me, *me.children(recursive=True)]:
    try:
        sockets = process.net_connections("inet")
    except psutil.Error:  # it has ended
        continue
    for one in sockets:
        if one.status == psutil.CONN_LISTEN:
            address = ipaddress.ip_address(one.laddr.ip)
            alone = (getattr(address, "ipv4_mapped", None) or address).is_loopback
            found.append((alone, one.laddr.ip, one.laddr.port, " ".join(process.cmdline())[:80]))
print("SOCKETS", json.dumps(found))
"""


@pytest.mark.long
def test_a_local_ray_listens_on_loopback_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTENING], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = next(line for line in done.stdout.splitlines() if line.startswith("SOCKETS"))
    sockets = json.loads(said.removeprefix("SOCKETS"))
    assert len(sockets) > 3  # the servers of the node and of its workers
    assert [where for alone, *where in sockets if not alone] == []


@pytest.fixture
def listening() -> Iterator[str]:
    """An address at which somebody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_cluster_without_a_token_is_one_line(
    listening: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError) as raised:
        cli.join_cluster(listening)
    assert f"no token for the Ray cluster at RAY_ADDRESS={listening}" in str(
        raised.value
    )
    assert "ray get-auth-token --generate" in str(raised.value)
    assert "export RAY_AUTH_MODE=token" in str(raised.value)


@pytest.mark.long  # Ray waits for the answer
def test_what_answers_and_is_no_ray_is_one_line(
    listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(
        UserError, match=f"the server at RAY_ADDRESS={listening} is no Ray cluster"
    ):
        cli.join_cluster(listening)


def test_an_address_at_which_nobody_answers_is_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(
        UserError,
        match=f"nothing answers at RAY_ADDRESS=127.0.0.1:{port} .*; start the cluster",
    ):
        cli.join_cluster(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address",
    ["head", "head:", "head:x", "head:70000", "http://head:8265", "a b:6379", ":6379"],
)
def test_an_address_that_is_none_is_one_line(address: str) -> None:
    with pytest.raises(
        UserError, match="is no address of a Ray cluster; give HOST:PORT"
    ):
        cli.join_cluster(address)


def test_an_error_of_a_lost_node_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = ray._private.worker
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    logs = "".join(f"\n    [state-dump] line {number}" for number in range(20))
    lost = f"Raylet is terminated. Last 20 lines of the Raylet logs:{logs}"
    waits = (
        "There are tasks with infeasible resource requests that cannot be scheduled."
    )

    shorten_raylet_errors()
    for text in (lost, waits):
        worker.print_to_stdstream(
            {"lines": [text], "pid": "raylet", "is_err": False}, ignore_prefix=False
        )

    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("Raylet is terminated.")
