"""A model of one day on the tables of later days: scores of old items stay, new items
start as unknown items, and training continues on newer examples.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.errors import UserError
from core.schemas import Inputs
from core.tables import read_manifest
from models.dataset.dataset import Dataset
from models.loaded_model import LoadedModel
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training.loop import fit
from models.training_run import TrainingRun
from models.warm_start import extend_values
from tests.fixtures.commands import LOG, prepare_log, read_rows
from tests.fixtures.trainings import CASES, build_training, first_epoch

DAY_MS = 86_400_000
FIRST_DAY_MS = 1_750_000_000_000 // DAY_MS * DAY_MS
MODELS = {
    "sasrec": {**CASES["sasrec"], "max_history": 100},
    "attn_lfa": CASES["attn_lfa"],
}
KINDS = {"sasrec": "retrieval", "attn_lfa": "actions"}
PLACES = ("rome", "oslo")
CONFIG = {
    "core": 0,
    "min_matched": 0,
    "split": {"by": "temporal", "val_days": 1, "test_days": 1},
}


def write_day(folder: Path, day: int, items: int, places: tuple[str, ...]) -> None:
    """Write a day of 12 users on some items.

    Prices rise, and the authors of later items are earlier in alphabetical order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(day)
    rows = ["user,item,ms,like,place,price"]
    for user in range(12):
        for time in sorted(rng.sample(range(DAY_MS), 8)):
            price = "" if rng.random() < 0.2 else str(rng.random() * (day + 1))
            item, like = rng.randrange(items), rng.randrange(2)
            place = rng.choice(places)
            ms = FIRST_DAY_MS + day * DAY_MS + time
            rows.append(f"u{user},i{item},{ms},{like},{place},{price}")
    (folder / f"day_{day}.csv").write_text("\n".join(rows) + "\n")
    item_rows = ["item,author,size"]
    for i in range(items):
        item_rows.append(f"i{i},author{'CBA'[i // 10]},{i if i % 4 else ''}")
    (folder / "items.csv").write_text("\n".join(item_rows) + "\n")


def append_days(folder: Path, kind: str) -> Inputs:
    """Prepare the days in `folder` that the tables do not have yet."""
    source = LOG | {
        "files": "day_*.csv",
        "labels": {"like": "like", "rome": "place = 'rome'"},
        "numbers": {"price": "price"},
        "categories": {"place": "place"},
        "items": {
            "files": "items.csv",
            "item": "item",
            "attributes": {"author": "author"},
            "numbers": {"size": "size"},
        },
    }
    mapping = {**source, "prepare": {**CONFIG, "kind": kind}}
    prepare_log(mapping, folder / "raw", folder / "tables", append=True)
    return Inputs(str(folder / "tables"))


def train_and_save(run: TrainingRun, folder: Path) -> str:
    """Train to the end, save a checkpoint and return its folder."""
    for event in fit(run.model, run.train, run.validate, run.fit):
        last = event
    metadata = run.checkpoint(epoch=1, step=last.step, best={"step": last.step})
    checkpoint.save(folder, run.model, metadata)
    return str(folder)


def make_fit_config(name: str, **options: Any) -> FitConfig:
    metric = "ndcg@10" if name == "sasrec" else "mean/auc"
    return FitConfig(
        max_epochs=1, batch_size=8, lr=0.01, metric=metric, seed=1, **options
    )


def write_first_days(folder: Path, kind: str) -> Inputs:
    """Prepare days one to three."""
    for day in range(3):
        write_day(folder / "raw", day, 20, PLACES)
    return append_days(folder, kind)


@dataclass
class Grown:
    """A checkpoint of days one to three, and tables of six days."""

    uri: str
    inputs: Inputs
    batch: Any
    """Test requests of the first three days."""
    scores: torch.Tensor
    """Scores of the batch before the later days."""


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Callable[[str], Grown]:
    """Return a function that trains a model by name on days one to three, once, and
    appends days four to six with new items, authors and places.
    """

    @cache
    def train_and_append(name: str) -> Grown:
        folder, kind = tmp_path_factory.mktemp(name), KINDS[name]
        inputs = write_first_days(folder, kind)
        run = build_training(MODELS[name], make_fit_config(name), inputs)
        uri = train_and_save(run, folder / "one")
        before = LoadedModel.load(uri, inputs)
        examples = Dataset.load(before.model, before.catalogue, "test")
        batch = examples.collate(np.arange(len(examples)))
        scores = score_old_items(before, batch)
        for day in range(3, 6):
            write_day(folder / "raw", day, 26, ("bern", *PLACES))
        return Grown(uri, append_days(folder, kind), batch, scores)

    return train_and_append


