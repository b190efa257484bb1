"""Labels of behaviours in their tokens: those of the tables by a loop, known in time, and read by nothing but what
comes later."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from models.search.data import SearchCatalogue, SearchExamples
from models.search.qgs import QGS, QGSConfig
from models.tables import UserError, join, read_table
from tests.models.search.conftest import READ
from tests.models.search.test_search_models import DEEP, make
from tests.own_features_log import make as make_tables
from tests.own_features_log import make_text


def test_they_are_those_of_the_tables_and_their_scale_is_of_training(search: tuple[str, str]) -> None:
    rows = read_table(join(search[0], "sequences")).to_pylist()
    examples = READ.load(join(search[0], "sequences"), "test", unit="request", max_history=5)
    seen = 0
    for number in range(len(examples)):
        batch = examples.collate(np.array([number]))
        row, end = rows[int(batch["user_row"][0])], int(batch["request_end"][0])
        request = next(r for r in row["requests"] if r["split"] == "test")
        for place in range(end):
            at = request["history_end"] - end + place
            purchase, dwell = batch["history_labels"][0, place].tolist()
            assert purchase == row["label_purchase"][at]
            assert dwell == row["label_dwell"][at] or (math.isnan(dwell) and row["label_dwell"][at] is None)
            seen += 1
    assert seen > 50
    known = []
    for row in rows:
        end = max(request["history_end"] for request in row["requests"] if request["split"] == "train")
        known += [value for value in row["label_dwell"][:end] if value is not None]
    labels = SearchCatalogue.load(*search).behaviour_labels
    assert {name: label.number for name, label in labels.items()} == {"purchase": False, "dwell": True}
    assert (labels["dwell"].mean, labels["dwell"].std) == pytest.approx((np.mean(known), np.std(known)))
    assert "history_labels" not in SearchExamples.load(join(search[0], "sequences"), "val").collate(np.arange(2))


def test_a_token_is_that_without_labels_and_what_a_loop_adds(catalogue: SearchCatalogue, batch: Any) -> None:
    model, scale = make("qgs_labels", catalogue), catalogue.behaviour_labels["dwell"]
    with torch.no_grad():
        tokens = model.history_tokens(batch)
        found, without = model.inputs(batch, tokens), model.project(tokens)
        weight = model.token_labels.project.weight
        for b, length in enumerate(batch["history_length"].tolist()):
            for t in range(length):
                purchase, dwell = batch["history_labels"][b, t].tolist()
                there = not math.isnan(dwell)
                scaled = min(5.0, max(-5.0, (dwell - scale.mean) / scale.std)) if there else 0.0
                want = without[b, t] + purchase * weight[:, 0] + scaled * weight[:, 1] + there * weight[:, 2]
                torch.testing.assert_close(found[b, t], want)


def test_the_next_item_is_predicted_without_its_own_labels(catalogue: SearchCatalogue, batch: Any) -> None:
    model = make("qgs_labels", catalogue)
    moved = {**batch, "history_labels": batch["history_labels"].clone()}
    for row, length in enumerate(batch["history_length"].tolist()):  # the last behaviours, which no prediction follows
        moved["history_labels"][row, max(0, length - 1)] = torch.tensor([0.0, 59.0])
    with torch.no_grad():
        infonce = [model(given)["infonce"] for given in (batch, moved)]
        assert torch.equal(*infonce)
        moved["history_labels"][:, 0] = torch.tensor([0.0, 59.0])
        assert not torch.equal(model(moved)["infonce"], infonce[0])


def test_a_name_that_is_no_label_of_behaviours_is_refused(catalogue: SearchCatalogue) -> None:
    for name, near in (("purchas", "purchase"), ("click", "dwell|purchase")):  # all behaviours are clicks
        with pytest.raises(
            UserError, match=f"token_labels has '{name}', which is no label .*; the nearest is '({near})'"
        ):
            QGS(QGSConfig(**DEEP, token_labels=[name]), catalogue)


SOURCE: dict[str, Any] = {
    "files": "events.csv",
    "user": "user",
    "item": "item",
    "request": "search",
    "query": "query",
    "time": {"column": "at", "unit": "ms"},
    "labels": {
        "click": {"column": "click", "time": "clicked_at"},
        "buy": {"column": "buy"},
        "keep": {"column": "keep", "time": "kept_at"},
        "dwell": {"column": "dwell", "type": "float32"},
    },
}
PREPARE = {"kind": "search", "core": 0, "behaviour": "click", "split": {"kind": "temporal"}}
HOUR, BEGIN = 3_600_000, 1_700_000_000_000


def log(users: int = 12, searches: int = 12, shown: int = 4) -> list[dict[str, Any]]:
    """Clicks are known minutes after the search; what is kept is known with the click or hours later."""
    rng, rows = np.random.default_rng(0), []
    for user in range(users):
        for number, hour in enumerate(sorted(rng.choice(2000, searches, replace=False).tolist())):
            for item in rng.choice(9, shown, replace=False).tolist():
                at, click = BEGIN + hour * HOUR + user, bool(rng.random() < 0.5)
                clicked = at + int(rng.integers(1, 40)) * 60_000
                kept = int(rng.choice([at, clicked, clicked + 1, clicked + 900 * HOUR]))
                rows.append(
                    {
                        "user": f"u{user}", "search": f"s{user}-{number}", "query": f"q{number % 3}",
                        "item": f"i{item}", "at": at, "click": int(click), "clicked_at": clicked,
                        "buy": int(click and rng.random() < 0.5),
                        "keep": int(click and rng.random() < 0.7), "kept_at": kept,
                        "dwell": float(rng.integers(1, 60)) if rng.random() < 0.8 else None,
                    }
                )  # fmt: skip
    return rows


def prepared(folder: Path, rows: list[dict[str, Any]]) -> str:
    raw = folder / "raw"
    raw.mkdir(parents=True)
    pl.DataFrame(rows, infer_schema_length=None).write_csv(raw / "events.csv")
    return make_tables(folder, raw, SOURCE, of_kind=PREPARE)


def test_what_is_known_later_and_what_candidates_have_changes_no_score(tmp_path: Path) -> None:
    rows = log()
    tables = prepared(tmp_path / "first", rows)
    config = QGSConfig(**(DEEP | {"max_history": 50}), token_labels=["buy", "keep", "dwell"])
    catalogue = SearchCatalogue.load(tables, make_text(tmp_path, tables))
    torch.manual_seed(0)
    model = QGS(config, catalogue).eval()

    def scores(tables: str) -> tuple[dict[tuple[int, int], torch.Tensor], dict[tuple[int, int], int]]:
        """Of each search by its user and time, and how many behaviours it reads."""
        found, past = {}, {}
        for split in ("train", "val", "test"):
            examples = SearchExamples.of_model(config).load(join(tables, "sequences"), split, max_history=50)
            for number in range(len(examples)):
                batch = examples.collate(np.array([number]))
                with torch.no_grad():
                    of = model.score(batch)
                for place, (time, end) in enumerate(zip(batch["request_time"], batch["request_end"], strict=True)):
                    key = int(batch["user"][0]), int(time)
                    found[key], past[key] = of[batch["candidate_request"] == place], int(end)
        return found, past

    before, past = scores(tables)
    assert max(past.values()) > 15
    times = sorted(time for _, time in before)
    for moment in (times[len(times) // 2], times[-10]):
        later = copy.deepcopy(rows)
        for row in later:  # all that is said of what was shown at the moment or after it, and what was kept late
            if row["at"] >= moment:
                row["buy"], row["keep"], row["dwell"] = 1 - row["buy"], 1 - row["keep"], 5.0
            elif row["kept_at"] > row["clicked_at"]:
                row["keep"] = 1 - row["keep"]
        after, _ = scores(prepared(tmp_path / f"later-{moment}", later))
        early = [key for key in before if key[1] <= moment]
        assert len(early) > 50
        assert all(torch.equal(before[key], after[key]) for key in early)
        assert any(not torch.equal(before[key], after[key]) for key in before if key[1] > moment)
