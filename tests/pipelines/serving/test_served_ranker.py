"""Search models and models of actions from the registry rank as the module does; what
does not fit is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch

from models.actions.catalogue import ActionsCatalogue
from models.actions.data import ActionsDataset
from models.actions.requests import ActionsRequests
from models.build import build_model, load_model
from models.requests import Row
from models.storage import checkpoint
from models.storage.checkpoint import Checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join, read_manifest, read_table
from models.training.fit import FitConfig
from models.training_run import TrainingRun
from pipelines import tracking
from pipelines.data.sids.config import TextConfig
from pipelines.data.sids.texts import encode_log
from pipelines.serving import package
from pipelines.serving.registered_model import register
from pipelines.serving.served_model import ServedModel
from tests.fixtures.actions_tables import SEEN, write_actions
from tests.fixtures.search_tables import write_search
from tests.fixtures.trainings import build_training
from tests.pipelines.serving.test_served_scores import searches

SIZES = {
    "qgs": {
        "width": 16,
        "num_layers": 2,
        "max_history": 8,
        "dnn_width": 16,
        "tower_width": 8,
        "text_width": 8,
    },
    "attn_mvp": {
        "width": 16,
        "num_layers": 2,
        "num_heads": 2,
        "ffn": 16,
        "max_history": 8,
    },
}
UNKNOWN = "2 of 10 queries are not in the training tables and are treated as no query"
SIZES["lac"] = SIZES["attn_mvp"]
SIZES["hstu"] = SIZES["qgs"] | {"num_heads": 2}


@pytest.fixture(autouse=True)
def store(new_store: Callable[[Path], str], tmp_path: Path) -> None:
    """Where the models are registered."""
    new_store(tmp_path)


def trained(
    folder: Path,
    name: str,
    tables: str,
    text: str | None,
    seed: int = 0,
    **options: Any,
) -> TrainingRun:
    """An untrained model as jobs.train leaves a trained one, registered under its name."""
    fit = FitConfig(batch_size=8, seed=seed)
    setup = build_training(
        {"name": name, **SIZES[name], **options}, fit, Inputs(tables, text=text)
    )
    config = {"model": setup.model.config_to_dict(setup.config), "tables": tables} | (
        {"text": text} if text else {}
    )
    uri, hashes = f"sqlite:///{folder}/mlflow.db", setup.catalogue.hashes
    run = tracking.open_run(
        uri, f"{name}/small", name, str(folder), config=config, hashes=hashes
    )
    checkpoint.save(
        folder / name, setup.model, setup.checkpoint(epoch=1, tracking=run.to_dict())
    )
    tracking.Logger(run).tag(checkpoint=str(folder / name))
    register(run, name)
    setup.model.eval()
    return setup


def feeds(
    setup: TrainingRun, tables: str
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Users with candidates that all have another item, and the chance of the second
    task of each.

    The rows have all that a user did, an item that is not in the catalogue, and what
    came after the request.
    """
    items = read_table(join(tables, "items"))["item_id"].to_pylist()
    devices = ["watch", *SEEN]  # by number: no model knows the watch
    read, whole = (
        ActionsDataset.load(join(tables, "sequences"), "test", max_history=longest)
        for longest in (8, 100)
    )
    rows, chances = [], []
    for number in range(len(read)):
        batch, every = (
            examples.collate(np.array([number])) for examples in (read, whole)
        )
        shown, past = batch.candidate_item[0].tolist(), int(every.valid.sum())
        if len(set(shown)) < len(shown):
            continue
        batch.candidate_time[:] = 99  # one request shows them all
        history = [items[i] for i in every.item[0, :past].tolist()]
        actions, times = (
            every.action[0, :past].tolist(),
            every.time[0, :past].tolist(),
        )
        row = {
            "candidates": [items[i] for i in shown],
            "timestamp_ms": 99,
            "history": [*history[:-1], "who", *history[-1:], *items],
            "history_actions": [
                *actions[:-1],
                [1.0] * 3,
                *actions[-1:],
                *[[1.0] * 3] * len(items),
            ],
            "history_time_ms": [
                *times[:-1],
                *times[-1:] * 2,
                *range(99, 99 + len(items)),
            ],
            "features": batch.candidate_feature[0].tolist(),
        }
        row["history_time_ms"] = (
            row["history_time_ms"] if past else [5, *range(99, 99 + len(items))]
        )
        if batch.viewer is not None:
            batch.candidate_viewer[:] = batch.candidate_viewer[:, :1]
            known = [devices[code] for code in every.viewer[0, :past, 0].tolist()]
            row["viewer_device"] = devices[int(batch.candidate_viewer[0, 0, 0])]
            row["history_viewer_device"] = [
                *known[:-1],
                "tablet",
                *known[-1:],
                *["phone"] * len(items),
            ]
        with torch.no_grad():
            found = torch.sigmoid(setup.model.score(batch)[:, 1])
        chances.append(dict(zip(row["candidates"], found.tolist(), strict=True)))
        rows.append(row)
        # without their times all events are before the request, whenever that is, and
        # each before the next
        in_order = replace(batch, time=torch.arange(batch.time.shape[1])[None])
        with torch.no_grad():
            found = torch.sigmoid(setup.model.score(in_order)[:, 1])
        last = dict(zip(row["candidates"], found.tolist(), strict=True))
    lists = ("history", "history_actions", "history_viewer_device")
    short = {name: rows[-1][name][: -len(items)] for name in lists if name in rows[-1]}
    rows.append({**rows[-1], **short, "history_time_ms": None, "timestamp_ms": 0})
    return rows, [*chances, last]


