"""Search models and models of actions from the registry: in a fresh process they rank as the module does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models import checkpoint, registry
from models.actions.data import ActionsExamples
from models.fit import FitConfig
from models.search.data import SearchExamples
from models.setup import Setup, set_up
from models.tables import UserError, join, read_table
from pipelines import tracking
from pipelines.training import package
from pipelines.training.registered_model import register
from tests.actions_tables import write_actions
from tests.search_tables import ITEM_MODEL, write_search

SIZES = {
    "qgs": {"width": 16, "num_layers": 2, "max_history": 8, "dnn_width": 16, "tower_width": 8, "text_width": 8},
    "attn_mvp": {"width": 16, "num_layers": 2, "num_heads": 2, "ffn": 16, "max_history": 8},
}
UNKNOWN = "2 of 8 queries are none of the training tables'; they count as no query"
SIZES["hstu"] = SIZES["qgs"] | {"num_heads": 2}
SIZES["hllm"] = SIZES["qgs"] | {"num_heads": 2, "ffn": 16, "item_model": ITEM_MODEL}

FRESH = """
import json, sys, warnings
import mlflow, pandas
mlflow.set_tracking_uri(sys.argv[1])
answers = {}
for name, (rows, label) in json.load(sys.stdin).items():
    model = mlflow.pyfunc.load_model(f"models:/{name}/1")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ranked = model.predict(pandas.DataFrame(rows), params={"label": label})
    said = [str(warning.message) for warning in said if warning.category is UserWarning]
    answers[name] = [ranked["item_id"].tolist(), ranked["score"].tolist(), said, model.metadata.metadata]
print(json.dumps(answers))
"""


def trained(folder: Path, name: str, tables: str, text: str | None) -> Setup:
    """An untrained model as jobs.train leaves a trained one, registered under its name."""
    setup = set_up({"name": name, **SIZES[name]}, FitConfig(batch_size=8), tables, text)
    config = {"model": registry.config_to_dict(setup.config), "tables": tables, "sids": text}
    uri, hashes = f"sqlite:///{folder}/mlflow.db", setup.catalogue.hashes
    run = tracking.open_run(uri, f"{name}/small", name, str(folder), config=config, hashes=hashes)
    checkpoint.save(folder / name, setup.model, setup.checkpoint(epoch=1, tracking=run.to_dict()))
    tracking.Logger(run).tag(checkpoint=str(folder / name))
    register(run, name)
    setup.model.eval()
    return setup


def searches(setup: Setup, tables: str) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Test requests by the names of things, and the chance of the second label of each of their candidates."""
    items, queries = (read_table(join(tables, name))[column].to_pylist() for name, column in
                      (("items", "item_id"), ("queries", "query")))  # fmt: skip
    examples = SearchExamples.load(join(tables, "sequences"), "test", unit="request", max_history=8)
    rows, chances = [], []
    for number in range(6):
        batch = examples.collate(np.array([number]))
        past = int(batch["history_length"][0])
        assert batch["request_end"].tolist() == [past]
        query, asked = int(batch["request_query"][0]), batch["history_query"][0, :past].tolist()
        names = [items[i] for i in batch["candidate"].tolist()]
        rows.append(
            {
                "candidates": names, "history": [items[i] for i in batch["history"][0, :past].tolist()],
                "query": queries[query] if query >= 0 else None, "features": batch["features"].tolist(),
                "history_query": [queries[q] if q >= 0 else "" for q in asked],
                "history_time_ms": batch["history_time"][0, :past].tolist(),
                "history_features": batch["history_features"][0, :past].tolist(),
            }
        )  # fmt: skip
        with torch.no_grad():
            found = torch.sigmoid(setup.model.score(batch)[:, 1])
        chances.append(dict(zip(names, found.tolist(), strict=True)))
    return rows, chances


