"""Run the page of the library, and compare its answers with those of the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import ROOT, read_blocks
from torch.utils.data import DataLoader

import trieline
from core.errors import UserError
from core.schemas import Inputs
from models.dataset.dataset import Dataset
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines.training.record import read_record
from tests.fixtures import search_tables
from tests.fixtures.served_models import build_search_requests, serve_ranker
from tests.fixtures.trainings import build_training
from trieline.trained import TrainedModel

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> dict[str, Any]:
    """Run the code of the page, and return its variables."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "jobs").symlink_to(ROOT / "jobs")
    text = (ROOT / "docs/library.md").read_text()
    variables: dict[str, Any] = {"folder": folder}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for language, code in read_blocks(text):
            assert language == "python"
            exec(code, variables)
    return variables


def test_recommendations_equal_those_of_the_evaluated_model(page):
    """They are those of the next request of a user of the table."""
    model = page["model"]
    users = Dataset.load(model.model, model.loaded.catalogue, "next")
    items, scores = model.model.recommend(users.collate(np.arange(1)), 9)
    user = int(users.examples.user[0])
    history = [model.item_ids[i] for i in page["tables"].sequences["item_index"][user]]
    with pytest.warns(UserWarning, match="2 of .* ids .*: who, what") as warned:
        answer = model.recommend(["who", *history, "what"], k=9)
    assert len(warned) == 1
    assert answer["item_id"].to_list() == [model.item_ids[i] for i in items[0].tolist()]
    torch.testing.assert_close(torch.tensor(answer["score"]).float(), scores[0])

    with pytest.warns(UserWarning, match="most popular items"):
        assert len(model.recommend([], k=4)) == 4
    allowed = model.item_ids[:9]
    answer = model.recommend(allowed[:3], 99, allowed=allowed, unseen=True)
    assert set(answer["item_id"]) == set(allowed[3:])


def test_a_run_is_its_folder_a_checkpoint_or_its_id(page):
    folder: Path = page["folder"]
    record = read_record(str(folder / "runs/sasrec"))
    assert record
    expected = page["model"].recommend(page["history"])
    for run in (f"{folder}/runs/sasrec/best", record.run.run_id):
        model = trieline.load(run, tracking_uri=record.run.uri)
        assert model.recommend(page["history"]).equals(expected)


def test_the_workers_of_a_loader_share_an_epoch(page):
    batches = page["batches"]
    targets = [batch.target for batch in batches]
    loaded = [b.target for b in DataLoader(batches, batch_size=None, num_workers=2)]
    assert len(loaded) == len(targets) > 4
    assert all(map(torch.equal, loaded, targets))


def test_scores_of_candidates_are_those_of_the_model(tmp_path):
    tables, text = search_tables.write_search(tmp_path / "searches", users=10)
    setup, _ = serve_ranker({"name": "base"}, tmp_path, tables, text, max_history=20)
    requests, scores = build_search_requests(setup, tables, 20)
    with pytest.warns(UserWarning, match="without its text encoder"):
        model = TrainedModel(str(tmp_path / "base"), Inputs(tables, text=text), "cpu")
    for request, expected in zip(requests, scores, strict=True):
        answer = dict(model.score(**request).iter_rows())
        assert answer == pytest.approx(expected)
        assert list(answer.values()) == sorted(answer.values(), reverse=True)


def test_a_model_that_is_not_served_is_not_loaded(tmp_path):
    tables, _ = search_tables.write_search(tmp_path / "searches", users=10)
    run = build_training({"name": "shown_order"}, FitConfig(), Inputs(tables))
    checkpoint.save(tmp_path / "shown", run.model, run.checkpoint(epoch=1))
    with pytest.raises(UserError, match="only after results were shown"):
        TrainedModel(str(tmp_path / "shown"), Inputs(tables), "cpu")