def test_registered_models_rank_as_the_module_does(tmp_path: Path) -> None:
    """Also what a log does not have: no history, unknown items, an unknown query, no
    candidates at all.
    """
    tables, text = write_search(tmp_path / "search")
    feed = write_actions(tmp_path / "feed", viewers=True)
    setups = {
        "qgs": trained(tmp_path, "qgs", tables, text),
        "attn_mvp": trained(tmp_path, "attn_mvp", feed, None),
    }
    rows, chances = zip(*searches(setups["qgs"], tables, text, 8, label=1), strict=True)
    asked = {"qgs": ([*rows], [*chances]), "attn_mvp": feeds(setups["attn_mvp"], feed)}
    assert len(asked["attn_mvp"][0]) > 3
    for name, (rows, chances) in asked.items():
        odd = {
            column: [] if isinstance(value, list) else value
            for column, value in rows[0].items()
        }
        odd |= {"query": "what is this"} if name == "qgs" else {}
        rows.append(
            {**odd, "candidates": ["who", *rows[0]["candidates"]], "features": None}
        )
        rows.append({**odd, "candidates": [], "features": []})
        with package.use_store(f"sqlite:///{tmp_path}/mlflow.db"):
            model = mlflow.pyfunc.load_model(f"models:/{name}/1")
        about, catalogue = model.metadata.metadata, setups[name].catalogue
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ranked = model.predict(
                pd.DataFrame(rows), params={"label": catalogue.labels[1]}
            )
        for want, found, scores in zip(
            chances, ranked["item_id"], ranked["score"], strict=False
        ):
            assert found == sorted(want, key=lambda item: -want[item])
            assert scores == pytest.approx([want[item] for item in found], abs=1e-5)
        unknown, nothing = ranked["item_id"].tolist()[-2:]
        assert (sorted(unknown), unknown[-1], nothing) == (
            sorted(rows[-2]["candidates"]),
            "who",
            [],
        )
        assert np.isfinite(ranked["score"].tolist()[-2]).tolist() == [
            item != "who" for item in unknown
        ]
        assert (about["labels"], about["features"]) == (
            list(catalogue.labels),
            list(catalogue.features),
        )
        assert about.get("viewers") == {"attn_mvp": ["device"]}.get(name)
        words = [
            str(warning.message) for warning in said if warning.category is UserWarning
        ]
        assert words == ([UNKNOWN] if name == "qgs" else [])


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    tables, text = write_search(tmp_path)
    trained(tmp_path, "qgs", tables, text)
    with package.use_store(f"sqlite:///{tmp_path}/mlflow.db"):
        model = mlflow.pyfunc.load_model("models:/qgs/1").unwrap_python_model()
    row = {
        "candidates": ["item_id-003"],
        "history": ["item_id-001"],
        "query": "query-001",
    }
    for change, params, message in (
        (
            {"features": [[1.0]]},
            {},
            "features has 1 vectors of 1 numbers, 1 of 6 are expected",
        ),
        ({"history_query": []}, {}, "history_query has 0 entries where 1 are expected"),
        (
            {"history_query": ["query-001"], "history_time_ms": []},
            {},
            "history_time_ms has 0 entries where 1 are expected",
        ),
        (
            {},
            {"label": "buy"},
            "the model has no label 'buy'; choose one of click, purchase",
        ),
        (
            {"features": [[np.inf] * 6]},
            {},
            "features has an infinite number, or one over .*; give NaN for unknown values",
        ),
        ({"features": [None]}, {}, "features has an entry without numbers; give NaN"),
        (
            {"candidates": [1.5]},
            {},
            "candidates has 1.5; an item id is a string, as in the log, or an integer",
        ),
    ):
        with pytest.raises(UserError, match=message):
            model.predict(None, pd.DataFrame([row | change]), params)
    with pytest.warns(
        UserWarning, match="1 of 1 queries are not in the training tables"
    ):
        unknown = model.predict(None, pd.DataFrame([row | {"query": "Query-001"}]))
    assert (
        unknown["score"].tolist()
        == model.predict(None, pd.DataFrame([row | {"query": None}]))["score"].tolist()
    )
    unseen = model.predict(
        None,
        pd.DataFrame(
            [row | {"candidates": [7, "item_id-003"], "history": [np.int64(7)]}]
        ),
    )
    assert unseen["item_id"][0] == ["item_id-003", "7"]
    assert np.isnan(unseen["score"][0][1])
    text = model.ranker.requests.text
    text.text = replace(
        text.text,
        pair_keys=text.text.pair_keys[:1],
        pairs=text.text.pairs[:1],
        joint=text.text.joint[:1],
    )
    with pytest.warns(
        UserWarning,
        match="1 of 1 candidates have no text vector for the pair",
    ):
        model.predict(None, pd.DataFrame([row]))
    asked = {"query": None, "history_query": ["query-001"]}
    with pytest.warns(
        UserWarning,
        match="1 of 1 behaviours have no text vector for the pair",
    ):
        model.predict(None, pd.DataFrame([row | asked]))
    assert model.predict(None, pd.DataFrame([row])[:0]).columns.tolist() == [
        "item_id",
        "score",
    ]
    for parameter in model.ranker.model.parameters():
        parameter.detach().fill_(torch.nan)
    with (
        pytest.raises(UserError, match="scores that are not finite"),
        pytest.warns(UserWarning, match="no text vector for the pair"),
    ):
        model.predict(None, pd.DataFrame([row]))


