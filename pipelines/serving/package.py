"""Logs a trained model to MLflow with a signature, loadable anywhere with `mlflow.pyfunc.load_model`, no pickle.

Retrieval models rank the catalogue after a history, the others the candidates of a request.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType, Array, Map, Object, Property
from pyarrow import fs

import models
from models import checkpoint, registry
from models.actions.new_items import columns_of, name_of
from models.inputs import Inputs
from models.own_features import NUMBER, OwnFeatures
from models.tables import MANIFEST, UserError, has_manifest, join, open_uri, read_manifest
from pipelines.tracking import RunRef

STRINGS, NUMBERS, VECTORS = Array(DataType.string), Array(DataType.double), Array(Array(DataType.double))
TIMES = Array(DataType.long)
IDS = Array(AnyType())  # of items: strings, or integers for the strings of their digits (models/item_ids.py)
RANKED = Schema([ColSpec(STRINGS, "item_id"), ColSpec(NUMBERS, "score")])  # best first
# whose state the request goes on from, and the behaviours that come before the first one of its history
OF_STATE = (ColSpec(DataType.string, "user_id", required=False), ColSpec(DataType.long, "history_from", required=False))
STATES = {"state_mb": 1024}  # MB of users' states that a process keeps
BY_LABEL = ParamSchema([ParamSpec("label", DataType.string, "")])  # whose chance is the score; "" is the model's first


@dataclass(frozen=True)
class Served:
    """How the models of a family are served."""

    signature: ModelSignature
    """What they take and give, viewer-side categories aside."""
    code: str
    """The file in this folder that MLflow runs."""
    tables: tuple[str, ...] = ()
    """Tables that the code reads beside the items and the manifest of the sequences."""
    beside: tuple[str, ...] = ()
    """Tables of the folder beside them, where the model needs one."""
    beside_if_there: tuple[str, ...] = ()
    """Further ones, that not every such folder has."""
    encodes: bool = False
    """Whether it encodes texts that training has not seen, by the encoder of the folder's."""
    requirements: tuple[str, ...] = ()
    """Packages that the code may need beside those of all."""
    labels: str = "labels"
    """What the manifest of the sequences calls the model's labels."""
    grades: bool = False
    """Whether the metadata says how actions are graded from 0 to 1."""
    new_items: bool = False
    """Whether requests may bring items that are not in the catalogue."""
    settings: dict[str, Any] | None = None
    """What `model_config` may set when the model is loaded, with its defaults; None: nothing."""


def write_encoder(tables: str, text: str, folder: Path) -> None:
    """The encoder of the texts, so that a served model encodes what training has not seen; a warning where there is
    none."""
    from pipelines.data.sids.texts import save_encoder  # it imports Ray, so only now

    try:
        save_encoder(tables, text, folder / "encoder")
    except UserError as error:
        warnings.warn(
            f"the model comes without its text encoder, so what training has not seen has no text: {error}",
            stacklevel=2,
        )


SERVED = {
    "retrieval": Served(
        ModelSignature(
            inputs=Schema(
                [
                    ColSpec(IDS, "history"),  # item ids, oldest first
                    ColSpec(DataType.string, "user_id", required=False),
                ]
            ),
            # how many entries of the history are not in the catalogue; with no other the ranking is empty
            outputs=Schema([*RANKED.inputs, ColSpec(DataType.long, "unknown_items")]),
            params=ParamSchema([ParamSpec("k", DataType.long, 10)]),
        ),
        "served_model.py",
        beside=("sids", "trie"),
    ),
    "search": Served(
        ModelSignature(
            inputs=Schema(
                [
                    ColSpec(IDS, "candidates"),  # item ids of what the search found
                    ColSpec(IDS, "history"),  # items engaged with, oldest first
                    ColSpec(DataType.string, "query", required=False),
                    ColSpec(DataType.long, "timestamp_ms", required=False),  # of the request: hour and weekday
                    ColSpec(VECTORS, "features", required=False),  # of each candidate
                    ColSpec(STRINGS, "history_query", required=False),  # the query of each behaviour, "" for none
                    ColSpec(TIMES, "history_time_ms", required=False),
                    ColSpec(VECTORS, "history_features", required=False),
                    *OF_STATE,
                ]
            ),
            outputs=RANKED,
            params=BY_LABEL,
        ),
        "served_ranker.py",
        settings={**STATES, "counts": ""},  # the table of jobs.prepare --counts_as_of
        tables=("queries",),
        beside=("items", "queries", "pairs"),
        beside_if_there=("tokens",),
        encodes=True,
        requirements=("scikit-learn",),
    ),
    "actions": Served(
        ModelSignature(
            inputs=Schema(
                [
                    ColSpec(IDS, "candidates"),
                    ColSpec(IDS, "history"),  # items that were shown, oldest first
                    ColSpec(VECTORS, "history_actions"),  # what the user did with each, graded from 0 to 1
                    # of the request; events from then on are unseen, by their history_time_ms
                    ColSpec(DataType.long, "timestamp_ms", required=False),
                    ColSpec(VECTORS, "features", required=False),
                    ColSpec(TIMES, "history_time_ms", required=False),
                    *OF_STATE,
                ]
            ),
            outputs=RANKED,
            params=BY_LABEL,
        ),
        "served_ranker.py",
        settings=STATES,
        beside=("items",),
        encodes=True,
        requirements=("scikit-learn",),
        labels="tasks",
        grades=True,
        new_items=True,
    ),
}
"""By family."""

