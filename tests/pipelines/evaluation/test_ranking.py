"""Test the evaluation of retrieval models, its record in MLflow, and batch inference."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.errors import UserError
from core.schemas import Inputs, PredictionsInfo, RunRef
from core.tables import open_table, table_hashes, writing
from jobs.evaluate import Config, run
from models.dataset.dataset import Dataset
from models.loaded_model import load_model
from models.metrics.per_user_metrics import decode_values
from models.retrieval.data import Catalogue
from models.retrieval.requests import RETRIEVAL
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines import tracking
from pipelines.evaluation.inference import infer_all
from pipelines.evaluation.ranking import evaluate
from pipelines.evaluation.result import load_test_metrics, record_result
from tests.fixtures.commands import (
    count_train_targets,
    load_split,
    read_column,
    read_rows,
    read_table,
)
from tests.fixtures.training_tables import change_sequences, write_tables
from tests.fixtures.trainings import SASREC, TIGER, build_training


@dataclass
class Evaluation:
    """Tables, and a checkpoint of each model with its MLflow run."""

    folder: Path
    tables: str
    sids: str
    uri: str

    def config(self, name: str, **options: Any) -> Config:
        """Return the options of an evaluation of a model."""
        path = self.checkpoint_path(name)
        return Config(checkpoint=path, tables=self.tables, sids=self.sids, **options)

    def checkpoint_path(self, name: str) -> str:
        """Return the path of a model's checkpoint."""
        return str(self.folder / name)

    def load(self, name: str) -> tuple[torch.nn.Module, checkpoint.Checkpoint]:
        """Load a model and the description of its checkpoint."""
        catalogue = Catalogue.load(Inputs(self.tables, self.sids))
        return load_model(self.checkpoint_path(name), catalogue)

    def load_examples(self, split: str, **options: Any) -> Dataset:
        """Load the examples of a split."""
        return load_split(RETRIEVAL, f"{self.tables}/sequences", split, **options)

    def read_item_ids(self) -> list[str]:
        """Return the item ids by item index."""
        return read_column(self.tables, "items", "item_id")


def collate_user(examples: Dataset, number: int) -> Any:
    """Return the batch of one example."""
    return examples.collate(np.array([number]))


@pytest.fixture(scope="module")
def evaluation(new_store, tmp_path_factory) -> Evaluation:
    """Save a SASRec and a TIGER, untrained, with their MLflow runs."""
    folder = tmp_path_factory.mktemp("evaluation")
    tables, sids = write_tables(folder / "small", parts=2)
    uri = new_store(folder)
    for name, model in [("sasrec-1", SASREC), ("tiger", TIGER)]:
        fit = FitConfig(batch_size=8, seed=1)
        setup = build_training(model, fit, Inputs(tables, sids))
        run = tracking.open_run(
            uri,
            "retrieval/small",
            name,
            str(folder),
            config={"model": model, "fit": vars(fit)},
            hashes=table_hashes(setup.catalogue.versions),
        )
        saved = setup.checkpoint(epoch=1, step=4, tracking=vars(run))
        checkpoint.save(folder / name, setup.model, saved)
        tracking.Logger(run).end()
    return Evaluation(folder, tables, sids, uri)


