"""Test the files of the cluster: Ray accepts them, and jobs parse their commands."""

from __future__ import annotations

import importlib
import re
import shlex
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from ray._private.runtime_env.packaging import create_package
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv

from jobs import cli

ROOT = Path(__file__).parents[2]
IN_IMAGE = "/home/ray/trieline"


def load_yaml(name: str | Path) -> dict:
    """Load a YAML file of the checkout."""
    return yaml.safe_load((ROOT / name).read_text())


def parse_command(command: str) -> object:
    """Parse `python -m jobs.NAME ...` as the job does.

    Paths in the image are replaced by paths in the checkout.
    """
    python, flag, module, *argv = shlex.split(command.replace(IN_IMAGE, str(ROOT)))
    assert (python, flag) == ("python", "-m")
    job = importlib.import_module(module)
    return cli.config_from_words(job, argv)


def test_ray_accepts_the_cluster_config():
    config = prepare_config(load_yaml("cluster.yaml"))
    validate_config(config)
    # The launcher's default commands would install packages.
    assert config["head_setup_commands"] == config["worker_setup_commands"] == []


def test_cluster_nodes_run_the_tested_ray():
    tested = version("ray")
    assert f"ray=={tested}" in (ROOT / "constraints.txt").read_text()
    assert (
        f"FROM rayproject/ray:{tested}-py311"
        in (ROOT / "deploy/Dockerfile").read_text()
    )


def test_the_image_contains_every_package_of_the_jobs():
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    copied = re.findall(r"^COPY --chown=ray (\w+) trieline/(\w+)$", dockerfile, re.M)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {name for name, _ in copied} == packages - {"papers", "benchmarks"}
    assert all(source == target for source, target in copied)


def test_cluster_starts_with_authentication():
    config = load_yaml("cluster.yaml")
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "RAY_AUTH_MODE=token ray start" in config[key][-1]
    assert config["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"


def test_ray_accepts_the_runtime_env():
    content = load_yaml("runtime_env.yaml")
    assert RuntimeEnv(**content)["env_vars"] == content["env_vars"]


def test_the_uploaded_working_dir_has_all_code_and_hardly_anything_else(tmp_path):
    package = tmp_path / "package.zip"

    create_package(str(ROOT), package, include_gitignore=True)

    names = set(zipfile.ZipFile(package).namelist())
    code = {
        str(p.relative_to(ROOT))
        for folder in ("core", "jobs", "models", "pipelines", "tuning")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".py", ".yaml", ".cpp")
    }
    assert code <= names
    # An entry of the archive stores its name twice, and about 150 bytes.
    code_size = sum((ROOT / name).stat().st_size + 2 * len(name) + 150 for name in code)
    assert package.stat().st_size < code_size + (16 << 10)
    top_folders = {Path(name).parts[0] for name in names}
    assert not top_folders & {".git", ".venv", "data", "runs", "tests", "stores"}


def test_the_command_in_the_cluster_config_is_valid():
    text = re.sub(r"\\\n# +", "", (ROOT / "cluster.yaml").read_text())
    command = re.search(r"python -m jobs\..*", text)
    assert command
    assert parse_command(command.group().replace("NAME", "amazon2023"))


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").glob("rayjob-*.yaml")))
def test_the_commands_of_kubernetes_jobs_are_valid(path, monkeypatch):
    resources = list(yaml.safe_load_all(path.read_text()))
    (job,) = [r for r in resources if r["kind"] == "RayJob"]
    # as runtimeEnvYAML sets it for the jobs that track
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert parse_command(job["spec"]["entrypoint"])
