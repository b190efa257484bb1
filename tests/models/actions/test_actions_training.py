"""Training of models of actions: they train, validate, are saved and learn the tastes of
users; splits without events are rejected.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from models.actions import metrics
from models.actions.base import FusionModel
from models.actions.batch import ActionsBatch
from models.actions.catalogue import ActionsCatalogue
from models.actions.fusions import AttnLFA, AttnLFAConfig, AttnMVP, AttnMVPConfig
from models.build import load_model, parse_options
from models.evaluation import measure_examples
from models.loaded_model import load_catalogue
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.training.fit import EpochEvent, FitConfig, fit
from tests.fixtures.actions_tables import (
    TASKS,
    write_actions,
)
from tests.fixtures.trainings import build_training

CONFIGS = Path(__file__).parents[3] / "jobs/configs/actions"
SMALL = {
    "width": 16,
    "num_layers": 1,
    "num_heads": 2,
    "ffn": 24,
    "expert_width": 16,
    "tower_width": 8,
    "dropout": 0.0,
}
FIT = FitConfig(
    lr=0.01, weight_decay=0.0, batch_size=16, max_epochs=2, metric="mean/rig"
)


def train_model(tables: str, name: str, config: FitConfig = FIT, **changes) -> tuple:
    """Train a small model; return its training run and the events."""
    run = build_training({"name": name, **SMALL, **changes}, config, Inputs(tables))
    events = fit(run.model, run.train, run.validate, run.fit, means=run.means)
    return run, list(events)


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> str:
    return write_actions(tmp_path_factory.mktemp("actions"))


# attn_mvp trains on context and candidates, genrank on candidates alone
@pytest.mark.parametrize("name", ["attn_mvp", "genrank"])
def test_a_trained_model_reports_all_metrics_and_its_checkpoint_has_equal_scores(
    name, tables, tmp_path
):
    run, events = train_model(tables, name)

    last = events[-1]
    assert isinstance(last, EpochEvent)
    values = last.metrics
    assert values["mean/rig"] == pytest.approx(1 - values["mean/normalised_entropy"])
    assert values["eval_loss"] == pytest.approx(
        sum(values[f"{task}/log_loss"] for task in TASKS)
    )
    for task, kind in product(
        TASKS, ("normalised_entropy_train", "gauc", "calibration")
    ):
        assert f"{task}/{kind}" in values

    checkpoint.save(tmp_path / "best", run.model, run.checkpoint(epoch=2))
    catalogue = load_catalogue(name, Inputs(tables))
    loaded, metadata = load_model(tmp_path / "best", catalogue, name)
    assert metadata.hashes.keys() == {"sequences", "items"}
    cpu = torch.device("cpu")
    sums = measure_examples(run.model, run.val, batch_size=9, device=cpu).sums
    loaded_sums = measure_examples(loaded, run.val, batch_size=9, device=cpu).sums
    assert sums.keys() == loaded_sums.keys()
    assert run.means(sums) == pytest.approx(
        run.means(loaded_sums), rel=0, abs=0, nan_ok=True
    )


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_configs_differ_from_the_base_in_the_model_and_learning_rate_only(path):
    change = yaml.safe_load(path.read_text())
    base = yaml.safe_load((CONFIGS.parent / "attn_mvp.yaml").read_text())
    options = {part: {**base[part], **change.get(part, {})} for part in base}
    if path.stem in ("base_rate", "item_rate", "boosted"):  # not read after the base
        options = change
    model_class, config = parse_options(options["model"])
    assert model_class.family == "actions"
    FitConfig(**options["fit"])
    if not model_class.trains_by_gradient:
        return
    if path.stem == "paper":
        assert (config.num_layers, config.max_history) == (12, 1024)
        return
    assert change["model"]["name"] == model_class.name
    assert change.get("fit", {}).keys() <= {"lr"}


TOY = {
    "width": 32,
    "num_layers": 1,
    "num_heads": 2,
    "ffn": 64,
    "experts": 3,
    "expert_width": 32,
    "tower_width": 16,
    "dropout": 0.0,
}
ITEMS = 12
KIND = torch.arange(ITEMS) % 2  # cat or dog
CATALOGUE = ActionsCatalogue(
    ITEMS, actions=("like", "skip"), labels=("like",), categories=KIND[:, None]
)


def draw_users(count: int, context: int = 12, candidates: int = 4) -> ActionsBatch:
    """Draw users of whom half like dogs and half like cats; half of the items are dogs."""
    item = torch.randint(ITEMS, (count, context + candidates))
    favourite = torch.randint(2, (count, 1))
    liked = (KIND[item] == favourite).float()[..., None]
    events: dict[str, Any] = {
        "item": item,
        "time": torch.arange(context + candidates).expand(count, -1),
        "label": liked,
        "valid": torch.ones_like(item, dtype=torch.bool),
        "feature": torch.zeros(*item.shape, 0),
    }
    context_events = {name: value[:, :context] for name, value in events.items()}
    candidate_events = {
        f"candidate_{name}": value[:, context:] for name, value in events.items()
    }
    return ActionsBatch(
        user_row=torch.arange(count),
        action=torch.cat([liked, 1 - liked], 2)[:, :context],
        learn=context_events["valid"],
        **context_events,
        **candidate_events,
    )


def train_and_measure_entropy(model: FusionModel, steps: int) -> float:
    """Return the normalised entropy over the candidates of new users after training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(draw_users(64))["loss"].backward()
        optimizer.step()
    with torch.no_grad():
        sums = metrics.measure(model.eval(), draw_users(500))
    return metrics.means(sums)["like/normalised_entropy"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (AttnLFA, AttnLFAConfig(**TOY)),
        (AttnMVP, AttnMVPConfig(**TOY)),
        (AttnMVP, AttnMVPConfig(late_fusion=False, **TOY)),
    ],
)
def test_models_learn_the_taste_of_each_user_from_the_actions(model_class, config):
    torch.manual_seed(0)
    assert train_and_measure_entropy(model_class(config, CATALOGUE), 150) < 0.1


@pytest.mark.long
def test_a_model_without_actions_learns_no_taste():
    torch.manual_seed(0)
    config = AttnMVPConfig(late_fusion=False, **TOY, action_weight=0.0)
    assert 0.98 < train_and_measure_entropy(AttnMVP(config, CATALOGUE), 150) < 1.1
