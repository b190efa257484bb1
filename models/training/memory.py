"""Peak memory of this process."""

from __future__ import annotations

import resource
from pathlib import Path


def resident_peak_mb() -> float:
    """Return the peak resident memory of this process in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux: getrusage includes the parent process's peak
        lines = status.read_text().splitlines()
        (peak_kb,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
        return int(peak_kb) / 2**10
    # macOS, which counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