def feeds(setup: Setup, tables: str) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Users with candidates that all have another item, and the chance of the second task of each."""
    items = read_table(join(tables, "items"))["item_id"].to_pylist()
    examples = ActionsExamples.load(join(tables, "sequences"), "test", max_history=8)
    rows, chances = [], []
    for batch in (examples.collate(np.array([number])) for number in range(len(examples))):
        shown, past = batch["candidate_item"][0].tolist(), int(batch["valid"].sum())
        if len(set(shown)) < len(shown):
            continue
        batch["candidate_time"][:] = 99  # one request shows them all
        rows.append(
            {
                "candidates": [items[i] for i in shown], "timestamp_ms": 99,
                "history": [items[i] for i in batch["item"][0, :past].tolist()],
                "history_actions": batch["action"][0, :past].tolist(),
                "features": batch["candidate_feature"][0].tolist(),
                "history_time_ms": batch["time"][0, :past].tolist(),
                "history_features": batch["feature"][0, :past].tolist(),
            }
        )  # fmt: skip
        with torch.no_grad():
            found = torch.sigmoid(setup.model.score(batch)[:, 1])
        chances.append(dict(zip(rows[-1]["candidates"], found.tolist(), strict=True)))
    return rows, chances


def test_candidates_are_ranked_alike_in_a_fresh_process(tmp_path: Path) -> None:
    tables, text = write_search(tmp_path / "search")
    feed = write_actions(tmp_path / "feed")
    setups = {name: trained(tmp_path, name, tables, text) for name in ("qgs", "hllm")}
    setups["attn_mvp"] = trained(tmp_path, "attn_mvp", feed, None)
    asked = {name: searches(setups[name], tables) for name in ("qgs", "hllm")}
    asked["attn_mvp"] = feeds(setups["attn_mvp"], feed)
    assert len(asked["attn_mvp"][0]) > 3
    # what a log does not have: no history, unknown items, an unknown query, no candidates at all
    for name, (rows, _) in asked.items():
        odd = {column: [] if isinstance(value, list) else value for column, value in rows[0].items()}
        odd |= {"query": "what is this"} if name != "attn_mvp" else {}
        rows.append({**odd, "candidates": ["who", *rows[0]["candidates"]], "features": None})
        rows.append({**odd, "candidates": [], "features": []})
    content = {name: (rows, setups[name].catalogue.labels[1]) for name, (rows, _) in asked.items()}
    fresh = subprocess.run(
        [sys.executable, "-c", FRESH, f"sqlite:///{tmp_path}/mlflow.db"], input=json.dumps(content), cwd=tmp_path,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert fresh.returncode == 0, fresh.stderr
    answers = json.loads(fresh.stdout.splitlines()[-1])
    for name, (rows, chances) in asked.items():
        ranked, scores, said, about = answers[name]
        for row, want in enumerate(chances):
            assert ranked[row] == sorted(want, key=lambda item: -want[item])
            assert scores[row] == pytest.approx([want[item] for item in ranked[row]], abs=1e-5)
        unknown, nothing = ranked[-2:]
        assert (sorted(unknown), unknown[-1], nothing) == (sorted(rows[-2]["candidates"]), "who", [])
        assert np.isfinite(scores[-2]).tolist() == [item != "who" for item in unknown]
        assert about["labels"] == list(setups[name].catalogue.labels)
        assert about["features"] == list(setups[name].catalogue.features)
        assert said == ([] if name == "attn_mvp" else [UNKNOWN])


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    tables, text = write_search(tmp_path)
    trained(tmp_path, "qgs", tables, text)
    with package.at(f"sqlite:///{tmp_path}/mlflow.db"):
        model = tracking.mlflow.pyfunc.load_model("models:/qgs/1").unwrap_python_model()
    import pandas as pd

    row = {"candidates": ["item_id-003"], "history": ["item_id-001"], "query": "query-001"}
    for change, params, message in (
        ({"features": [[1.0]]}, {}, "features has 1 vectors of 1 numbers, 1 of 6 are expected"),
        ({"history_query": []}, {}, "history_query has 0 entries for a history of 1"),
        (
            {"history_query": ["query-001"], "history_time_ms": []},
            {},
            "history_time_ms has 0 entries for a history of 1",
        ),
        ({}, {"label": "buy"}, "the model has no label 'buy'; choose one of click, purchase"),
    ):
        with pytest.raises(UserError, match=message):
            model.predict(None, pd.DataFrame([row | change]), params)
    with pytest.warns(UserWarning, match="1 of 1 queries are none of the training tables'"):
        unknown = model.predict(None, pd.DataFrame([row | {"query": "Query-001"}]))
    assert unknown["score"].tolist() == model.predict(None, pd.DataFrame([row | {"query": None}]))["score"].tolist()
    text = model.requests.text
    text.pair_keys, text.pairs = text.pair_keys[:1], text.pairs[:1]
    with pytest.warns(UserWarning, match="1 of 1 candidates were never encoded together with their query"):
        model.predict(None, pd.DataFrame([row]))
    asked = {"query": None, "history_query": ["query-001"]}
    with pytest.warns(UserWarning, match="1 of 1 behaviours were never encoded together with their query"):
        model.predict(None, pd.DataFrame([row | asked]))


def test_a_model_that_reads_times_wants_them(tmp_path: Path) -> None:
    tables, text = write_search(tmp_path)
    trained(tmp_path, "hstu", tables, text)
    with package.at(f"sqlite:///{tmp_path}/mlflow.db"):
        model = tracking.mlflow.pyfunc.load_model("models:/hstu/1").unwrap_python_model()
    import pandas as pd

    row = {"candidates": ["item_id-003"], "history": ["item_id-001", "item_id-002"], "query": None}
    with pytest.raises(UserError, match="history_time_ms is missing, and the model reads when each behaviour was"):
        model.predict(None, pd.DataFrame([row]))
    days = [model.predict(None, pd.DataFrame([row | {"history_time_ms": [0, gap]}]))["score"][0] for gap in (1, 10**9)]
    assert np.isfinite(days).all()