REQUIREMENTS = ["mlflow", "torch", "numpy", "pandas", "pyarrow", "safetensors", "transformers"]


OWN = {"numbers": Map(NUMBERS), "categories": Map(STRINGS)}
"""Columns of own features: of each name a value per candidate, and with `history_` before it per behaviour."""


def signature(
    family: str, viewers: Iterable[str] = (), own: bool = False, content: Iterable[str] = (), labels: bool = False
) -> ModelSignature:
    """That of the family, with the viewer-side categories that the model reads: of the request, and of each event of
    the history, where "" is for none. own: whether it reads features of the log's own. content: columns of items that
    requests may tell of new ones. labels: whether it reads labels of behaviours by name."""
    base = SERVED[family].signature
    columns = [
        column
        for name in viewers
        for column in (
            ColSpec(DataType.string, f"viewer_{name}", required=False),
            ColSpec(STRINGS, f"history_viewer_{name}", required=False),
        )
    ]
    for name, kind in OWN.items() if own else ():
        columns += [ColSpec(kind, f"{of}{name}", required=False) for of in ("", "history_")]
    if labels:  # of any type, as MLflow takes no true for a double
        columns.append(ColSpec(Map(Array(AnyType())), "history_labels", required=False))
    if SERVED[family].new_items:
        # numbers of any type, as MLflow takes no 3 for a double
        kinds = {name_of(name): AnyType() if name.startswith(NUMBER) else DataType.string for name in content}
        told = [Property(name, kind, required=False) for name, kind in kinds.items()]
        posts = Array(Object([Property("item_id", DataType.string), *told]))
        columns.append(ColSpec(posts, "new_items", required=False))
    return ModelSignature(Schema([*base.inputs.inputs, *columns]), base.outputs, base.params)


def log_model(run: RunRef, uri: str, inputs: Inputs) -> str:
    """Logs the checkpoint at `uri` with the tables that it needs to the run; the model's MLflow URI."""
    trained = checkpoint.read(uri)
    entry = registry.find(trained.name)
    served = SERVED[entry.family.name]
    info = read_manifest(inputs.sequences, "sequences").info
    names = {name: name for name in ("labels", "features", "actions", "viewers")}
    names["labels"] = served.labels
    about: dict[str, Any] = {name: list(info[key]) for name, key in names.items() if key in info}
    if labels := trained.model.get("token_labels"):
        about["token_labels"] = labels
    own = OwnFeatures.of(info)
    for kind in OWN if own.names else ():
        about[kind] = [each.name[len(NUMBER) :] for each in getattr(own, kind)]
    text = read_manifest(join(inputs.text, "items"), "embeddings") if served.new_items and inputs.text else None
    content = columns_of(read_manifest(join(inputs.tables, "items"), "items"), text) if served.new_items else []
    if served.grades:
        about["inputs"] = info.get("definitions", {}).get("inputs", {})
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "data"
        write_bundle(bundle, uri, inputs)
        with at(run.uri), mlflow.start_run(run_id=run.run_id), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # asks for an input example, which it would run
            logged = mlflow.pyfunc.log_model(
                name="model",
                python_model=str(Path(__file__).with_name(served.code)),
                code_paths=[str(Path(models.__path__[0]))],
                artifacts={"data": str(bundle)},
                signature=signature(
                    entry.family.name, info.get("viewers", ()), bool(own.names), content, "token_labels" in about
                ),
                metadata=about,
                model_config=served.settings,
                pip_requirements=[*REQUIREMENTS, *served.requirements],
            )
    return str(logged.model_uri)


def write_bundle(bundle: Path, uri: str, inputs: Inputs) -> None:
    """The checkpoint at `uri` and what the served model reads beside it, in a new folder."""
    entry = registry.find(checkpoint.read(uri).name)
    served = SERVED[entry.family.name]
    with checkpoint.local(uri) as local:
        for name in (checkpoint.WEIGHTS, checkpoint.CONFIG):
            (bundle / "checkpoint").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(local / name, bundle / "checkpoint" / name)
    fetch(inputs.sequences, bundle / "tables/sequences", manifest_only=True)
    for name in ("items", *served.tables):
        fetch(join(inputs.tables, name), bundle / "tables" / name)
    for option in entry.reads:
        if not (folder := inputs.given().get(option)):
            continue
        found = [name for name in served.beside_if_there if has_manifest(join(folder, name))]
        for name in (*served.beside, *found):
            fetch(join(folder, name), bundle / option / name)
        if served.encodes:
            write_encoder(inputs.tables, folder, bundle)


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