FEED = {
    "candidates": ["item-003", "item-004"],
    "history": ["item-000", "item-001", "item-002"],
    "history_actions": [[1.0, 0.0, 0.5], [0.0, 1.0, 0.2], [1.0, 1.0, 0.9]],
    "timestamp_ms": 99,
    "features": [[0.5, 0.5], [0.1, 0.9]],
    "history_time_ms": [10, 20, 30],
    "viewer_device": "phone",
    "history_viewer_device": ["phone", "", "tablet"],
}


def test_every_column_of_a_model_of_actions_changes_a_score(tmp_path: Path) -> None:
    tables = write_actions(tmp_path, viewers=True)
    trained(tmp_path, "attn_mvp", tables, None)
    with package.use_store(f"sqlite:///{tmp_path}/mlflow.db"):
        model = mlflow.pyfunc.load_model("models:/attn_mvp/1")
    others = {
        "candidates": ["item-005", "item-006"],
        "history": ["item-007", "item-001", "item-002"],
        "history_actions": [[1.0, 0.0, 0.5], [0.0, 0.0, 0.2], [1.0, 1.0, 0.9]],
        "timestamp_ms": 30,
        "features": [[0.5, 0.5], [0.9, 0.1]],
        "history_time_ms": [10, 20, 100],
        "viewer_device": "tablet",
        "history_viewer_device": ["", "", "tablet"],
    }
    assert set(model.metadata.get_input_schema().input_names()) == {
        *others,
        "new_items",
    }
    scores = [sorted(model.predict(pd.DataFrame([FEED]))["score"][0])]
    for column, value in others.items():
        scores.append(
            sorted(model.predict(pd.DataFrame([FEED | {column: value}]))["score"][0])
        )
        assert scores[-1] != pytest.approx(scores[0], abs=1e-6), column
    inputs = model.metadata.metadata["inputs"]
    assert (
        inputs
        == read_manifest(join(tables, "sequences"), "sequences").info["definitions"][
            "inputs"
        ]
    )
    assert sorted(inputs) == sorted(model.metadata.metadata["actions"])


