"""Command-line entry points, one per verb: `python -m jobs.NAME --help`."""

import os

if not os.environ.get("RAY_ADDRESS"):  # a local Ray is for its user alone; read when ray is imported
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray's switch for laptops: a node's address is then 127.0.0.1, where all that it starts listens, its metrics too.
    # `ray.init(_node_ip_address="127.0.0.1")` is no way: Ray makes the machine's own address of it.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Threads that wait sleep: beside other processes, spinning ones take many times the time of the work itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
