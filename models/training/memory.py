"""The memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def resident_peak_mb() -> float:
    """The most memory that this process has held so far."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux a process inherits what getrusage says from the one that started it; not this
        line = next(
            line for line in status.read_text().splitlines() if line.startswith("VmHWM")
        )
        return int(line.split()[1]) / 2**10  # kB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
