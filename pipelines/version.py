"""Name the code that runs: its release and commit, or the package that Ray unpacked."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RAY_PACKAGE = re.compile(r"_ray_pkg_[0-9a-f]+")
"""Pattern of the name of the folder into which Ray unpacks the code of a job."""


@cache
def code_version() -> str:
    """Return the package version and an identifier of the running code.

    The identifier is the package that Ray unpacked, otherwise the git commit.
    """
    try:
        release = version("trieline")
    except PackageNotFoundError:
        release = "unknown"
    commit = run_git("describe", "--always", "--dirty") or ""
    packages = [name for name in Path(__file__).parts if RAY_PACKAGE.fullmatch(name)]
    if packages:
        return f"{release} {packages[-1]}"
    return f"{release} {commit}".rstrip()


def submission_id() -> str:
    """Return the Ray submission id of this job, or an empty string if not submitted.

    Ray has no public function for the id. It passes the settings of a submitted job to
    the driver in an environment variable.
    """
    settings = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    return str(settings.get("metadata", {}).get("job_submission_id", ""))


def run_git(*args: str) -> str | None:
    """Run git in the checkout of this code and return its output.

    Returns:
        The output without surrounding white space; None without git or a checkout, such
        as in a container image, or if git fails.
    """
    try:
        result = subprocess.run(
            ["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None