@pytest.fixture(scope="module")
def of_feed(tmp_path_factory: pytest.TempPathFactory) -> ActionsRequests:
    """What reads requests of a model of actions."""
    folder = tmp_path_factory.mktemp("of_feed")
    tables = write_actions(folder, viewers=True)
    setup = build_training(
        {"name": "attn_mvp", **SIZES["attn_mvp"]},
        FitConfig(batch_size=8),
        Inputs(tables),
    )
    checkpoint.save(folder / "attn_mvp", setup.model, setup.checkpoint())
    package.write_bundle(folder / "data", str(folder / "attn_mvp"), Inputs(tables))
    return ActionsRequests(str(folder / "data"), setup.model, setup.catalogue, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"history_actions": [[0.0, 0.0, 30000.0]] * 3},
            "history_actions has 30000 for 'dwell', which is not from 0",
        ),
        (
            {"history_actions": [[0.0, -0.5, 0.0]] * 3},
            "history_actions has -0.5 for 'share'.* `inputs` in the model's",
        ),
        (
            {"history_actions": [[np.inf, 0.0, 0.0]] * 3},
            "history_actions has an infinite number",
        ),
        (
            {"history_actions": [[0.0] * 3]},
            "history_actions has 1 vectors of 3 numbers, 3 of 3 are expected",
        ),
        (
            {"history_time_ms": [10, 30, 20]},
            "history_time_ms falls from 30 to 20; give the history oldest first",
        ),
        (
            {"history_time_ms": [10, None, 20]},
            "history_time_ms has an entry without a time; give one time per event",
        ),
        (
            {"history_viewer_device": []},
            "history_viewer_device has 0 entries where 3 are expected",
        ),
        ({"features": [[0.5, np.inf], [0.1, 0.9]]}, "features has an infinite number"),
    ],
)
def test_what_does_not_fit_a_model_of_actions_is_said(
    change: dict[str, Any], message: str, of_feed: ActionsRequests
) -> None:
    with pytest.raises(UserError, match=message):
        of_feed.parse(Row(FEED | change))
    missing = of_feed.parse(Row(FEED | {"history_actions": [[np.nan] * 3] * 3}))
    assert not of_feed.collate([missing]).action.any()


