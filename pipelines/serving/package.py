"""Log a trained model to MLflow, to be loaded with `mlflow.pyfunc.load_model`.

    model_uri = log_model(run, "runs/sasrec/best", Inputs(tables))

The logged model contains the code of `models/`, the checkpoint, the tables that the
model needs and a signature of its params, but no pickle.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
from mlflow.entities import LoggedModelOutput
from mlflow.models import Model as MlflowModel
from mlflow.models import infer_signature
from pyarrow import fs

import core
import models
from core.errors import UserError
from core.files import join, open_uri
from core.schemas import Inputs, RunRef, SequencesInfo
from core.tables import MANIFEST, TableInfo, open_table, read_manifest, read_parquet
from models import own_code, registry
from models.model import Model
from models.text.text_encoder import MODEL
from models.training import checkpoint
from pipelines.tracking import connect

REQUIREMENTS = [
    "mlflow",
    "torch",
    "numpy",
    "pandas",
    "cachetools",
    "pyarrow",
    "pydantic",
    "safetensors",
    "transformers",
]
"""Packages that every served model needs."""

PACKAGE, ARCHIVE = "trieline_served", "trieline.zip"
"""Name under which the code of a served model is imported, and its file."""

LOADER = f'''"""Load a served model from the archive of its code."""
import sys
from pathlib import Path

import mlflow

for name in list(sys.modules):  # of an earlier version
    if name.partition(".")[0] == "{PACKAGE}":
        del sys.modules[name]
sys.path.insert(0, str(Path(__file__).with_name("code") / "{ARCHIVE}"))
from {PACKAGE}.served_model import ServedModel

del sys.path[0]
mlflow.models.set_model(ServedModel())
'''
"""File that MLflow runs."""


def log_model(run: RunRef, uri: str, inputs: Inputs) -> str:
    """Log a checkpoint to a run, with the tables that its model needs.

    Args:
        run: MLflow run of the training.
        uri: Folder of the checkpoint.
        inputs: Folders of the tables, semantic IDs and text embeddings.

    Returns:
        The model's URI in MLflow.
    """
    model_class = registry.find(checkpoint.read(uri).name)
    requests_class = model_class.requests_class
    info = open_table(inputs.sequences, SequencesInfo).info
    client = connect(run.uri)
    training = client.get_run(run.run_id)
    with tempfile.TemporaryDirectory() as folder:
        bundle, target = Path(folder) / "data", Path(folder) / "model"
        write_bundle(bundle, uri, inputs)
        loader = write_code(Path(folder))
        # `mlflow.pyfunc.log_model` would request the history of each metric separately
        logged = client.create_logged_model(
            training.info.experiment_id,
            "model",
            run.run_id,
            params=training.data.params,
        )
        model = MlflowModel(
            logged.artifact_location,
            run.run_id,
            model_uuid=logged.model_id,
            model_id=logged.model_id,
        )
        with use_store(run.uri), warnings.catch_warnings():
            # MLflow warns about a missing input example, which it would run
            warnings.simplefilter("ignore")
            mlflow.pyfunc.save_model(
                target,
                mlflow_model=model,
                python_model=str(loader),
                code_paths=[str(loader.with_name("code") / ARCHIVE)],
                artifacts={"data": str(bundle)},
                signature=infer_signature(params=dict(requests_class.options_class())),
                metadata=model_class.describe_requests(info),
                model_config=dict(requests_class.settings_class()),
                pip_requirements=pin_requirements(model_class, bundle),
            )
        client.log_outputs(run.run_id, [LoggedModelOutput(logged.model_id, 0)])
        client.log_model_artifacts(logged.model_id, str(target))
        client.finalize_logged_model(logged.model_id, "READY")
    return str(logged.model_uri)


def pin_requirements(model_class: type[Model], bundle: Path) -> list[str]:
    """Return the packages that a served model needs, with their installed versions."""
    requirements = [*REQUIREMENTS, *model_class.requirements]
    if (bundle / "encoder").exists():
        is_transformer = (bundle / "encoder" / MODEL).exists()
        requirements.append(
            "sentence-transformers" if is_transformer else "scikit-learn"
        )
    # without the build of PyTorch, such as +cpu, which PyPI does not have
    return [
        f"{package}=={version(package).partition('+')[0]}" for package in requirements
    ]


def write_code(folder: Path) -> Path:
    """Write the archive of a served model's code, and the file that loads it.

    A tracking server takes seconds to store each file, so the code is one file. It is
    imported under the name `PACKAGE`, so that other packages called `core` or `models`
    stay as they are, and a process can load versions with different code.

    Returns:
        The path of the file that loads the code, with the archive beside it in `code`.
    """
    (folder / "code").mkdir()
    path = folder / "code" / ARCHIVE
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        served = Path(__file__).with_name("served_model.py")
        source = own_code.move_imports(served.read_text(), f"{PACKAGE}.")
        archive.writestr(f"{PACKAGE}/__init__.py", "")
        archive.writestr(f"{PACKAGE}/{served.name}", source)
        for package in (core, models):
            root = Path(package.__path__[0])
            for file in sorted(root.rglob("*.*")):
                if file.suffix in (".py", ".cpp"):
                    source = own_code.move_imports(file.read_text(), f"{PACKAGE}.")
                    name = f"{PACKAGE}/{file.relative_to(root.parent)}"
                    archive.writestr(name, source)
    loader = folder / "load_model.py"
    loader.write_text(LOADER)
    return loader


def write_bundle(bundle: Path, uri: str, inputs: Inputs) -> None:
    """Write the checkpoint, tables and text encoder of a served model to a folder.

    Args:
        bundle: Path of the new folder.
        uri: Folder of the checkpoint.
        inputs: Folders of the tables, semantic IDs and text embeddings.
    """
    name = checkpoint.read(uri).name
    model_class = registry.find(name)
    inputs = inputs.select(name, model_class.extra_inputs)
    tables = model_class.catalogue_class.tables
    target = bundle / "checkpoint"
    target.mkdir(parents=True)
    with checkpoint.local(uri) as local:
        for file in (checkpoint.WEIGHTS, checkpoint.CONFIG):
            shutil.copyfile(local / file, target / file)
    for option, folder in inputs.folders().items():
        for table in (*tables[option], "tokens"):
            table_uri = join(folder, table)
            if read_manifest(table_uri):
                target = bundle / option / table
                copy_table(table_uri, target, manifest_only=table == "sequences")
    if inputs.text:
        write_encoder(inputs, bundle)


def copy_table(uri: str, target: Path, *, manifest_only: bool) -> None:
    """Copy a table, or only its manifest, to a new local folder."""
    filesystem, source = open_uri(uri)
    target.mkdir(parents=True)
    names = [MANIFEST]
    if not manifest_only:
        for part_uri in open_table(uri, TableInfo).part_uris():
            read_parquet(part_uri, [])  # raises if the part is damaged
            names.append(part_uri.rpartition("/")[2])
    for name in names:
        fs.copy_files(f"{source}/{name}", target / name, source_filesystem=filesystem)


def write_encoder(inputs: Inputs, bundle: Path) -> None:
    """Write the text encoder, with which a served model encodes new texts.

    A warning is issued if the tables have no encoder.
    """
    from pipelines.encode.texts import save_encoder  # imports Ray

    try:
        save_encoder(inputs.tables, str(inputs.text), bundle / "encoder")
    except UserError as error:
        warnings.warn(
            "the model is saved without its text encoder, so texts that are not in the "
            f"training data cannot be encoded: {error}",
            stacklevel=2,
        )


@contextmanager
def use_store(uri: str) -> Iterator[None]:
    """Make MLflow's global functions use a store while the block runs.

    MLflow also sets MLFLOW_TRACKING_URI, which is restored afterwards.
    """
    previous_uri = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(previous_uri)  # type: ignore[arg-type]
