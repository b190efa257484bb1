"""Models of actions through the common set-up: trained, validated, saved; what the data
cannot tell is said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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
from models.storage.tables import UserError
from models.training.fit import EpochEvent, FitConfig, fit
from tests.fixtures.actions_tables import TASKS, user, write_actions, write_rows
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


def train(tables: str, name: str, config: FitConfig = FIT, **changes) -> tuple:
    setup = build_training({"name": name, **SMALL, **changes}, config, Inputs(tables))
    return setup, list(
        fit(setup.model, setup.train, setup.validate, setup.fit, means=setup.means)
    )


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> str:
    return write_actions(tmp_path_factory.mktemp("actions"))


@pytest.mark.parametrize(
    "name", ["attn_mvp", "genrank"]
)  # learned from context and candidates, and from these alone
def test_a_model_trains_and_its_checkpoint_scores_alike(name, tables, tmp_path):
    setup, events = train(tables, name)
    last = events[-1]
    assert isinstance(last, EpochEvent)
    assert last.metrics["mean/rig"] == pytest.approx(
        1 - last.metrics["mean/normalised_entropy"]
    )
    assert last.metrics["eval_loss"] == pytest.approx(
        sum(last.metrics[f"{task}/log_loss"] for task in TASKS)
    )
    assert {
        f"{task}/{kind}"
        for task in TASKS
        for kind in ("normalised_entropy_train", "gauc", "calibration")
    } <= set(last.metrics)
    checkpoint.save(tmp_path / "best", setup.model, setup.checkpoint(epoch=2))
    loaded, about = load_model(
        tmp_path / "best", load_catalogue(name, Inputs(tables)), name
    )
    assert about.hashes.keys() == {"sequences", "items"}
    found = [
        measure_examples(
            model,
            setup.val,
            batch_size=9,
            device=torch.device("cpu"),
        ).sums
        for model in (setup.model, loaded)
    ]
    assert found[0].keys() == found[1].keys()
    one, other = (setup.means(sums) for sums in found)
    assert one == pytest.approx(other, rel=0, abs=0, nan_ok=True)


def test_a_split_without_events_is_an_error_before_or_in_training(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        user(f"u{n}", [0, 1, 2], [1, 2, 3], [True, False, True], (9, 9), rng)
        for n in range(4)
    ]
    with pytest.raises(UserError, match="the validation split has no request"):
        train(write_rows(tmp_path / "late", rows, 3), "attn_lfa")
    rows = [
        user(f"u{n}", [0, 1, 2], [1, 2, 3], [True, False, True], (0, 2), rng)
        for n in range(4)
    ]
    with pytest.raises(UserError, match="has no train request"):
        train(write_rows(tmp_path / "early", rows, 3), "attn_lfa")


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_configs_are_of_one_size(path):
    change = yaml.safe_load(path.read_text())
    base = yaml.safe_load((CONFIGS.parent / "attn_mvp.yaml").read_text())
    content = {part: {**base[part], **change.get(part, {})} for part in base}
    if path.stem in ("base_rate", "item_rate", "boosted"):  # not read after the base
        content = change
    model_class, config = parse_options(content["model"])
    assert model_class.family == "actions"
    FitConfig(**content["fit"])
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


def users(count: int, context: int = 12, candidates: int = 4) -> ActionsBatch:
    """Half of the items are dogs; half of the users like them, the other half like all
    others.
    """
    item = torch.randint(ITEMS, (count, context + candidates))
    liked = (KIND[item] == torch.randint(2, (count, 1))).float()[..., None]
    time = torch.arange(context + candidates).expand(count, -1)
    whole: dict[str, Any] = {
        "item": item,
        "time": time,
        "label": liked,
        "valid": torch.ones_like(item, dtype=torch.bool),
        "feature": torch.zeros(*item.shape, 0),
    }
    past = {name: value[:, :context] for name, value in whole.items()}
    shown = {f"candidate_{name}": value[:, context:] for name, value in whole.items()}
    return ActionsBatch(
        user_row=torch.arange(count),
        action=torch.cat([liked, 1 - liked], 2)[:, :context],
        learn=past["valid"],
        **past,
        **shown,
    )


def learned(model: FusionModel, steps: int) -> float:
    """Normalised entropy over the candidates of new users."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(users(64))["loss"].backward()
        optimizer.step()
    with torch.no_grad():
        return metrics.means(metrics.measure(model.eval(), users(500)))[
            "like/normalised_entropy"
        ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (AttnLFA, AttnLFAConfig(**TOY)),
        (AttnMVP, AttnMVPConfig(**TOY)),
        (AttnMVP, AttnMVPConfig(late_fusion=False, **TOY)),
    ],
)
def test_models_of_actions_tell_the_users_apart(kind, config):
    torch.manual_seed(0)
    assert learned(kind(config, CATALOGUE), 150) < 0.1


@pytest.mark.long
def test_a_model_without_actions_cannot():
    torch.manual_seed(0)
    blind = AttnMVP(
        AttnMVPConfig(late_fusion=False, **TOY, action_weight=0.0), CATALOGUE
    )
    assert 0.98 < learned(blind, 150) < 1.1