def test_a_model_that_reads_times_wants_them(tmp_path: Path) -> None:
    tables, text = write_search(tmp_path)
    trained(tmp_path, "hstu", tables, text)
    with package.use_store(f"sqlite:///{tmp_path}/mlflow.db"):
        model = mlflow.pyfunc.load_model("models:/hstu/1").unwrap_python_model()
    row = {
        "candidates": ["item_id-003"],
        "history": ["item_id-001", "item_id-002"],
        "query": None,
    }
    with pytest.raises(
        UserError,
        match="history_time_ms is missing, and the model reads the time of each behaviour",
    ):
        model.predict(None, pd.DataFrame([row]))
    days = [
        model.predict(None, pd.DataFrame([row | {"history_time_ms": [0, gap]}]))[
            "score"
        ][0]
        for gap in (1, 10**9)
    ]
    assert np.isfinite(days).all()


CONTENT = {
    "text_title": "title",
    "num_price": "price",
    "cat_kind": "kind",
    "cat_author": "author",
}
BARE = {
    "candidates": ["X"],
    "history": ["item-000", "item-002", "item-004"],
    "history_actions": [[1.0, 0.0, 0.5]] * 3,
}


def first_scores(model: Any, rows: list[dict[str, Any]]) -> list[float]:
    """Of the first candidate of each row."""
    found = model.predict(pd.DataFrame(rows))
    pairs = (
        dict(zip(*of_row, strict=True))
        for of_row in zip(found["item_id"], found["score"], strict=True)
    )
    return [
        scores[row["candidates"][0]] for row, scores in zip(rows, pairs, strict=True)
    ]


