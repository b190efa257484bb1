"""Evaluation: the same figures whole, in shards, by brute force and in MLflow; all
users to a table.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from jobs.evaluate import Config, run
from jobs.options import parse
from models.build import load_model
from models.loaded_model import LoadedModel
from models.metrics.per_user_metrics import decode_values
from models.retrieval.data import Catalogue, RetrievalDataset
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, read_manifest, read_table, writing
from models.training.fit import FitConfig
from pipelines import tracking
from pipelines.comparison.load import compare, load_rows
from pipelines.comparison.runs import select
from pipelines.comparison.tables import tables as tables_of
from pipelines.evaluation.checks import Workers
from pipelines.evaluation.inference import InferenceOptions, infer_all
from pipelines.evaluation.ranking import count_trained_items, evaluate
from pipelines.evaluation.record import load_test_metrics, record_result
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training

SASREC = {"name": "sasrec", "dim": 16, "num_layers": 1, "max_history": 12}
TIGER = {
    "name": "tiger",
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "beam": 24,
}


@dataclass
class World:
    """Tables and a checkpoint of each model, with its MLflow run."""

    folder: Path
    tables: str
    sids: str
    uri: str

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.tables, self.sids)

    def place(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture(scope="module")
def world(
    new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> World:
    folder = tmp_path_factory.mktemp("evaluation")
    tables, sids = write_tables(folder / "small", parts=2)
    uri = new_store(folder)
    for name, model, seed in [
        ("sasrec-1", SASREC, 1),
        ("sasrec-2", SASREC, 2),
        ("tiger", TIGER, 1),
    ]:
        fit = FitConfig(batch_size=8, seed=seed)
        setup = build_training(model, fit, Inputs(tables, sids))
        run = tracking.open_run(
            uri,
            "retrieval/small",
            name,
            str(folder),
            config={"model": model, "fit": vars(fit)},
            hashes=setup.catalogue.hashes,
        )
        checkpoint.save(
            folder / name,
            setup.model,
            setup.checkpoint(epoch=1, step=4, tracking=run.to_dict()),
        )
        tracking.Logger(run).end()
    return World(folder, tables, sids, uri)


@pytest.mark.parametrize("name", ["sasrec-1", "tiger"])
def test_metrics_equal_scoring_by_hand(world: World, name: str) -> None:
    result, _ = evaluate(world.place(name), world.inputs, batch_size=7)
    model, about = load_model(
        world.place(name), Catalogue.load(world.tables, world.sids)
    )
    examples = RetrievalDataset.load(
        f"{world.tables}/sequences",
        "test",
        max_history=about.model.get("max_history", 20),
    )
    ranks, top = [], []
    for row in range(
        len(examples)
    ):  # one user at a time, the rank of the target among all 24 items
        batch = examples.collate(torch.tensor([row]).numpy())
        items, _ = model.recommend(batch, 24)
        ranks.append(items[0].tolist().index(batch.target.item()))
        top += items[0, :10].tolist()
    requests = [
        request
        for user in read_table(f"{world.tables}/sequences").to_pylist()
        for request in user["requests"]
    ]
    counts = Counter(
        request["candidates"][0] for request in requests if request["split"] == "train"
    )
    loaded = LoadedModel.load(world.place(name), world.inputs)
    parts = [count_trained_items(loaded, world.inputs, rank, 3) for rank in range(3)]
    assert sum(parts).tolist() == [counts[item] for item in range(24)]
    assert result.metrics["coverage@10"] == len(set(top)) / 24
    assert result.metrics["new_items@10"] == sum(
        item not in counts for item in top
    ) / len(top)
    assert 0 < result.metrics["gini@10"] < 1
    assert result.examples == len(ranks) == 60
    for k in (1, 5, 10, 20):
        assert result.metrics[f"recall@{k}"] == pytest.approx(
            sum(rank < k for rank in ranks) / 60
        )
        gains = sum(1 / math.log2(rank + 2) for rank in ranks if rank < k)
        assert result.metrics[f"ndcg@{k}"] == pytest.approx(gains / 60)
    means, counts = decode_values(
        result.by_user["recall@10"]
    )  # of every user, in the order of the table's rows
    assert means.tolist() == [float(rank < 10) for rank in ranks]
    assert set(counts) == {1}
    gained = [1 / math.log2(rank + 2) if rank < 10 else 0.0 for rank in ranks]
    assert decode_values(result.by_user["ndcg@10"])[0] == pytest.approx(
        gained, rel=2**-11
    )


def test_shards_add_up_to_the_whole(world: World, ray_local: None) -> None:
    whole, _ = evaluate(world.place("sasrec-1"), Inputs(world.tables), split="val")
    shards, _ = evaluate(
        world.place("sasrec-1"), Inputs(world.tables), split="val", workers=Workers(2)
    )
    assert shards.examples == whole.examples
    assert shards.metrics == pytest.approx(whole.metrics)
    assert shards.device == "2 x cpu, 1 threads"
    elsewhere, _ = evaluate(
        world.place("sasrec-1"),
        Inputs(world.tables),
        split="val",
        workers=Workers(remote=True),
    )
    assert elsewhere.metrics == pytest.approx(whole.metrics)


def test_gpus_that_the_cluster_has_not_are_refused(
    world: World, ray_local: None
) -> None:
    with pytest.raises(
        UserError, match=r"1 worker needs 1 GPUs, .* the cluster has 0 GPUs"
    ):
        evaluate(
            world.place("sasrec-1"),
            Inputs(world.tables),
            split="val",
            workers=Workers(2, "cuda"),
        )
    with pytest.raises(UserError, match=r"2 workers need 2 GPUs, .* lower --shards"):
        infer_all(
            world.place("sasrec-1"),
            Inputs(world.tables),
            str(world.folder / "none"),
            workers=Workers(2, "cuda"),
        )


def test_results_reach_the_training_run_and_the_comparison(
    world: World, capsys: pytest.CaptureFixture
) -> None:
    for name in ("sasrec-1", "sasrec-2", "tiger"):
        run(
            Config(
                checkpoint=world.place(name),
                tables=world.tables,
                sids=world.sids if name == "tiger" else None,
            )
        )
    assert "sasrec on test: 60 requests of 60 users, seed 1" in capsys.readouterr().out
    about = checkpoint.read(world.place("sasrec-1"))
    metrics = load_test_metrics(tracking.RunRef(**about.tracking))
    written = json.loads(
        Path(world.place("sasrec-1"), "evaluation-test.json").read_text()
    )
    assert metrics["test/ndcg_at_10"] == written["metrics"]["ndcg@10"]
    assert metrics["test/examples"] == written["examples"] == 60
    assert metrics["test/users_per_s"] > 0

    table, same_users, *_ = tables_of(compare(select(world.uri, ["retrieval/small"])))
    assert [line[2:4] for line in same_users.cells] == [
        ["2", "60"]
    ]  # of TIGER and both of SASRec
    rows = {
        cells[1]: dict(zip(table.header, cells, strict=True)) for cells in table.cells
    }
    assert set(rows) == {"sasrec-*", "tiger"}  # two seeds are one row
    assert rows["sasrec-*"]["seeds"] == "2"
    trainings = [
        tracking.RunRef(**checkpoint.read(world.place(name)).tracking)
        for name in ("sasrec-1", "sasrec-2")
    ]
    values = [load_test_metrics(training)["test/ndcg_at_10"] for training in trainings]
    mean = sum(values) / 2
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values))
    assert rows["sasrec-*"]["test/ndcg@10"] == f"{mean:.4f} ± {deviation:.4f}"
    assert rows["tiger"]["requests"] == "60"
    assert "sample standard deviation" in table.text()
    assert "| sasrec | sasrec-* | 2 |" in table.markdown()


def test_figures_are_printed_where_the_run_is_gone(
    world: World,
    new_store: Callable[[Path], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    for gone in (new_store(tmp_path), "http://127.0.0.1:9"):
        with pytest.raises(
            UserError,
            match=r"are in .*evaluation-val\.json, but not in MLflow: .*; give the --tracking_uri",
        ):
            run(
                Config(
                    checkpoint=world.place("sasrec-2"),
                    tables=world.tables,
                    split="val",
                    tracking_uri=gone,
                )
            )
        assert (
            "sasrec on val: 60 requests of 60 users, seed 2" in capsys.readouterr().out
        )


def test_another_decoder_is_recorded_beside_the_plain_one(world: World) -> None:
    result, about = evaluate(
        world.place("tiger"), world.inputs, options={"beam": 6, "decoder": None}
    )
    place = record_result(result, about)
    assert place.endswith("evaluation-test-beam-6.json")
    rows = {row.name: row for row in load_rows(select(world.uri, ["retrieval/small"]))}
    assert rows["tiger [beam 6]"].values("test/ndcg@10") == [result.metrics["ndcg@10"]]
    assert rows["tiger [beam 6]"].values("test/ndcg@10") != rows["tiger"].values(
        "test/ndcg@10"
    )


def test_what_is_not_defined_is_null(world: World) -> None:
    result, about = evaluate(world.place("tiger"), world.inputs, options={"beam": 7})
    result.metrics["gauc"] = math.nan
    written = Path(record_result(result, replace(about, tracking=None))).read_text()
    content = json.loads(
        written, parse_constant=lambda word: pytest.fail(f"{word} is no JSON")
    )
    assert content["metrics"]["gauc"] is None
    assert content["metrics"]["ndcg@10"] == result.metrics["ndcg@10"]


def test_mistakes_are_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="'sasrec' has no option --beam when recommending"
    ):
        evaluate(world.place("sasrec-1"), Inputs(world.tables), options={"beam": 3})
    with pytest.raises(UserError, match="needs semantic IDs; give --sids"):
        evaluate(world.place("tiger"), Inputs(world.tables))
    with pytest.raises(UserError, match="is not a checkpoint"):
        evaluate(str(tmp_path), Inputs(world.tables))
    with pytest.raises(
        UserError, match=r"'retrieval/smal' is not at .*there are retrieval/small"
    ):
        select(world.uri, ["retrieval/smal"])
    with pytest.raises(
        UserError, match="unknown key 'splitt'; the nearest key is 'split'"
    ):
        parse(Config, ["--checkpoint", "c", "--tables", "t", "--splitt", "val"])
    assert (
        parse(
            Config, ["--checkpoint", "c", "--tables", "t", "--batch-inference", "o"]
        ).batch_inference
        == "o"
    )


def test_all_users_to_a_table(
    world: World, ray_local: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "out")
    arguments = (world.place("tiger"), world.inputs, output)
    manifest, already = infer_all(
        *arguments,
        InferenceOptions(k=5, batch_size=7, users_per_part=25),
        Workers(2),
    )
    assert "core_worker" not in capfd.readouterr().err
    assert not already
    assert manifest.rows == 60
    assert manifest.info["users_below_k"] == 0
    assert [part.rows for part in manifest.files] == [25, 5, 25, 5]  # of two files
    table = read_table(output, "recommendations").to_pydict()
    assert table["user_id"] == [f"user-{i:04d}" for i in range(60)]
    names = read_table(f"{world.tables}/items", "items")["item_id"].to_pylist()
    model, _ = load_model(
        world.place("tiger"), Catalogue.load(world.tables, world.sids)
    )
    examples = RetrievalDataset.load(f"{world.tables}/sequences", "next")
    for user in (0, 31, 59):
        items, scores = model.recommend(
            examples.collate(torch.tensor([user]).numpy()), 5
        )
        assert table["item_id"][user] == [names[item] for item in items[0].tolist()]
        assert table["score"][user] == pytest.approx(scores[0].tolist(), rel=1e-4)
    many, _ = infer_all(
        *arguments[:2], str(tmp_path / "many"), InferenceOptions(k=1000)
    )
    found = read_table(str(tmp_path / "many"), "recommendations").to_pydict()["item_id"]
    assert many.info["users_below_k"] == sum(len(items) < 1000 for items in found) == 60
    assert infer_all(*arguments, InferenceOptions(k=5, users_per_part=25)) == (
        read_manifest(output),
        True,
    )
    with pytest.raises(UserError, match=r"holds other recommendations; .*--overwrite"):
        infer_all(*arguments, InferenceOptions(k=4, users_per_part=25))
    with (
        writing(output),
        pytest.raises(UserError, match="is being written by another process"),
    ):
        infer_all(*arguments, InferenceOptions(k=4, users_per_part=25, overwrite=True))


def test_allowed_items_alone_to_a_table(
    world: World, ray_local: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    items = read_table(f"{world.tables}/items", "items")["item_id"].to_pylist()
    stock = tmp_path / "stock.txt"
    stock.write_text("\n".join(items[::5]))
    options = {
        "checkpoint": world.place("tiger"),
        "tables": world.tables,
        "sids": world.sids,
        "allowed": str(stock),
    }
    with pytest.raises(ValueError, match="allowed is given without --batch_inference"):
        Config(**options)
    options |= {"batch_inference": str(tmp_path / "out"), "k": 24, "unseen": True}
    run(Config(**options))
    assert (
        "as the allowed set or the beam search has no more" in capsys.readouterr().out
    )
    model, _ = load_model(
        world.place("tiger"), Catalogue.load(world.tables, world.sids)
    )
    examples = RetrievalDataset.load(
        f"{world.tables}/sequences", "next", max_history=1000
    )
    every, _ = model.recommend(
        examples.collate(torch.arange(60).numpy()), 24, unseen=True
    )
    wanted = [
        [items[item] for item in row if item >= 0 and item % 5 == 0]
        for row in every.tolist()
    ]
    assert (
        read_table(str(tmp_path / "out"), "recommendations").to_pydict()["item_id"]
        == wanted
    )
    run(Config(**options))
    assert "already exist" in capsys.readouterr().out
    stock.write_text("\n".join(items[::6]))
    with pytest.raises(UserError, match="holds other recommendations"):
        run(Config(**options))


def test_all_known_items_are_left_out_however_little_the_model_reads(
    world: World, ray_local: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    setup = build_training(
        {**SASREC, "max_history": 2}, FitConfig(batch_size=8), Inputs(world.tables)
    )
    checkpoint.save(tmp_path / "short", setup.model, setup.checkpoint(epoch=1))
    arguments = (str(tmp_path / "short"), Inputs(world.tables))
    result = run(Config(checkpoint=arguments[0], tables=world.tables, unseen=True))
    whole = RetrievalDataset.load(f"{world.tables}/sequences", "test", max_history=1000)
    hits, repeats, longest = 0, 0, 0
    for row in range(len(whole)):
        batch = whole.collate(torch.tensor([row]).numpy())
        target, known = batch.target.item(), set(batch.history[0].tolist())
        ranked = [
            item
            for item in setup.model.recommend(batch, 24)[0][0].tolist()
            if item not in known
        ]
        hits += target in ranked[:10]
        repeats += target in known
        longest = max(longest, int(batch.history_length))
    assert result.metrics["recall@10"] == pytest.approx(hits / len(whole))
    assert longest > 2
    assert repeats > 0
    assert (
        f"note: {repeats} requests of 60 have a target from the history, which --unseen"
        in capsys.readouterr().out
    )
    options = {"unseen": True}
    infer_all(
        *arguments,
        str(tmp_path / "out"),
        InferenceOptions(k=24, recommend=options),
    )
    found = read_table(str(tmp_path / "out"), "recommendations").to_pydict()["item_id"]
    names = read_table(f"{world.tables}/items", "items")["item_id"].to_pylist()
    after = RetrievalDataset.load(f"{world.tables}/sequences", "next", max_history=1000)
    for row, items in enumerate(found):
        history = after.collate(torch.tensor([row]).numpy()).history[0].tolist()
        assert sorted(items) == sorted(set(names) - {names[item] for item in history})