@pytest.mark.parametrize("name", ["sasrec-1", "tiger"])
def test_metrics_equal_those_of_ranking_each_user_alone(evaluation, name):
    model, saved = evaluation.load(name)
    max_history = saved.model.get("max_history", 20)
    examples = evaluation.load_examples("test", max_history=max_history)
    ranks = []  # of each user's target among all 24 items
    top_items = []  # the first ten items of every user
    for number in range(len(examples)):
        batch = collate_user(examples, number)
        ranking = model.recommend(batch, 24)[0][0].tolist()
        ranks.append(ranking.index(batch.target.item()))
        top_items += ranking[:10]

    result, _ = evaluate(evaluation.config(name, batch_size=7))

    assert result.examples == len(ranks) == 60
    for k in (1, 5, 10, 20):
        recall = sum(rank < k for rank in ranks) / 60
        assert result.metrics[f"recall@{k}"] == pytest.approx(recall)
        gains = sum(1 / math.log2(rank + 2) for rank in ranks if rank < k)
        assert result.metrics[f"ndcg@{k}"] == pytest.approx(gains / 60)

    train_counts = count_train_targets(evaluation.tables)
    new_items = [item for item in top_items if item not in train_counts]
    assert result.metrics["coverage@10"] == len(set(top_items)) / 24
    assert result.metrics["new_items@10"] == len(new_items) / len(top_items)
    assert 0 < result.metrics["gini@10"] < 1

    # Values of every user, in the order of the table's rows.
    recalls, num_requests = decode_values(result.by_user["recall@10"])
    assert recalls.tolist() == [float(rank < 10) for rank in ranks]
    assert set(num_requests) == {1}
    gains_by_user = [1 / math.log2(rank + 2) if rank < 10 else 0.0 for rank in ranks]
    assert decode_values(result.by_user["ndcg@10"])[0] == pytest.approx(
        gains_by_user, rel=2**-11
    )


def test_requests_without_a_history_are_measured_by_popularity(
    evaluation, ray_local, tmp_path
):
    def forget(user: dict[str, Any]) -> dict[str, Any]:
        """Leave every third user's test request without a history."""
        if int(user["user_id"][-4:]) % 3 == 0:
            user["requests"][-1]["history_end"] = 0
        return user

    tables = shutil.copytree(evaluation.tables, tmp_path / "tables")
    change_sequences(str(tables), forget)
    counts = count_train_targets(evaluation.tables)
    popular = sorted(range(24), key=lambda item: (-counts[item], item))[:10]
    gains = []
    for user in read_rows(tables, "sequences")[::3]:
        (target,) = user["requests"][-1]["candidates"]
        rank = popular.index(target) if target in popular else math.inf
        gains.append(1 / math.log2(rank + 2))

    path = str(tmp_path / "sasrec")
    setup = build_training(SASREC, FitConfig(batch_size=8), Inputs(str(tables)))
    checkpoint.save(path, setup.model, setup.checkpoint(epoch=1))
    config = Config(checkpoint=path, tables=str(tables))
    for shards in (1, 2):
        result, _ = evaluate(replace(config, shards=shards))

        assert result.skipped == len(gains) == 20
        assert result.examples == 40
        recall = sum(gain > 0 for gain in gains) / 20
        expected = {"recall@10": recall, "ndcg@10": sum(gains) / 20}
        assert result.without_history == pytest.approx(expected)
        assert 0 < recall < 1


def test_evaluation_in_shards_equals_the_whole(evaluation, ray_local):
    config = evaluation.config("sasrec-1", split="val")
    whole, _ = evaluate(config)
    sharded, _ = evaluate(replace(config, shards=2))
    remote, _ = evaluate(config, in_ray=True)

    assert sharded.examples == whole.examples
    assert sharded.metrics == pytest.approx(whole.metrics)
    assert sharded.device == "2 x cpu, 1 threads"
    assert remote.metrics == pytest.approx(whole.metrics)


def test_results_are_logged_to_the_training_run(evaluation, capsys):
    for name in ("tiger", "sasrec-1"):
        run(evaluation.config(name))
    assert "sasrec on test: 60 requests of 60 users, seed 1" in capsys.readouterr().out

    saved = checkpoint.read(evaluation.checkpoint_path("sasrec-1"))
    metrics = load_test_metrics(RunRef(**saved.tracking))
    path = evaluation.checkpoint_path("tiger")
    run_id = checkpoint.read(path).tracking["run_id"]
    tags = tracking.connect(evaluation.uri).get_run(run_id).data.tags
    # the row of a student depends on the teacher that has these weights
    assert tags[tracking.WEIGHTS_TAG] == checkpoint.weights_hash(path)
    file = Path(evaluation.checkpoint_path("sasrec-1"), "evaluation-test.json")
    written = json.loads(file.read_text())
    assert metrics["test/ndcg_at_10"] == written["metrics"]["ndcg@10"]
    assert metrics["test/examples"] == written["examples"] == 60
    assert metrics["test/requests_per_s"] > 0