def called(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row with the item X called so."""
    return row | {
        key: [name if item == "X" else item for item in row[key]]
        for key in ("candidates", "history")
    }


def test_a_new_item_is_scored_as_one_of_the_catalogue_with_its_content(
    tmp_path: Path,
) -> None:
    """One whose id says nothing: the model reads none, or training has not seen it. As
    a candidate and in the history; and requests that bring none are scored as in
    training."""
    tables, text = (
        write_actions(tmp_path, viewers=True, content=True),
        str(tmp_path / "text"),
    )
    encode_log(tables, text, "tfidf", TextConfig(svd=4), say=str)
    items = read_table(join(tables, "items")).to_pylist()
    posts = [
        {"item_id": f"new-{i}"}
        | {
            name: row[column]
            for column, name in CONTENT.items()
            if row[column] is not None
        }
        for i, row in enumerate(items)
    ]
    for name, options in {
        "attn_mvp": {"item_ids": "none"},
        "lac": {"id_dropout": 0.5},
    }.items():
        setup = trained(tmp_path, name, tables, text, **options)
        with package.use_store(f"sqlite:///{tmp_path}/mlflow.db"):
            model = mlflow.pyfunc.load_model(f"models:/{name}/1")
        asked, chances = feeds(setup, tables)
        ranked = model.predict(pd.DataFrame(asked), params={"label": "contribution"})
        for want, found, scores in zip(
            chances, ranked["item_id"], ranked["score"], strict=True
        ):
            assert scores == pytest.approx([want[item] for item in found], abs=1e-5)
        unseen = range(len(items)) if name == "attn_mvp" else [len(items) - 1]
        for i in unseen:
            for row in (
                BARE,
                BARE
                | {
                    "history": ["item-000", "X", "item-002"],
                    "candidates": ["X", "item-001"],
                },
            ):
                there, new = (
                    called(f"item-{i:03d}", row),
                    called(f"new-{i}", row | {"new_items": posts[::-1]}),
                )
                assert first_scores(model, [there]) == pytest.approx(
                    first_scores(model, [new]), abs=1e-6
                )
        # of several rows in one frame each has its own items, whatever they are called
        row = called("new-0", BARE)
        apart = [row | {"new_items": [posts[i] | {"item_id": "new-0"}]} for i in unseen]
        assert first_scores(model, apart) == pytest.approx(
            [first_scores(model, [each])[0] for each in apart], abs=1e-6
        )
        kinds = [
            {"price": 3},
            {"title": "husky"},
            {"author": "author-2"},
            {"author": None},
        ]
        changed = [
            row | {"new_items": [posts[1] | {"item_id": "new-0"} | change]}
            for change in ({}, *kinds)
        ]
        usual, *others = first_scores(model, changed)
        assert all(other != pytest.approx(usual, abs=1e-6) for other in others)
        unknown = [
            row | {"new_items": [{**posts[1], "item_id": "new-0", "author": who}]}
            for who in ("nobody", None)
        ]
        assert len(set(first_scores(model, unknown))) == 1


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A served model that scores new items by their content."""
    folder = tmp_path_factory.mktemp("ranker")
    tables, text = write_actions(folder, content=True), str(folder / "text")
    encode_log(tables, text, "tfidf", TextConfig(svd=4), say=str)
    setup = build_training(
        {"name": "lac", **SIZES["lac"]},
        FitConfig(batch_size=8),
        Inputs(tables, text=text),
    )
    checkpoint.save(folder / "lac", setup.model, setup.checkpoint(epoch=1))
    package.write_bundle(
        folder / "bundle", str(folder / "lac"), Inputs(tables, text=text)
    )
    model = ServedModel()
    model.load_context(
        SimpleNamespace(artifacts={"data": str(folder / "bundle")}, model_config=None)
    )
    return model


@pytest.mark.parametrize(
    ("posts", "message"),
    [
        ([{"title": "x"}], "new_items has an item without item_id"),
        ([None], "new_items has an item without item_id"),
        ([{"item_id": "p"}, {"item_id": "p"}], "new_items has 'p' twice"),
        (
            [{"item_id": "p", "titel": "x"}],
            "new_items has the field 'titel' for 'p', .* the nearest is 'title'",
        ),
        (
            [{"item_id": "p", "price": np.inf}],
            "'price' of new_items has an infinite number",
        ),
        (
            [{"item_id": "p", "price": "cheap"}],
            "'price' of new_items has values that are not numbers",
        ),
    ],
)
def test_new_items_that_cannot_be_read_are_refused(
    posts: list[Any], message: str, ranker: ServedModel
) -> None:
    with pytest.raises(UserError, match=message):
        ranker.predict(None, pd.DataFrame([called("p", BARE) | {"new_items": posts}]))


def test_what_new_items_lack_is_said(
    ranker: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranker.ranker.requests.new_items, "encoder", None)
    no_id = pytest.warns(
        UserWarning,
        match="1 new items are scored without an id, but the model was always trained",
    )
    with (
        no_id,
        pytest.warns(
            UserWarning,
            match="without its text encoder; 1 new items are scored without their text",
        ),
    ):
        ranker.predict(
            None,
            pd.DataFrame(
                [
                    called("p", BARE)
                    | {"new_items": [{"item_id": "p", "title": "husky"}]}
                ]
            ),
        )


def test_text_that_a_model_was_not_trained_with_is_refused(tmp_path: Path) -> None:
    tables, text = write_actions(tmp_path / "a", content=True), str(tmp_path / "text")
    encode_log(tables, text, "tfidf", TextConfig(svd=4), say=str)
    with_text, without = (
        ActionsCatalogue.load(tables, text),
        ActionsCatalogue.load(tables),
    )
    for catalogue, other, message in (
        (
            with_text,
            without,
            "trained with a table 'text_items' that is not given; give the --text that it was trained",
        ),
        (
            without,
            with_text,
            "was trained without text, and a table 'text_items' is given; leave out --text",
        ),
    ):
        options = {"name": "attn_mvp", **SIZES["attn_mvp"]}
        about = Checkpoint(model=options, hashes=catalogue.hashes, epoch=1)
        checkpoint.save(tmp_path / "model", build_model(options, catalogue), about)
        load_model(tmp_path / "model", catalogue)
        with pytest.raises(UserError, match=message):
            load_model(tmp_path / "model", other)
    others = write_actions(tmp_path / "b", items=13, content=True)
    with pytest.raises(
        UserError, match=r"items was made from other items .* or run jobs.encode again"
    ):
        ActionsCatalogue.load(others, text)
