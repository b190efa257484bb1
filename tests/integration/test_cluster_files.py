"""Files of the cluster: Ray accepts them, and the jobs accept the commands in them."""

from __future__ import annotations

import importlib
import re
import shlex
import zipfile
from importlib.metadata import version
from pathlib import Path

import yaml
from ray._private.runtime_env.packaging import create_package
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv

from jobs import cli

ROOT = Path(__file__).parents[2]
IN_IMAGE = "/home/ray/trieline"


def load(name: str | Path) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


def options(command: str) -> object:
    """Parse `python -m jobs.NAME ...` as the job does, with paths of the image replaced
    by those of the checkout.
    """
    python, flag, module, *argv = shlex.split(command.replace(IN_IMAGE, str(ROOT)))
    assert (python, flag) == ("python", "-m")
    job = importlib.import_module(module)
    return cli.config_from_words(job, argv)


def test_cluster_config_is_valid_to_ray() -> None:
    config = prepare_config(load("cluster.yaml"))
    validate_config(config)
    assert (
        config["head_setup_commands"] == config["worker_setup_commands"] == []
    )  # the launcher's own install packages


def test_cluster_nodes_run_the_tested_ray() -> None:
    tested = version("ray")
    assert f"ray=={tested}" in (ROOT / "constraints.txt").read_text()
    assert (
        f"FROM rayproject/ray:{tested}-py311"
        in (ROOT / "deploy/Dockerfile").read_text()
    )


def test_image_holds_every_package() -> None:
    copied = re.findall(
        r"^COPY --chown=ray (\w+) trieline/(\w+)$",
        (ROOT / "deploy/Dockerfile").read_text(),
        re.M,
    )
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {
        "papers",
        "benchmarks",
    }
    assert {name for name, _ in copied} == packages
    assert all(source == target for source, target in copied)


def test_cluster_starts_with_authentication() -> None:
    config = load("cluster.yaml")
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "RAY_AUTH_MODE=token ray start" in config[key][-1]
    assert config["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"


def test_runtime_env_is_valid_to_ray() -> None:
    content = load("runtime_env.yaml")
    assert RuntimeEnv(**content)["env_vars"] == content["env_vars"]


def test_working_dir_is_small_and_whole(tmp_path: Path) -> None:
    package = tmp_path / "package.zip"
    create_package(str(ROOT), package, include_gitignore=True)
    names = set(zipfile.ZipFile(package).namelist())
    code = {
        str(p.relative_to(ROOT))
        for folder in ("jobs", "models", "pipelines", "tuning")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".py", ".yaml", ".cpp")
    }
    assert code <= names
    size = sum((ROOT / name).stat().st_size + 2 * len(name) + 150 for name in code)
    assert package.stat().st_size < size + (
        16 << 10
    )  # the code and hardly anything else
    assert "pipelines/data/prepare.py" in names
    parts = {part for name in names for part in Path(name).parts[:1]}
    assert not parts & {".git", ".venv", "data", "runs", "tests", "stores"}


def test_rayignore_keeps_data_and_stores_out(tmp_path: Path) -> None:
    """A copy of the checkout with data, stores and runs in it."""
    left_out = [
        ".git/objects/x",
        ".venv/lib/x.py",
        "data/raw.csv",
        "runs/a/mlflow.db",
        "stores/x",
        "mlruns/1/x",
        "model.safetensors",
        "state.pt",
        "jobs/__pycache__/x.pyc",
        "some.parquet",
    ]
    kept = ["pipelines/data/prepare.py", "jobs/configs/sources/x.yaml"]
    for name in [*left_out, *kept]:
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tmp_path / "checkout/.rayignore").write_text((ROOT / ".rayignore").read_text())
    create_package(
        str(tmp_path / "checkout"), tmp_path / "package.zip", include_gitignore=True
    )
    names = {
        name
        for name in zipfile.ZipFile(tmp_path / "package.zip").namelist()
        if not name.endswith("/")
    }
    assert names == {*kept, ".rayignore"}


def test_commands_in_cluster_config_are_taken() -> None:
    text = re.sub(r"\\\n# +", "", (ROOT / "cluster.yaml").read_text())
    command = re.search(r"python -m jobs\..*", text)
    assert command
    assert options(command.group().replace("NAME", "amazon2023"))