def test_an_evaluation_with_other_options_is_recorded_separately(evaluation):
    folder = Path(evaluation.checkpoint_path("tiger"))
    run(evaluation.config("tiger"))
    run(evaluation.config("tiger", beam=6))

    first = json.loads((folder / "evaluation-test.json").read_text())
    other = json.loads((folder / "evaluation-test-beam-6.json").read_text())

    assert "beam" not in first["options"]
    assert other["options"]["beam"] == 6


def test_nan_metrics_are_written_as_null(evaluation):
    result, checked = evaluate(evaluation.config("tiger", split="val"))
    result.metrics["gauc"] = math.nan

    path = record_result(result, checked.checkpoint)

    assert json.loads(Path(path).read_text())["metrics"]["gauc"] is None


def test_recommendations_of_all_users_are_written_to_a_table(
    evaluation, ray_local, tmp_path, capfd
):
    output = str(tmp_path / "out")
    config = evaluation.config("tiger", batch_inference=output, k=5)

    manifest, existed = infer_all(replace(config, batch_size=7, shards=2))

    assert "core_worker" not in capfd.readouterr().err
    assert not existed
    assert manifest.rows == 60
    assert manifest.info.below_k == 0
    # The table of sequences has two files of 30 users.
    assert [part.rows for part in manifest.files] == [30, 30]
    table = read_table(output).to_pydict()
    assert table["user_id"] == [f"user-{i:04d}" for i in range(60)]
    item_ids = evaluation.read_item_ids()
    model, _ = evaluation.load("tiger")
    examples = evaluation.load_examples("next")
    for user in (0, 31, 59):
        items, scores = model.recommend(collate_user(examples, user), 5)
        assert table["item_id"][user] == [item_ids[item] for item in items[0].tolist()]
        assert table["score"][user] == pytest.approx(scores[0].tolist(), rel=1e-4)

    # The same options find the table; others need --overwrite and no other writer.
    assert infer_all(config) == (open_table(output, PredictionsInfo), True)
    with pytest.raises(UserError, match="was made with k 5, not 4"):
        infer_all(replace(config, k=4))
    with (
        writing(output),
        pytest.raises(UserError, match="is being written by another process"),
    ):
        infer_all(replace(config, k=4, overwrite=True))


def test_recommendations_can_be_restricted_to_allowed_items(
    evaluation, ray_local, tmp_path, capsys
):
    item_ids = evaluation.read_item_ids()
    stock = tmp_path / "stock.txt"
    stock.write_text("\n".join(item_ids[::5]))
    options: dict[str, Any] = {"allowed": str(stock), "k": 24, "unseen": True}
    with pytest.raises(ValueError, match="allowed is given without batch_inference"):
        evaluation.config("tiger", **options)
    output = str(tmp_path / "out")
    config = evaluation.config("tiger", batch_inference=output, **options)

    run(config)

    assert "or the beam search" in capsys.readouterr().out
    model, _ = evaluation.load("tiger")
    examples = evaluation.load_examples("next", max_history=1000)
    batch = examples.collate(np.arange(60))
    rankings, _ = model.recommend(batch, 24, unseen=True)
    expected = [
        [item_ids[item] for item in ranking if item >= 0 and item % 5 == 0]
        for ranking in rankings.tolist()
    ]
    assert read_table(output).to_pydict()["item_id"] == expected

    run(config)
    assert "already exist" in capsys.readouterr().out
    stock.write_text("\n".join(item_ids[::6]))
    with pytest.raises(UserError, match="was made with allowed "):
        run(config)
