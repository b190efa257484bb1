"""Models of actions through the common set-up: trained, validated, saved; what the data cannot tell is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from models import checkpoint, registry
from models.fit import EpochEvent, FitConfig, StepEvent, fit
from models.inputs import Inputs
from models.setup import load_catalogue, score, set_up
from models.tables import UserError
from tests.actions_tables import TASKS, user, write_actions, write_rows

CONFIGS = Path(__file__).parents[3] / "jobs/configs/actions"
SMALL = {"width": 16, "num_layers": 1, "num_heads": 2, "ffn": 24, "expert_width": 16, "tower_width": 8, "dropout": 0.0}
FIT = FitConfig(lr=0.01, weight_decay=0.0, batch_size=16, max_epochs=2, metric="mean/rig")
ACTIONS = [name for name, entry in registry.MODELS.items() if entry.family is registry.ACTIONS]


def train(tables: str, name: str, config: FitConfig = FIT, **changes) -> tuple:
    setup = set_up({"name": name, **SMALL, **changes}, config, Inputs(tables))
    return setup, list(fit(setup.model, setup.train, setup.validate, setup.fit, means=setup.means))


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> str:
    return write_actions(tmp_path_factory.mktemp("actions"))


@pytest.mark.parametrize("name", ACTIONS)
def test_all_seven_train_and_their_checkpoints_score_alike(name, tables, tmp_path):
    setup, events = train(tables, name)
    last = events[-1]
    assert isinstance(last, EpochEvent)
    assert last.metrics["mean/rig"] == pytest.approx(1 - last.metrics["mean/normalised_entropy"])
    assert last.metrics["eval_loss"] == pytest.approx(sum(last.metrics[f"{task}/log_loss"] for task in TASKS))
    assert {f"{task}/{kind}" for task in TASKS for kind in ("normalised_entropy_train", "gauc", "calibration")} <= set(
        last.metrics
    )
    checkpoint.save(tmp_path / "best", setup.model, setup.checkpoint(epoch=2))
    entry = registry.find(name)
    loaded, about = registry.load(tmp_path / "best", load_catalogue(name, Inputs(tables)), name)
    assert about.hashes.keys() == {"sequences", "items"}
    found = [
        score(model, entry.measured.measure, setup.val, batch_size=9, device=torch.device("cpu"))[0]
        for model in (setup.model, loaded)
    ]
    assert found[0].keys() == found[1].keys()
    one, other = (setup.means(sums) for sums in found)
    assert one == pytest.approx(other, rel=0, abs=0, nan_ok=True)


def test_a_part_of_validation_is_batched_within_the_bound_too(tables, monkeypatch):
    setup = set_up({"name": "lac", **SMALL}, FIT, Inputs(tables))
    monkeypatch.setattr("models.actions.data.MOST_PAIRS", bound := 300)
    sizes, collate = [], setup.val.collate

    def watched(rows):
        batch = collate(rows)
        rows, candidates, context = (*batch["candidate_item"].shape, batch["item"].shape[1])
        sizes.append((rows, rows * candidates * (context + 1)))
        return batch

    monkeypatch.setattr(setup.val, "collate", watched)
    limit = len(setup.val) - 5
    options = {"batch_size": 256, "device": torch.device("cpu"), "limit": limit}
    _, count, _ = score(setup.model, setup.entry.measured.measure, setup.val, **options)
    assert count == limit == sum(rows for rows, _ in sizes)
    assert max(rows for rows, _ in sizes) > 1
    assert all(rows == 1 or pairs <= bound for rows, pairs in sizes)


@pytest.mark.long
def test_actions_tell_the_users_apart_through_tables_and_loop(tmp_path):
    """Dogs and cats, drawn alike for all: without actions nothing is better than the base rate."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(240):
        item = rng.integers(8, size=24)
        liked = (item % 2 == number % 2).tolist()
        rows.append(user(f"u{number}", item.tolist(), np.sort(rng.integers(0, 100, 24)).tolist(), liked, (70, 85), rng))
    tables = write_rows(tmp_path, rows, 8)
    config = FitConfig(lr=0.01, weight_decay=0.0, batch_size=16, max_epochs=8, metric="mean/rig")
    _, seeing = train(tables, "attn_lfa", config)
    assert seeing[-1].metrics["like/normalised_entropy"] < 0.6
    _, blind = train(tables, "attn_mvp", config, late_fusion=False, action_weight=0.0)
    assert blind[-1].metrics["like/normalised_entropy"] > 0.97


def test_the_share_of_padding_is_an_event_of_training(tables):
    setup, events = train(
        tables, "attn_lfa", FitConfig(batch_size=8, max_epochs=1, metric="mean/rig", log_every_steps=1)
    )
    events_, positions = zip(
        *map(setup.train.examples.positions, setup.train.examples.batches(8, shuffle=True)), strict=True
    )
    share = setup.train.examples.padded_share(8, 0)
    assert share == pytest.approx(1 - sum(events_) / sum(positions))
    assert setup.notes == [f"padding: {share:.1%} of the positions of an epoch"]
    steps = [event.parts["padding"] for event in events if isinstance(event, StepEvent)]
    assert steps == pytest.approx([1 - e / p for e, p in zip(events_, positions, strict=True)][: len(steps)], abs=1e-5)


def test_a_task_of_one_class_in_validation_has_no_entropy_and_no_part_in_the_mean(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for number in range(20):  # liked in training alone
        liked = [place < 6 and place % 2 == 0 for place in range(10)]
        rows.append(user(f"u{number}", rng.integers(5, size=10).tolist(), list(range(10)), liked, (6, 8), rng))
    with pytest.warns(UserWarning, match="not defined and shown as NaN: .*like/normalised_entropy"):
        _, events = train(write_rows(tmp_path, rows, 5), "attn_lfa")
    metrics = events[-1].metrics
    assert np.isnan(metrics["like/normalised_entropy"])
    assert metrics["mean/normalised_entropy"] == metrics["long_dwell/normalised_entropy"]
    assert np.isfinite(metrics["like/normalised_entropy_train"])


def test_a_split_without_events_is_an_error_before_or_in_training(tmp_path):
    rng = np.random.default_rng(0)
    rows = [user(f"u{n}", [0, 1, 2], [1, 2, 3], [True, False, True], (9, 9), rng) for n in range(4)]
    with pytest.raises(UserError, match="the validation split has no request"):
        train(write_rows(tmp_path / "late", rows, 3), "attn_lfa")
    rows = [user(f"u{n}", [0, 1, 2], [1, 2, 3], [True, False, True], (0, 2), rng) for n in range(4)]
    with pytest.raises(UserError, match="has no train request"):
        train(write_rows(tmp_path / "early", rows, 3), "attn_lfa")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configs_are_of_one_size(path):
    change = yaml.safe_load(path.read_text())
    base = yaml.safe_load((CONFIGS.parent / "attn_mvp.yaml").read_text())
    content = {part: {**base[part], **change.get(part, {})} for part in base}
    config = registry.config_from_dict(content["model"])
    assert registry.find(content["model"]["name"]).family is registry.ACTIONS
    FitConfig(**content["fit"])
    if path.stem == "paper":
        assert (config.num_layers, config.max_history) == (12, 1024)
        return
    assert change["model"]["name"] == registry.name_of(config)
    assert change.get("fit", {}).keys() <= {"lr"}
