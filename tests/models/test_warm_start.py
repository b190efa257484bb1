"""A model of one day on the tables of the next: scores of old items stay, new items
begin as unknown.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.loaded_model import LoadedModel
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, read_manifest, read_table
from models.training.fit import FitConfig, fit
from models.training_run import TrainingRun
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import parse_log
from pipelines.data.settings import read_config
from tests.fixtures.trainings import build_training

DAY = 86_400_000
BEGIN = 1_750_000_000_000 // DAY * DAY
OF_KIND: dict[str, dict[str, Any]] = {
    "retrieval": {"kind": "retrieval"},
    "actions": {"kind": "actions"},
}
MODELS: dict[str, dict[str, Any]] = {
    "sasrec": {"name": "sasrec", "dim": 8, "num_layers": 1, "num_heads": 1},
    "attn_lfa": {
        "name": "attn_lfa",
        "width": 8,
        "num_layers": 1,
        "num_heads": 1,
        "ffn": 8,
        "experts": 1,
    },
}
KIND = {"sasrec": "retrieval", "attn_lfa": "actions"}
PLACES = ("rome", "oslo")
CONFIG = {
    "core": 0,
    "min_matched": 0,
    "split": {"kind": "temporal", "val_days": 1, "test_days": 1},
}


def write_day(folder: Path, day: int, items: int, places: tuple[str, ...]) -> None:
    """A day of 12 users on some items; prices rise, and the authors of later items come
    first by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(day)
    rows = ["user,item,ms,like,place,price"]
    for user in range(12):
        for at in sorted(draw.sample(range(DAY), 8)):
            price = "" if draw.random() < 0.2 else str(draw.random() * (day + 1))
            cells = (
                f"u{user}",
                f"i{draw.randrange(items)}",
                BEGIN + day * DAY + at,
                draw.randrange(2),
            )
            rows.append(",".join(map(str, (*cells, draw.choice(places), price))))
    (folder / f"day_{day}.csv").write_text("\n".join(rows) + "\n")
    about = [f"i{i},author{'CBA'[i // 10]},{i if i % 4 else ''}" for i in range(items)]
    (folder / "items.csv").write_text("\n".join(["item,author,size", *about]) + "\n")


def append(folder: Path, kind: str) -> Inputs:
    source = {
        "files": "day_*.csv",
        "format": "csv",
        "user": "user",
        "item": "item",
        "time": {"column": "ms", "unit": "ms"},
        "labels": {"like": "like"},
        "numbers": {"price": "price"},
        "categories": {"place": "place"},
        "items": {
            "files": "items.csv",
            "item": "item",
            "attributes": {"author": "author"},
            "numbers": {"size": "size"},
        },
    }
    config = read_config({**CONFIG, **OF_KIND[kind]})
    prepare(
        parse_log(source),
        str(folder / "raw"),
        str(folder / "tables"),
        config,
        existing="append",
    )
    return Inputs(str(folder / "tables"))


def trained(setup: TrainingRun, where: Path) -> str:
    """The checkpoint that a training leaves."""
    for event in fit(
        setup.model, setup.train, setup.validate, setup.fit, means=setup.means
    ):
        last = event
    about = setup.checkpoint(epoch=1, step=last.step, best={"step": last.step})
    checkpoint.save(where, setup.model, about)
    return str(where)


def config_of(name: str, **options: Any) -> FitConfig:
    metric = "ndcg@10" if name == "sasrec" else "mean/auc"
    return FitConfig(
        max_epochs=1, batch_size=8, lr=0.01, metric=metric, seed=1, **options
    )


@pytest.fixture
def days(tmp_path: Path) -> Any:
    """Days one to three prepared, and what adds three more with new items, authors and
    places.
    """

    def begin(kind: str) -> Inputs:
        for day in range(3):
            write_day(tmp_path / "raw", day, 20, PLACES)
        return append(tmp_path, kind)

    def more(kind: str) -> Inputs:
        for day in range(3, 6):
            write_day(tmp_path / "raw", day, 26, ("bern", *PLACES))
        return append(tmp_path, kind)

    return begin, more


