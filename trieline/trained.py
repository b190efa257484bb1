"""Trained models, which rank items and give item vectors.

model = load("runs/sasrec")
model.recommend(["B01", "B02"], k=10)
"""

from __future__ import annotations

import posixpath
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
from torch import Tensor

from core.errors import UserError
from core.schemas import Inputs
from models.loaded_model import LoadedModel
from pipelines import tracking
from pipelines.evaluation.nearest import find_nearest
from pipelines.serving.package import write_encoder
from pipelines.serving.served_model import ServedModel
from pipelines.training.record import find_checkpoint, read_record

RUN_ID = re.compile("[0-9a-f]{32}")
"""Pattern of the ids of MLflow runs."""


class TrainedModel:
    """A trained model, which answers as the served model does.

    Args:
        uri: Folder of the checkpoint.
        inputs: Folders of the tables.
        device: Device of the model.
        trust_code: Whether to run code that the checkpoint contains.
    """

    def __init__(
        self, uri: str, inputs: Inputs, device: str, trust_code: bool = False
    ) -> None:
        self.loaded = LoadedModel.load(uri, inputs, device, trust_code)
        self.model, self.served = self.loaded.model, ServedModel()
        settings = self.model.requests_class.settings_class(device=device)
        with TemporaryDirectory() as folder:  # a served model reads its encoder there
            if inputs.text:
                write_encoder(inputs, Path(folder))
            self.served.use_model(self.loaded, folder, settings)
        self.item_ids: list[str] = self.served.requests.items
        """Ids of the items, in the order of `item_index`."""

    def recommend(
        self,
        item_ids: Iterable[str],
        k: int = 10,
        allowed: Iterable[str] | None = None,
        unseen: bool = False,
    ) -> pl.DataFrame:
        """Rank the catalogue after a history.

        Args:
            item_ids: Ids of the history, oldest first.
            k: Largest number of items.
            allowed: Ids of the items that may be ranked; None for all.
            unseen: Whether to leave out the items of the history.

        Returns:
            `item_id` and `score`, best first. Without a known item in the history, they
            are the most popular items, with their numbers of training behaviours.
        """
        options = {} if allowed is None else {"allowed": self.select_known(allowed)}
        history = self.select_known(item_ids)
        return self.answer({"history": history}, k=k, unseen=unseen, **options)

    def score(
        self, candidates: Iterable[str], label: str = "", **request: Any
    ) -> pl.DataFrame:
        """Rank the candidates of a request, for models of `search` and `actions`.

        Args:
            candidates: Item ids.
            label: Label whose probability is the score; by default the first.
            request: Other fields of a served request, such as `history` and `query`
                (docs/serving.md).

        Returns:
            `item_id` and `score`, best first; NaN for items that the model does not
            know.
        """
        request = {"history": [], **request, "candidates": list(candidates)}
        return self.answer(request, label=label)

    def answer(self, request: dict[str, Any], **options: Any) -> pl.DataFrame:
        """Return the answer to a served request as a frame."""
        (answer,) = self.served.answer_rows([request], options)
        if answer.get("fallback"):
            warnings.warn(
                "no item of the history is in the catalogue; the answer has the most "
                "popular items",
                stacklevel=3,
            )
        names = {"item_id": pl.String, "score": pl.Float64}
        return pl.DataFrame({name: answer[name] for name in names}, names)

    def select_known(self, ids: Iterable[str]) -> list[str]:
        """Return the ids of the catalogue's items; one warning names the others."""
        ids, index = list(ids), self.served.requests.index
        unknown = [item for item in ids if item not in index]
        if unknown:
            warnings.warn(
                f"{len(unknown)} of {len(ids)} ids are not in the catalogue and left "
                f"out: {', '.join(unknown[:10])}",
                stacklevel=3,
            )
        return [item for item in ids if item in index]

    def item_vectors(self) -> Tensor | None:
        """Return the vectors (N, D) of all items, in the order of `item_ids`.

        None for a model without vectors, such as popularity.
        """
        vectors = self.model.item_vectors()
        return None if vectors is None else vectors.detach()

    def nearest(self, k: int = 10) -> pl.DataFrame:
        """Return the k nearest items of each item.

        Returns:
            `item_id`, and the lists `nearest`, best first, and `score`.
        """
        return pl.DataFrame(find_nearest(self.loaded, k))


def load(
    run: str,
    *,
    device: str = "cpu",
    tracking_uri: str | None = None,
    trust_code: bool = False,
) -> TrainedModel:
    """Load the best checkpoint of a run, with the tables of its training.

    Args:
        run: Folder or URI of a run or of one of its checkpoints, or id of its MLflow
            run.
        device: Device of the model, such as `cuda`.
        tracking_uri: MLflow store of an id; by default MLFLOW_TRACKING_URI, else
            `runs/mlflow.db` in the working directory.
        trust_code: Whether to run code that the checkpoint contains.
    """
    if RUN_ID.fullmatch(run):
        client = tracking.connect(tracking.find_store(tracking_uri))
        run = client.get_run(run).data.tags[tracking.FOLDER_TAG]
    uri = find_checkpoint(run)
    record = read_record(run) or read_record(posixpath.dirname(uri))
    if record is None:
        raise UserError(f"{run} is not the folder of a run", "run")
    return TrainedModel(uri, Inputs(**record.inputs), device, trust_code)
