"""Permutation importance: nothing for what a model does not read, and for the rest what an exchange by hand loses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.evaluate import Config, run
from models import checkpoint, registry
from models.actions.data import ActionsExamples
from models.families import ACTIONS, SEARCH
from models.fit import FitConfig
from models.inputs import Inputs
from models.search.data import SearchCatalogue, SearchExamples
from models.search.inputs import feature_groups
from models.setup import Setup, set_up
from models.tables import UserError, join
from papers.tables import importance_tables
from pipelines import tracking
from pipelines.comparison.rows import rows_of
from pipelines.comparison.runs import select
from pipelines.evaluation.importance import importance
from tests.actions_tables import write_actions
from tests.search_tables import write_search
from tests.training_tables import write_tables

QGS = {"name": "qgs", "width": 16, "num_layers": 1, "max_history": 6, "dropout": 0.0}
MVP = {
    "name": "attn_mvp",
    "width": 16,
    "num_layers": 1,
    "num_heads": 2,
    "ffn": 24,
    "expert_width": 8,
    "tower_width": 6,
    "dropout": 0.0,
    "max_history": 10,
}


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_search(tmp_path_factory.mktemp("importance"))


@pytest.fixture(scope="module")
def actions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_actions(tmp_path_factory.mktemp("importance"), viewers=True)


def made(
    model: dict[str, Any], metric: str, tables: str, text: str | None = None
) -> Setup:
    torch.manual_seed(0)
    setup = set_up(model, FitConfig(metric=metric), Inputs(tables, text=text))
    with torch.no_grad():
        for parameter in setup.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return setup


def zero(*layers: torch.nn.Linear) -> None:
    with torch.no_grad():
        for layer in layers:
            layer.weight.zero_()
            if layer.bias is not None:
                layer.bias.zero_()


def test_what_a_search_model_does_not_read_is_worth_nothing(
    search: tuple[str, str], tmp_path: Path
) -> None:
    tables, text = search
    setup = made(QGS, "gauc", tables, text)
    model: Any = setup.model
    zero(model.head[2], model.text.document, model.text.of_query)
    groups = feature_groups(setup.catalogue.features, setup.catalogue.groups)
    with torch.no_grad():
        model.dnn[0].weight[:, groups["cross"]] = 0.0
        model.groups.groups[list(groups).index("cross")].weight.zero_()
    checkpoint.save(tmp_path / "qgs", model, setup.checkpoint(epoch=1))
    found = importance(
        str(tmp_path / "qgs"), Inputs(tables, text=text), repeats=2, batch_size=7
    )
    assert (found.metric, found.repeats) == ("gauc", 2)
    assert set(found.losses) == {
        "history",
        "text",
        *(f"features: {name}" for name in groups),
    }
    for name in ("history", "text", "features: cross"):
        assert (found.losses[name].mean, found.losses[name].deviation) == (0.0, 0.0), (
            name
        )
    assert found.losses["features: document"].deviation > 0


def test_the_loss_of_a_group_is_that_of_an_exchange_by_hand(
    search: tuple[str, str], tmp_path: Path
) -> None:
    tables, text = search
    setup = made({"name": "base"}, "auc", tables, text)
    checkpoint.save(tmp_path / "base", setup.model, setup.checkpoint(epoch=1))
    found = importance(
        str(tmp_path / "base"),
        Inputs(tables, text=text),
        repeats=1,
        batch_size=9,
        seed=4,
    )
    assert "history" not in found.losses
    scorer: Any = registry.load(tmp_path / "base", SearchCatalogue.load(tables, text))[
        0
    ].eval()
    examples = SearchExamples.load(
        join(tables, "sequences"), "test", unit="request", max_history=100
    )
    places = feature_groups(setup.catalogue.features, setup.catalogue.groups)[
        "document"
    ]
    generator = torch.Generator().manual_seed(4)
    auc = {}
    for exchange in (False, True):
        scores, labels = [], []
        for rows in examples.bounded(examples.chosen(0), 9):
            batch = examples.collate(rows)
            if exchange:
                order = torch.randperm(len(batch["features"]), generator=generator)
                batch["features"][:, places] = batch["features"][order][:, places]
            with torch.no_grad():
                scores += scorer.score(batch)[:, 0].tolist()
            labels += batch["labels"][:, 0].tolist()
        s, y = np.array(scores), np.array(labels, bool)
        auc[exchange] = np.mean(np.sign(s[y][:, None] - s[~y]) / 2 + 0.5)
    assert found.value == pytest.approx(auc[False], abs=1e-3)
    assert found.losses["features: document"].mean == pytest.approx(
        auc[False] - auc[True], abs=2e-3
    )


def test_requests_take_the_past_of_others_and_keep_the_rest(
    search: tuple[str, str],
) -> None:
    tables, text = search
    setup = made(QGS, "gauc", tables, text)
    batch = SearchExamples.load(
        join(tables, "sequences"), "test", unit="request", max_history=6
    ).collate(np.arange(12))
    shuffle = SEARCH.shuffles(setup.model, setup.catalogue)["history"]
    order = torch.randperm(
        len(batch["request_row"]), generator=torch.Generator().manual_seed(3)
    )
    with shuffle(setup.model, batch, torch.Generator().manual_seed(3)) as other:
        assert torch.equal(other["request_row"], batch["request_row"][order])
        assert torch.equal(other["request_end"], batch["request_end"][order])
        assert all(
            other[name] is batch[name]
            for name in batch
            if name not in ("request_row", "request_end")
        )


@pytest.mark.parametrize("options", [{}, {"next_item": "document", "match": True}])
def test_texts_are_exchanged_only_meanwhile(
    options: dict[str, Any], search: tuple[str, str], tmp_path: Path
) -> None:
    tables, text = search
    setup = made(QGS | options, "gauc", tables, text)
    if options:  # nothing but the match is read of candidates
        zero(setup.model.text.of_query)  # type: ignore[union-attr, arg-type]
        with torch.no_grad():
            for tower in setup.model.towers:  # type: ignore[union-attr]
                tower[0].weight[:, :-1] = 0.0  # type: ignore[index]
    checkpoint.save(tmp_path / "qgs", setup.model, setup.checkpoint(epoch=1))
    model: Any = registry.load(tmp_path / "qgs", SearchCatalogue.load(tables, text))[
        0
    ].eval()
    batch = SearchExamples.load(
        join(tables, "sequences"), "test", unit="request", max_history=6
    ).collate(np.arange(12))
    shuffle = SEARCH.shuffles(model, setup.catalogue)["text"]
    with torch.no_grad():
        before = model.score(batch)
        with shuffle(model, batch, torch.Generator().manual_seed(3)) as other:
            assert not torch.equal(model.score(other), before)
        assert torch.equal(model.score(batch), before)


def test_a_model_of_actions(actions: str, tmp_path: Path) -> None:
    setup = made(MVP, "mean/rig", actions)
    model: Any = setup.model
    width = model.states_width * model.config.width
    with (
        torch.no_grad()
    ):  # the head reads no counts of items, and items not by their id
        for name, weight in model.head.named_parameters():
            if weight.ndim > 1 and width + 2 in weight.shape:
                axis = weight.shape.index(width + 2)
                weight.index_fill_(axis, torch.tensor([width]), 0.0)
                assert name
    checkpoint.save(tmp_path / "mvp", model, setup.checkpoint(epoch=1))
    found = importance(str(tmp_path / "mvp"), Inputs(actions), repeats=2, batch_size=8)
    assert set(found.losses) == {
        "history",
        "item",
        "viewer",
        "features: item",
        "features: user",
    }
    assert (
        found.losses["features: item"].mean,
        found.losses["features: item"].deviation,
    ) == (0.0, 0.0)
    assert found.losses["features: user"].mean != 0
    examples = ActionsExamples.load(join(actions, "sequences"), "test", max_history=10)
    batch = examples.collate(np.arange(len(examples)))
    shuffles = ACTIONS.shuffles(model, setup.catalogue)
    with shuffles["item"](model, batch, torch.Generator().manual_seed(1)) as other:
        valid = batch["candidate_valid"]
        assert sorted(other["candidate_item"][valid].tolist()) == sorted(
            batch["candidate_item"][valid].tolist()
        )
        assert torch.equal(
            other["candidate_item"][~valid], batch["candidate_item"][~valid]
        )
    with shuffles["history"](model, batch, torch.Generator().manual_seed(1)) as other:
        order = torch.randperm(len(valid), generator=torch.Generator().manual_seed(1))
        for name in ("item", "time", "action", "valid"):
            assert torch.equal(other[name], batch[name][order])
        assert other["candidate_item"] is batch["candidate_item"]


def test_evaluate_prints_keeps_and_draws_it(
    search: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    new_store: Callable[[Path], str],
) -> None:
    tables, text = search
    setup = made(QGS, "gauc", tables, text)
    config = {"model": QGS, "fit": {"metric": "gauc"}}
    ref = tracking.open_run(
        new_store(tmp_path), "search/x", "qgs", str(tmp_path), config=config, hashes={}
    )
    tracking.Logger(ref).end()
    checkpoint.save(
        tmp_path / "qgs", setup.model, setup.checkpoint(epoch=1, tracking=ref.to_dict())
    )
    given = {
        "checkpoint": str(tmp_path / "qgs"),
        "tables": tables,
        "text": text,
        "device": "cpu",
    }
    run(Config(importance=True, **given))
    said = capsys.readouterr().out
    assert "importance: loss of gauc" in said
    kept = json.loads((tmp_path / "qgs/evaluation-test.json").read_text())["metrics"]
    (line,) = [
        line.split() for line in said.splitlines() if line.split()[:1] == ["history"]
    ]
    assert line == [
        "history",
        f"{kept['importance/history']:+.4f}",
        "±",
        f"{kept['importance/history_sd']:.4f}",
    ]
    drawn = (tmp_path / "qgs/importance-test.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    logged = tracking.connect(ref.uri).download_artifacts(
        ref.run_id, "importance-test.png"
    )
    assert Path(logged).read_bytes() == drawn
    (table,) = importance_tables(rows_of(select(ref.uri, ["search/x"])))
    assert (
        table.cells[0][2 + table.header[2:].index("history")]
        == f"{kept['importance/history']:.4f}"
    )


def test_who_ranks_no_candidates_is_told(tmp_path: Path) -> None:
    tables, _ = write_tables(tmp_path / "small")
    setup = set_up({"name": "popularity"}, FitConfig(), Inputs(tables))
    checkpoint.save(tmp_path / "popularity", setup.model, setup.checkpoint(epoch=1))
    with pytest.raises(
        UserError, match="the model 'popularity' ranks none; leave it out"
    ):
        run(
            Config(
                checkpoint=str(tmp_path / "popularity"), tables=tables, importance=True
            )
        )