def scores(loaded: LoadedModel, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        if loaded.model.ranks == "catalogue":
            model: Any = loaded.model
            return model.states(batch.history)[:, -1] @ model.item.weight[:20].T
        return loaded.model.score(batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_said_of_old_items_stays(days: Any, tmp_path: Path, name: str) -> None:
    begin, more = days
    inputs = begin(KIND[name])
    uri = trained(
        build_training(MODELS[name], config_of(name), inputs), tmp_path / "one"
    )
    before = LoadedModel.load(uri, inputs)
    examples = before.load_examples(inputs, "test")
    batch = examples.collate(np.arange(len(examples)))
    old_items = [*read_table(f"{inputs.tables}/items")["item_id"].to_pylist()]
    expected = scores(before, batch)

    grown = more(KIND[name])
    assert read_manifest(f"{grown.tables}/items").rows > len(old_items)
    after = LoadedModel.load(uri, grown)
    if name == "attn_lfa":  # bern comes first by name, and moves the others
        moved = [
            torch.where(viewer > 0, viewer + 1, 0)
            for viewer in (batch.viewer, batch.candidate_viewer)
        ]
        batch = replace(batch, viewer=moved[0], candidate_viewer=moved[1])
    assert torch.equal(scores(after, batch), expected)


@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on_with_what_is_newer(
    days: Any, tmp_path: Path, name: str
) -> None:
    begin, more = days
    uri = trained(
        build_training(MODELS[name], config_of(name), begin(KIND[name])),
        tmp_path / "one",
    )
    until = checkpoint.read(uri).learned["until"]
    assert BEGIN + DAY / 2 < until < BEGIN + 3 * DAY / 2
    grown = more(KIND[name])

    def learned_from(replay_fraction: float) -> list[int]:
        """Times of the requests or events that an epoch learns from."""
        setup = build_training(
            MODELS[name],
            config_of(name, replay_fraction=replay_fraction),
            grown,
            init=uri,
        )
        times: list[int] = []
        for batch in setup.train(0, 0):
            if name == "attn_lfa":
                times += batch.time[batch.learn].tolist()
            else:
                rows, at = (
                    batch.user_row[batch.target_row],
                    batch.target_position + 1,
                )
                times += [
                    sequences[row]["timestamp_ms"][place]
                    for row, place in zip(rows, at.tolist(), strict=True)
                ]
        assert setup.learned["since"] == (0 if replay_fraction == 1 else until)
        return sorted(times)

    sequences = read_table(f"{grown.tables}/sequences").to_pylist()
    every, new = learned_from(1), learned_from(0)
    assert new == [time for time in every if time >= until] != []
    assert set(new) < set(learned_from(0.5)) < set(every)


@pytest.mark.parametrize("name", MODELS)
def test_weights_begin_as_they_were(days: Any, tmp_path: Path, name: str) -> None:
    begin, more = days
    uri = trained(
        build_training(MODELS[name], config_of(name), begin(KIND[name])),
        tmp_path / "one",
    )
    setup = build_training(MODELS[name], config_of(name), more(KIND[name]), init=uri)
    table = "item.weight" if name == "sasrec" else "items.tables.0.weight"
    old, now = (
        LoadedModel.load(uri, Inputs(f"{tmp_path}/tables")).model.state_dict()[table],
        setup.model.state_dict()[table],
    )
    assert torch.equal(old, now)
    assert torch.allclose(now[20:], now[:20].mean(0).expand(6, -1))
    assert f"6 new items in {table}" in setup.messages
    if name == "attn_lfa":
        before, after = (checkpoint.read(uri).learned["names"], setup.learned["names"])
        assert (before["items"][-1], after["items"][-1]) == (
            ["oslo", "rome"],
            ["bern", "oslo", "rome"],
        )
        assert (before["items"][1], after["items"][1]) == (
            ["authorB", "authorC"],
            ["authorA", "authorB", "authorC"],
        )
        places = setup.model.state_dict()["items.tables.2.weight"]
        assert torch.equal(places[0], places[1])  # unknown, bern
    again = trained(setup, tmp_path / "two")  # and a day later still
    scales = LoadedModel.load(again, Inputs(f"{tmp_path}/tables")).catalogue.scales()
    assert scales == setup.learned["scales"]


def test_what_does_not_follow_is_refused(days: Any, tmp_path: Path) -> None:
    begin, _ = days
    inputs, model = begin("retrieval"), MODELS["sasrec"]
    uri = trained(build_training(model, config_of("sasrec"), inputs), tmp_path / "one")
    with pytest.raises(
        UserError,
        match=r"fit.replay_fraction is 0.5, but there is no checkpoint .*; add --init",
    ):
        build_training(model, config_of("sasrec", replay_fraction=0.5), inputs)
    with pytest.raises(
        UserError,
        match=r"no training example is newer than .*; .* raise fit.replay_fraction",
    ):
        build_training(model, config_of("sasrec", replay_fraction=0), inputs, init=uri)
    with pytest.raises(UserError, match=r"'popularity' is not trained by gradient"):
        build_training({"name": "popularity"}, config_of("sasrec"), inputs, init=uri)
    with pytest.raises(
        UserError,
        match=r"does not fit the model: .* is of \(8,\) there and of \(16,\) here",
    ):
        build_training({**model, "dim": 16}, config_of("sasrec"), inputs, init=uri)
    with pytest.raises(
        UserError, match=r"position.weight is of \(50, 8\) there and of \(60, 8\) here"
    ):
        build_training(
            {**model, "max_history": 60}, config_of("sasrec"), inputs, init=uri
        )
    for day in range(3):
        write_day(tmp_path / "other/raw", day, 20, PLACES)
    other = append(tmp_path / "other", "actions")
    with pytest.raises(
        UserError, match="is a checkpoint of the model 'sasrec', not of 'attn_lfa'"
    ):
        build_training(MODELS["attn_lfa"], config_of("attn_lfa"), other, init=uri)