def score_old_items(loaded: LoadedModel, batch: Any) -> torch.Tensor:
    """Return the scores of a batch, for a retrieval model those of the 20 old items."""
    with torch.no_grad():
        if loaded.model.ranks == "catalogue":
            model: Any = loaded.model
            return model.states(batch.history)[:, -1] @ model.item.weight[:20].T
        return loaded.model.score(batch)  # type: ignore[no-any-return]


def shift_viewers(viewer: torch.Tensor) -> torch.Tensor:
    """Shift the codes of places by the new place that is first in alphabetical order."""
    return torch.where(viewer > 0, viewer + 1, 0)


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_old_items_do_not_change_with_new_items(grown, name):
    log = grown(name)
    after, batch = LoadedModel.load(log.uri, log.inputs), log.batch

    assert read_manifest(f"{log.inputs.tables}/items").rows > 20
    if name == "attn_lfa":
        batch = replace(
            batch,
            viewer=shift_viewers(batch.viewer),
            candidate_viewer=shift_viewers(batch.candidate_viewer),
        )
    assert torch.equal(score_old_items(after, batch), log.scores)


def get_learned_times(run: TrainingRun, sequences: list[dict[str, Any]]) -> list[int]:
    """Return the sorted times of the requests or events that an epoch trains on."""
    times: list[int] = []
    for batch in first_epoch(run):
        if run.model.name == "attn_lfa":
            times += batch.time[batch.learn].tolist()
            continue
        users = batch.user_row[batch.target_row].tolist()
        indices = (batch.target_position + 1).tolist()
        for user, index in zip(users, indices, strict=True):
            times.append(sequences[user]["timestamp_ms"][index])
    return sorted(times)


@pytest.mark.parametrize("name", MODELS)
def test_training_continues_with_newer_examples_and_a_share_of_the_older(grown, name):
    uri, inputs = grown(name).uri, grown(name).inputs
    until = checkpoint.read(uri).learned["until"]
    assert FIRST_DAY_MS + DAY_MS / 2 < until < FIRST_DAY_MS + 3 * DAY_MS / 2
    sequences = read_rows(inputs.tables, "sequences")

    learned = {}
    for fraction in (0, 0.5, 1):
        config = make_fit_config(name, replay_fraction=fraction)
        run = build_training(MODELS[name], config, inputs, init=uri)
        learned[fraction] = get_learned_times(run, sequences)
        assert run.checkpoint().learned["since"] == (0 if fraction == 1 else until)

    assert learned[0]
    assert learned[0] == [time for time in learned[1] if time >= until]
    assert set(learned[0]) < set(learned[0.5]) < set(learned[1])


@pytest.mark.parametrize("name", MODELS)
def test_training_starts_with_the_old_weights_and_unknown_new_items(
    grown, tmp_path, name
):
    uri, inputs = grown(name).uri, grown(name).inputs

    run = build_training(MODELS[name], make_fit_config(name), inputs, init=uri)

    table = "item.weight" if name == "sasrec" else "items.tables.0.weight"
    weights = run.model.state_dict()[table]
    loaded = LoadedModel.load(uri, inputs)
    assert torch.equal(loaded.model.state_dict()[table], weights)
    assert torch.allclose(weights[20:], weights[:20].mean(0).expand(6, -1))
    assert f"6 new items in {table}" in run.messages

    # the scales of features stay in the next checkpoint too
    next_uri = train_and_save(run, tmp_path / "two")
    scales = LoadedModel.load(next_uri, inputs).catalogue.scales()
    stored = json.loads(json.dumps(run.checkpoint().learned["scales"]))
    assert scales == stored


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({}, {"replay_fraction": 0}, "newer than"),
        ({"name": "popularity"}, {}, "'popularity' is not trained by gradient"),
        ({"dim": 16}, {}, r"\(8,\) there and of \(16,\) here"),
        ({"name": "attn_lfa"}, {}, "not of 'attn_lfa'|not of kind|actions"),
    ],
)
def test_a_checkpoint_that_cannot_be_continued_is_rejected(
    grown, tmp_path, model, options, message
):
    if model.get("name") == "popularity":
        changed = model
    else:
        changed = {**MODELS[model.get("name", "sasrec")], **model}
    kind = KINDS.get(changed["name"], "retrieval")
    inputs, uri = write_first_days(tmp_path, kind), grown("sasrec").uri
    with pytest.raises(UserError, match=message):
        build_training(changed, make_fit_config("sasrec", **options), inputs, init=uri)


def test_hash_buckets_get_the_vectors_of_their_values():
    weights = torch.arange(8.0).view(4, 2)
    buckets = extend_values(weights, 100, ["a", "b", "c"], None)
    assert {*map(tuple, buckets.tolist())} == {*map(tuple, weights.tolist())}
