"""Test where a job's Ray listens, and the checks of RAY_ADDRESS before joining."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from core.errors import UserError
from pipelines import start

PRINT_LISTENING_SOCKETS = """
import ipaddress, json, psutil
from pipelines import start

start.set_ray_defaults()
import ray

start.start_ray(num_cpus=2)
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
def test_a_local_ray_listens_only_on_loopback():
    process = subprocess.run(
        [sys.executable, "-c", PRINT_LISTENING_SOCKETS], capture_output=True, text=True
    )

    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("SOCKETS")]
    sockets = json.loads(line.removeprefix("SOCKETS"))
    assert len(sockets) > 3  # the servers of the node and of its workers
    assert [where for is_loopback, *where in sockets if not is_loopback] == []


def test_joining_an_address_without_a_server_is_refused():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(UserError, match=f"RAY_ADDRESS={address} .*refused"):
        start.join_cluster(address)
    with pytest.raises(UserError, match="RAY_ADDRESS=head"):
        start.join_cluster("head")
