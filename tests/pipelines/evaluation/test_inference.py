"""Batch inference: its scores are those that an evaluation measures and that a served
request gets, and it makes the same table in this process as by Ray."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from jobs.evaluate import Config, run
from models.actions.data import ActionsDataset
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, read_table
from models.training.fit import FitConfig
from pipelines.evaluation.checks import Workers
from pipelines.evaluation.inference import InferenceOptions, infer_all
from pipelines.evaluation.ranking import evaluate
from pipelines.serving.package import write_bundle
from pipelines.serving.served_model import ServedModel
from tests.fixtures.actions_tables import SEEN, TASKS, write_actions
from tests.fixtures.search_tables import write_search
from tests.fixtures.served_models import build_search_requests, serve_ranker
from tests.fixtures.training_tables import write, write_tables
from tests.fixtures.trainings import build_training

SASREC = {"name": "sasrec", "dim": 16, "num_layers": 1, "max_history": 12}


def rows(folder: str, table: str) -> list[dict[str, Any]]:
    return read_table(folder, table).to_pylist()


def test_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, text = write_search(tmp_path / "log", parts=2)
    setup, served = serve_ranker(
        {"name": "qgs"}, tmp_path, tables, text, max_history=12
    )
    given: dict[str, Any] = {
        "checkpoint": str(tmp_path / "qgs"),
        "tables": tables,
        "text": text,
    }
    out = str(tmp_path / "out")
    run(Config(**given, batch_inference=out, batch_size=7))
    assert (
        "Scores of qgs on test: 240 candidates of 40 requests written."
        in capsys.readouterr().out
    )
    found = rows(out, "scores")

    items = read_table(f"{tables}/items", "items")["item_id"].to_pylist()
    queries = [*read_table(f"{tables}/queries", "queries")["query"].to_pylist(), None]
    names, labels, chances, per_request = ("click", "purchase"), [], [], []
    users = [
        (row["user_id"], each)
        for row in rows(f"{tables}/sequences", "sequences")
        for each in row["requests"]
    ]
    asked = [(user, each) for user, each in users if each["split"] == "test"]
    for row, (user, request) in zip(found, asked, strict=True):
        assert (row["user_id"], row["timestamp_ms"]) == (user, request["timestamp_ms"])
        assert row["query"] == queries[request["query_index"]]
        assert row["score_click"] == sorted(row["score_click"], reverse=True)
        place = [
            request["candidates"].index(items.index(item)) for item in row["item_id"]
        ]
        assert sorted(place) == list(range(6))
        labels.append(
            np.array([[request[f"label_{name}"][i] for name in names] for i in place])
        )
        chances.append(np.array([row[f"score_{name}"] for name in names]).T)
        if 0 < labels[-1][:, 0].sum() < 6:
            per_request.append(roc_auc_score(labels[-1][:, 0], chances[-1][:, 0]))
        for i, name in enumerate(names):
            assert row[f"label_{name}"] == labels[-1][:, i].tolist()
    metrics = evaluate(given["checkpoint"], Inputs(tables, text=text))[0].metrics
    label, chance = np.concatenate(labels), np.concatenate(chances).astype(float)
    assert metrics["gauc"] == pytest.approx(np.mean(per_request))
    for i, prefix in enumerate(("", "purchase/")):
        assert metrics[f"{prefix}auc"] == pytest.approx(
            roc_auc_score(label[:, i], chance[:, i]), abs=1e-5
        )
        assert metrics[f"{prefix}log_loss"] == pytest.approx(
            log_loss(label[:, i], chance[:, i]), abs=1e-5
        )

    requests, _ = build_search_requests(setup, tables, 12)
    for name in names:
        answers = served.predict(None, pd.DataFrame(requests), {"label": name})
        for row, items_, scores in zip(
            found[:8], answers["item_id"], answers["score"], strict=True
        ):
            wanted = dict(zip(row["item_id"], row[f"score_{name}"], strict=True))
            assert dict(zip(items_, scores, strict=True)) == pytest.approx(
                wanted, abs=1e-5
            )

    run(Config(**given, batch_inference=out))
    assert (
        "already exist, from the same checkpoint and tables; nothing to do"
        in capsys.readouterr().out
    )
    with pytest.raises(
        UserError,
        match="holds other scores; choose another folder or replace it with --overwrite",
    ):
        run(Config(**given, batch_inference=out, split="val"))
    run(Config(**given, batch_inference=out, split="val", overwrite=True))
    assert (
        "Scores of qgs on val: 240 candidates of 40 requests written."
        in capsys.readouterr().out
    )


def test_feeds(tmp_path: Path) -> None:
    tables = write_actions(tmp_path / "log", items=300, viewers=True, parts=2)
    _, served = serve_ranker(
        {"name": "attn_mvp"}, tmp_path, tables, None, max_history=12
    )
    place, inputs, out = (
        str(tmp_path / "attn_mvp"),
        Inputs(tables),
        str(tmp_path / "out"),
    )
    manifest, _ = infer_all(
        place, inputs, out, InferenceOptions(batch_size=7, users_per_part=20)
    )
    found = rows(out, "scores")
    items = read_table(f"{tables}/items", "items")["item_id"].to_pylist()
    events = {
        (row["user_id"], row["timestamp_ms"][i], items[row["item_index"][i]]): row[
            "tasks"
        ][i]
        for row in rows(f"{tables}/sequences", "sequences")
        for i in range(row["val_end"], len(row["item_index"]))
    }
    scored = {
        (row["user_id"], row["timestamp_ms"], item): scores
        for row in found
        for item, *scores in zip(
            row["item_id"], *(row[f"score_{task}"] for task in TASKS), strict=True
        )
    }
    assert set(scored) == set(events)
    assert (
        len(events) == manifest.info["candidates"]
    )  # nobody is shown an item twice at one time
    labelled = {
        (row["user_id"], row["timestamp_ms"], item): list(labels)
        for row in found
        for item, *labels in zip(
            row["item_id"], *(row[f"label_{task}"] for task in TASKS), strict=True
        )
    }
    assert labelled == {key: list(tasks) for key, tasks in events.items()}
    metrics = evaluate(place, inputs)[0].metrics
    label, chance = (
        np.array([of[key] for key in events], float) for of in (events, scored)
    )
    for i, task in enumerate(TASKS):
        assert metrics[f"{task}/auc"] == pytest.approx(
            roc_auc_score(label[:, i], chance[:, i]), abs=1e-5
        )
        assert metrics[f"{task}/log_loss"] == pytest.approx(
            log_loss(label[:, i], chance[:, i]), abs=1e-5
        )

    devices, examples = (
        ["watch", *SEEN],
        ActionsDataset.load(f"{tables}/sequences", "test", max_history=12),
    )
    users = {
        row["user_id"]: i
        for i, row in enumerate(rows(f"{tables}/sequences", "sequences"))
    }
    of_user = {int(examples.user[number]): number for number in range(len(examples))}
    several = 0
    for row in found[:40]:
        batch = examples.collate(np.array([of_user[users[row["user_id"]]]]))
        past, mine = (
            int(batch.valid.sum()),
            batch.candidate_time[0] == row["timestamp_ms"],
        )
        shown = [items[i] for i in batch.candidate_item[0, mine].tolist()]
        several += len(shown) > 1
        request = {
            "candidates": shown,
            "timestamp_ms": row["timestamp_ms"],
            "viewer_device": devices[batch.candidate_viewer[0, mine][0, 0]],
            "features": batch.candidate_feature[0, mine].tolist(),
            "history": [items[i] for i in batch.item[0, :past].tolist()],
            "history_actions": batch.action[0, :past].tolist(),
            "history_time_ms": batch.time[0, :past].tolist(),
            "history_viewer_device": [
                devices[v] for v in batch.viewer[0, :past, 0].tolist()
            ],
        }
        answer = served.predict(None, pd.DataFrame([request]), {"label": "like"})
        wanted = dict(zip(row["item_id"], row["score_like"], strict=True))
        assert dict(
            zip(answer["item_id"][0], answer["score"][0], strict=True)
        ) == pytest.approx(wanted, abs=1e-5)
    assert several > 3


def test_recommendations(tmp_path: Path) -> None:
    """After a log without its last events, what comes next is what the evaluation asks
    for.
    """
    tables, _ = write_tables(tmp_path / "log")
    setup = build_training(SASREC, FitConfig(batch_size=8), Inputs(tables))
    place = str(tmp_path / "sasrec")
    checkpoint.save(place, setup.model, setup.checkpoint(epoch=1))
    before, sequences = (
        str(tmp_path / "before"),
        read_table(f"{tables}/sequences", "sequences"),
    )
    shutil.copytree(tables, before)
    shorter = [
        {
            name: value[:-1] if isinstance(value, list) else value
            for name, value in row.items()
        }
        for row in sequences.to_pylist()
    ]
    write(
        f"{before}/sequences",
        "sequences",
        pa.Table.from_pylist(shorter, sequences.schema),
        {"kind": "retrieval", "users": 60, "items": 24},
        {},
    )
    out = str(tmp_path / "out")
    infer_all(place, Inputs(before), out, InferenceOptions(k=10))
    found = rows(out, "recommendations")
    items = read_table(f"{tables}/items", "items")["item_id"].to_pylist()
    targets = [items[row["item_index"][-1]] for row in sequences.to_pylist()]
    recall = np.mean(
        [target in row["item_id"] for target, row in zip(targets, found, strict=True)]
    )
    assert evaluate(place, Inputs(tables))[0].metrics["recall@10"] == pytest.approx(
        recall
    )
    assert 0 < recall < 1

    write_bundle(tmp_path / "data", place, Inputs(tables))
    served = ServedModel()
    served.load_context(
        SimpleNamespace(artifacts={"data": str(tmp_path / "data")}, model_config=None)
    )
    requests = [{"history": [items[i] for i in row["item_index"]]} for row in shorter]
    answers = served.predict(None, pd.DataFrame(requests), {"k": 10})
    for row, item, score in zip(
        found, answers["item_id"], answers["score"], strict=True
    ):
        assert item == row["item_id"]
        assert score == pytest.approx(row["score"], abs=1e-5)


@pytest.mark.parametrize(("split", "unseen"), [("test", None), ("val", True)])
def test_figures_of_a_split_can_be_computed_from_its_table(
    split: str, unseen: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, _ = write_tables(tmp_path / "log", parts=2)
    setup = build_training(SASREC, FitConfig(batch_size=8), Inputs(tables))
    place, out = str(tmp_path / "sasrec"), str(tmp_path / "out")
    checkpoint.save(place, setup.model, setup.checkpoint(epoch=1))
    given: dict[str, Any] = {"checkpoint": place, "tables": tables, "split": split}

    run(Config(**given, batch_inference=out, k=20, batch_size=7, unseen=unseen))

    assert (
        f"Recommendations of sasrec on {split}: top 20 of 60 requests written."
        in capsys.readouterr().out
    )
    found = rows(out, "recommendations")
    items = read_table(f"{tables}/items", "items")["item_id"].to_pylist()
    asked = [
        (user["user_id"], place, request, user["item_index"])
        for user in rows(f"{tables}/sequences", "sequences")
        for place, request in enumerate(user["requests"])
        if request["split"] == split
    ]
    for row, (user_id, place_, request, behaviours) in zip(found, asked, strict=True):
        target, past = request["candidates"][0], behaviours[: request["history_end"]]
        assert (row["user_id"], row["request"]) == (user_id, place_)
        assert row["timestamp_ms"] == request["timestamp_ms"]
        assert row["target"] == items[target]
        assert row["target_is_known"] == (target in past)
        assert row["score"] == sorted(row["score"], reverse=True)
        if unseen:
            assert not {items[item] for item in past} & set(row["item_id"])
    options = {"unseen": unseen} if unseen else {}
    metrics = evaluate(place, Inputs(tables), split=split, options=options)[0].metrics
    for prefix, counted in (
        ("", found),
        ("first/", [row for row in found if not row["target_is_known"]]),
    ):
        for k in (1, 10, 20):
            ranks = [
                row["item_id"].index(row["target"])
                if row["target"] in row["item_id"][:k]
                else None
                for row in counted
            ]
            hits = [rank for rank in ranks if rank is not None]
            gains = [1 / np.log2(2 + rank) for rank in hits]
            assert metrics[f"{prefix}recall@{k}"] == len(hits) / len(counted)
            assert metrics[f"{prefix}ndcg@{k}"] == pytest.approx(
                sum(gains) / len(counted)
            )


@pytest.mark.parametrize("name", ["qgs", "attn_mvp"])
def test_ray_makes_the_same_table(name: str, ray_local: None, tmp_path: Path) -> None:
    tables, text = (
        write_search(tmp_path)
        if name == "qgs"
        else (write_actions(tmp_path, viewers=True), None)
    )
    serve_ranker({"name": name}, tmp_path, tables, text, max_history=12)
    given, found = (str(tmp_path / name), Inputs(tables, text=text)), []
    for actors in (1, 2):
        infer_all(
            *given,
            str(tmp_path / f"out{actors}"),
            InferenceOptions(users_per_part=15),
            Workers(actors),
        )
        found.append(rows(str(tmp_path / f"out{actors}"), "scores"))
    for mine, theirs in zip(*found, strict=True):
        for column, value in mine.items():
            assert theirs[column] == (
                pytest.approx(value, abs=1e-6) if column.startswith("score") else value
            )
