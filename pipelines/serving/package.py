"""Logs a trained model to MLflow with a signature, loadable anywhere with `mlflow.pyfunc.load_model`, no pickle.

Retrieval models rank the catalogue after a history, the others the candidates of a request.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
from mlflow.entities import LoggedModelOutput
from mlflow.models import Model as MlflowModel
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType, Array, Map, Object, Property
from pyarrow import fs

import models
from models import registry
from models.loaded_model import select_inputs
from models.model import Model
from models.requests import Columns
from models.retrieval.requests import EVERY
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import (
    MANIFEST,
    UserError,
    has_manifest,
    join,
    open_uri,
    read_manifest,
)
from pipelines.tracking import RunRef, connect

STRINGS, NUMBERS, ANY = Array(DataType.string), Array(DataType.double), AnyType()
TYPES: dict[str, Any] = {
    "ids": Array(
        ANY
    ),  # strings, or integers for the strings of their digits (models/item_ids.py)
    "string": DataType.string,
    "strings": STRINGS,
    "long": DataType.long,
    "longs": Array(DataType.long),
    "id": ANY,
    "number": ANY,
    "numbers": NUMBERS,
    "vectors": Array(NUMBERS),  # MLflow takes no 3 for a double
    "own_numbers": Map(NUMBERS),
    "own_categories": Map(STRINGS),
}
"""Of columns of requests and answers."""

CATALOGUE_OPTIONS = [
    ParamSpec("k", DataType.long, 10),
    ParamSpec("unseen", DataType.boolean, False),
    ParamSpec("allowed", DataType.string, EVERY, (-1,)),
]
"""Options of a call to a model that ranks the catalogue."""

CANDIDATE_OPTIONS = [ParamSpec("label", DataType.string, "")]  # "": the first label
"""Options of a call to a model that ranks candidates."""

REQUIREMENTS = [
    "mlflow",
    "torch",
    "numpy",
    "pandas",
    "cachetools",
    "pyarrow",
    "safetensors",
    "transformers",
]


def schema(columns: Columns, needed: Columns) -> Schema:
    """Of columns of requests or answers."""

    def type_of(kind: Any) -> Any:
        if isinstance(kind, str):
            return TYPES[kind]
        return Array(
            Object(
                [
                    Property(key, TYPES[of], required=key == "item_id")
                    for key, of in kind.items()
                ]
            )
        )

    return Schema(
        [
            ColSpec(type_of(kind), name, required=name in needed)
            for name, kind in columns.items()
        ]
    )


def signature(model_class: type[Model], takes: Columns) -> ModelSignature:
    """Return the columns that a served model takes and gives; `takes` may be left out."""
    needs, gives = model_class.requests_class.needs, model_class.requests_class.gives
    options = (
        CATALOGUE_OPTIONS if model_class.ranks == "catalogue" else CANDIDATE_OPTIONS
    )
    params = ParamSchema(options)
    return ModelSignature(
        schema({**needs, **takes}, needs), schema(gives, gives), params
    )


def write_encoder(inputs: Inputs, folder: Path) -> None:
    """The encoder of the texts, so that a served model encodes what training has not seen; a warning where there is
    none."""
    from pipelines.data.sids.texts import save_encoder  # it imports Ray, so only now

    try:
        save_encoder(inputs.tables, str(inputs.text), folder / "encoder")
    except UserError as error:
        warnings.warn(
            f"the model comes without its text encoder, so what training has not seen has no text: {error}",
            stacklevel=2,
        )


def log_model(run: RunRef, uri: str, inputs: Inputs) -> str:
    """Logs the checkpoint at `uri` with the tables that it needs to the run; the model's MLflow URI."""
    trained = checkpoint.read(uri)
    model_class = registry.find(trained.name)
    requests, info = (
        model_class.requests_class,
        read_manifest(inputs.sequences, "sequences").info,
    )
    client = connect(run.uri)
    found = client.get_run(run.run_id)
    with tempfile.TemporaryDirectory() as folder:
        bundle, place = Path(folder) / "data", Path(folder) / "model"
        write_bundle(bundle, uri, inputs)
        # Step by step: `mlflow.pyfunc.log_model` would read the history of every metric, each by a request.
        made = client.create_logged_model(
            found.info.experiment_id, "model", run.run_id, params=found.data.params
        )
        about = MlflowModel(
            made.artifact_location,
            run.run_id,
            model_uuid=made.model_id,
            model_id=made.model_id,
        )
        with at(run.uri), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # asks for an input example, which it would run
            mlflow.pyfunc.save_model(
                place,
                mlflow_model=about,
                python_model=str(Path(__file__).with_name("served_model.py")),
                code_paths=[str(write_code(Path(folder)))],
                artifacts={"data": str(bundle)},
                signature=signature(model_class, requests.columns(info, inputs)),
                metadata=model_class.describe_requests(info),
                model_config=dict(requests.settings),
                pip_requirements=[
                    *REQUIREMENTS,
                    *["scikit-learn"] * bool(inputs.text),
                    *model_class.requirements,
                ],
            )
        client.log_outputs(run.run_id, [LoggedModelOutput(made.model_id, 0)])
        client.log_model_artifacts(made.model_id, str(place))
        client.finalize_logged_model(made.model_id, "READY")
    return str(made.model_uri)


def write_code(folder: Path) -> Path:
    """`models/` as one archive, which a served model imports from: a server takes seconds for each file."""
    package = Path(models.__path__[0])
    with zipfile.ZipFile(folder / "models.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(package.rglob("*.*")):
            if file.suffix in (".py", ".cpp"):
                archive.write(file, file.relative_to(package.parent))
    return folder / "models.zip"


def write_bundle(bundle: Path, uri: str, inputs: Inputs) -> None:
    """The checkpoint at `uri` and what the served model reads beside it, in a new folder."""
    name = checkpoint.read(uri).name
    inputs = select_inputs(name, inputs)
    tables = registry.find(name).catalogue_tables
    with checkpoint.local(uri) as local:
        for file in (checkpoint.WEIGHTS, checkpoint.CONFIG):
            (bundle / "checkpoint").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(local / file, bundle / "checkpoint" / file)
    fetch(inputs.sequences, bundle / "tables/sequences", manifest_only=True)
    for option, folder in inputs.given().items():
        for table in (*tables[option], "tokens"):
            if table != "sequences" and has_manifest(join(folder, table)):
                fetch(join(folder, table), bundle / option / table)
    if inputs.text:
        write_encoder(inputs, bundle)


def fetch(uri: str, target: Path, manifest_only: bool = False) -> None:
    """Copies a table to a local folder."""
    filesystem, path = open_uri(uri)
    target.mkdir(parents=True)
    local = fs.LocalFileSystem()
    source, place = (
        (f"{path}/{MANIFEST}", str(target / MANIFEST))
        if manifest_only
        else (path, str(target))
    )
    fs.copy_files(
        source, place, source_filesystem=filesystem, destination_filesystem=local
    )


@contextmanager
def at(uri: str) -> Iterator[None]:
    """MLflow's global functions at this store, and as before afterwards; what sets it sets the environment too."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]
