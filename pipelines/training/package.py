"""Logs a trained model to MLflow with a signature, loadable anywhere with `mlflow.pyfunc.load_model`, no pickle."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import Array
from pyarrow import fs

import models
from models import checkpoint
from models.tables import MANIFEST, join, open_uri
from pipelines.tracking import RunRef

SIGNATURE = ModelSignature(
    inputs=Schema(
        [
            ColSpec(Array(DataType.string), "history"),  # item ids, oldest first
            ColSpec(DataType.string, "user_id", required=False),
        ]
    ),
    outputs=Schema([ColSpec(Array(DataType.string), "item_id"), ColSpec(Array(DataType.double), "score")]),
    params=ParamSchema([ParamSpec("k", DataType.long, 10)]),
)

REQUIREMENTS = ["mlflow", "torch", "numpy", "pandas", "pyarrow", "safetensors", "transformers"]


def log_model(run: RunRef, uri: str, tables: str, sids: str | None) -> str:
    """Logs the checkpoint at `uri` with the tables that it needs to the run; the model's MLflow URI."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "data"
        with checkpoint.local(uri) as local:
            for name in (checkpoint.WEIGHTS, checkpoint.CONFIG):
                (bundle / "checkpoint").mkdir(parents=True, exist_ok=True)
                shutil.copyfile(local / name, bundle / "checkpoint" / name)
        fetch(join(tables, "items"), bundle / "tables/items")
        fetch(join(tables, "sequences"), bundle / "tables/sequences", manifest_only=True)
        if sids:
            fetch(join(sids, "sids"), bundle / "sids/sids")
            fetch(join(sids, "trie"), bundle / "sids/trie")
        with at(run.uri), mlflow.start_run(run_id=run.run_id), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # asks for an input example, which it would run
            logged = mlflow.pyfunc.log_model(
                name="model",
                python_model=str(Path(__file__).with_name("served_model.py")),
                code_paths=[str(Path(models.__path__[0]))],
                artifacts={"data": str(bundle)},
                signature=SIGNATURE,
                pip_requirements=REQUIREMENTS,
            )
    return str(logged.model_uri)


def fetch(uri: str, target: Path, manifest_only: bool = False) -> None:
    """Copies a table to a local folder."""
    filesystem, path = open_uri(uri)
    target.mkdir(parents=True)
    local = fs.LocalFileSystem()
    source, place = (f"{path}/{MANIFEST}", str(target / MANIFEST)) if manifest_only else (path, str(target))
    fs.copy_files(source, place, source_filesystem=filesystem, destination_filesystem=local)


@contextmanager
def at(uri: str) -> Iterator[None]:
    """MLflow's global functions at this store, and as before afterwards; what sets it sets the environment too."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]
