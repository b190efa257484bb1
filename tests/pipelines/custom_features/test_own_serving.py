"""A served model takes the log's own features by name and ranks as the module does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch

from models.search.data import SearchBatch, SearchDataset
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join, read_table
from models.training.fit import FitConfig
from models.training_run import TrainingRun
from pipelines import tracking
from pipelines.serving import package
from pipelines.serving.registered_model import register
from tests.fixtures.custom_features_log import make, make_text
from tests.fixtures.trainings import build_training

SIZES = {
    "width": 16,
    "num_layers": 1,
    "max_history": 8,
    "dnn_width": 16,
    "tower_width": 8,
    "text_width": 8,
}


def served(folder: Path, tables: str, text: str) -> tuple[TrainingRun, Any]:
    """An untrained model as jobs.train leaves a trained one, and as MLflow loads it."""
    setup = build_training(
        {"name": "qgs", **SIZES}, FitConfig(batch_size=8), Inputs(tables, text=text)
    )
    config = {
        "model": setup.model.config_to_dict(setup.config),
        "tables": tables,
        "text": text,
    }
    uri = f"sqlite:///{folder}/mlflow.db"
    run = tracking.open_run(
        uri, "qgs/own", "qgs", str(folder), config=config, hashes=setup.catalogue.hashes
    )
    checkpoint.save(
        folder / "qgs", setup.model, setup.checkpoint(epoch=1, tracking=run.to_dict())
    )
    tracking.Logger(run).tag(checkpoint=str(folder / "qgs"))
    register(run, "qgs")
    setup.model.eval()
    with package.use_store(uri):
        return setup, mlflow.pyfunc.load_model("models:/qgs/1")


def request(tables: str, batch: SearchBatch) -> dict[str, Any]:
    """The one request of the batch by the names of things, with its own features as the
    log has them.
    """
    users = read_table(join(tables, "sequences")).to_pylist()
    items, queries = (
        read_table(join(tables, name))[column].to_pylist()
        for name, column in (("items", "item_id"), ("queries", "query"))
    )
    row = users[int(batch.user_row[0])]
    place = next(i for i, one in enumerate(row["requests"]) if one["split"] == "test")
    asked, end = row["requests"][place], row["requests"][place]["history_end"]
    built_in = batch.features.shape[1] - 2
    past = range(max(0, end - 8), end)
    return {
        "candidates": [items[i] for i in asked["candidates"]],
        "query": queries[asked["query_index"]],
        "features": batch.features[:, :built_in].tolist(),
        "numbers": {"bm25": asked["num_bm25"]},
        "categories": {"city": asked["cat_city"]},
        "history": [items[row["item_index"][i]] for i in past],
        "history_query": [queries[row["query_index"][i]] for i in past],
        "history_features": [row["features"][i] for i in past],
        "history_numbers": {"bm25": [row["num_bm25"][i] for i in past]},
        "history_categories": {"city": [row["cat_city"][i] for i in past]},
    }


def test_features_of_items_are_known_when_serving(
    raw: Path, tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    new_store(tmp_path)
    tables = make(
        tmp_path, raw, settings={"search": {"item_features": ["brand", "weight"]}}
    )
    text = make_text(tmp_path, tables)
    model = served(tmp_path, tables, text)[1]
    rows = read_table(join(tables, "sequences")).to_pylist()
    items = {
        item: number
        for number, item in enumerate(
            read_table(join(tables, "items"))["item_id"].to_pylist()
        )
    }
    request = next(
        one for row in rows for one in row["requests"] if one["history_end"] == 0
    )
    names = [
        item
        for index in request["candidates"]
        for item, number in items.items()
        if number == index
    ]
    given = {
        "candidates": [*names, "unknown"],
        "query": None,
        "history": [],
        "numbers": {"bm25": [*request["num_bm25"], None]},
        "categories": {"city": [*request["cat_city"], None]},
    }
    scores = []
    for own in (
        {},
        {"weight": [*request["num_weight"], None]},
        {"weight": [9.0] * (len(names) + 1)},
    ):
        ranked = model.predict(
            pd.DataFrame([{**given, "numbers": {**given["numbers"], **own}}])
        )
        scores.append(dict(zip(ranked["item_id"][0], ranked["score"][0], strict=True)))
    assert scores[0] == pytest.approx(scores[1], nan_ok=True)
    assert scores[0] != pytest.approx(scores[2], nan_ok=True, abs=1e-6)


def test_own_features_are_served_by_name(
    tables: str, text: str, tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    new_store(tmp_path)
    setup, model = served(tmp_path, tables, text)
    assert model.metadata.metadata["numbers"] == ["bm25"]
    assert model.metadata.metadata["categories"] == ["city"]
    options = SearchDataset.dataset_options(setup.config, setup.catalogue)
    examples = SearchDataset.load(
        join(tables, "sequences"), "test", unit="request", max_history=8, **options
    )
    number = int(np.flatnonzero(examples.lengths >= 3)[0])
    number = next(
        n
        for n in range(number, len(examples))
        if len(examples.collate(np.array([n])).request_end) == 1
        and examples.lengths[n] >= 3
    )
    batch = examples.collate(np.array([number]))
    row = request(tables, batch)
    with torch.no_grad():
        want = torch.sigmoid(setup.model.score(batch)[:, 0]).tolist()  # type: ignore[operator]

    def scores(**change: Any) -> dict[str, float]:
        ranked = model.predict(pd.DataFrame([row | change]))
        return dict(zip(ranked["item_id"][0], ranked["score"][0], strict=True))

    found = scores()
    assert [found[item] for item in row["candidates"]] == pytest.approx(want, abs=1e-5)
    count = len(row["candidates"])
    # each column tells something; what is left out is as what is not known
    for name, values in (
        ("numbers", {"bm25": [2.5] * count}),
        ("categories", {"city": ["Rome"] * count}),
    ):
        assert scores(**{name: values}) != pytest.approx(found, abs=1e-6)
        past = {key: value[:1] * len(row["history"]) for key, value in values.items()}
        assert scores(**{f"history_{name}": past}) != pytest.approx(found, abs=1e-6)
    assert scores(categories=None) == scores(categories={"city": ["Atlantis"] * count})
    assert scores(numbers={}) == scores(numbers={"bm25": [None] * count})
    for change, message in (
        (
            {"numbers": {"bm52": [1.0] * count}},
            "numbers has 'bm52', which the model does not read; the nearest is 'bm25'",
        ),
        (
            {"history_categories": {"town": []}},
            "history_categories has 'town', .*; the nearest is 'city'",
        ),
        (
            {"categories": {"city": ["Rome"]}},
            f"'city' of categories has 1 entries where {count} are expected",
        ),
    ):
        with pytest.raises(UserError, match=message):
            scores(**change)


def test_counts_as_of_a_request_give_the_scores_of_its_row(
    raw: Path, tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    new_store(tmp_path)
    tables = make(tmp_path, raw)
    text, uri = make_text(tmp_path, tables), f"sqlite:///{tmp_path}/mlflow.db"
    setup, plain = served(tmp_path, tables, text)
    options = SearchDataset.dataset_options(setup.config, setup.catalogue)
    examples = SearchDataset.load(
        join(tables, "sequences"), "test", unit="request", max_history=8, **options
    )
    batches = (examples.collate(np.array([number])) for number in range(len(examples)))
    alone = [
        batch
        for batch in batches
        if len(batch.request_end) == 1 and int(batch.history_length[0]) > 2
    ]
    for batch in alone[:: len(alone) // 3]:
        moment = int(batch.request_time[0])
        row = request(tables, batch) | {"timestamp_ms": moment}
        with torch.no_grad():
            want = torch.sigmoid(setup.model.score(batch)[:, 0]).tolist()  # type: ignore[operator]
        want = dict(zip(row["candidates"], want, strict=True))
        del row["features"]

        make(tmp_path, raw, settings={"counts_as_of": str(moment)})
        with package.use_store(uri):
            model = mlflow.pyfunc.load_model(
                "models:/qgs/1", model_config={"counts": join(tables, "counts")}
            )

        def scores(model: Any, row: dict[str, Any]) -> dict[str, float]:
            ranked = model.predict(pd.DataFrame([row]))
            return dict(zip(ranked["item_id"][0], ranked["score"][0], strict=True))

        assert scores(model, row) == pytest.approx(want, abs=1e-5)
        for other in (
            scores(plain, row),
            scores(model, {**row, "timestamp_ms": moment + 5 * 3_600_000}),
        ):
            assert other != pytest.approx(
                want, abs=1e-5
            )  # without the counts, and at another hour
        vectors = batch.features[:, : len(setup.catalogue.feature_mean)]
        given = {**row, "features": vectors.tolist()}
        assert scores(plain, given) == pytest.approx(want, abs=1e-5)
        given["features"][0] = [float("nan")] * vectors.shape[
            1
        ]  # what is not known is counted
        assert scores(model, given) == pytest.approx(want, abs=1e-5)
