"""The paper's dog and cat users (Fig. 4): one kind likes dogs and not cats, the other the reverse."""

from __future__ import annotations

import pytest
import torch

from models.actions import metrics
from models.actions.attn_lfa import AttnLFA, AttnLFAConfig
from models.actions.attn_mvp import AttnMVP, AttnMVPConfig
from models.actions.base import ActionsModel
from models.actions.batch import ActionsCatalogue

SMALL = {
    "width": 32, "num_layers": 1, "num_heads": 2, "ffn": 64, "experts": 3, "expert_width": 32, "tower_width": 16,
    "dropout": 0.0,
}  # fmt: skip
ITEMS = 12
KIND = torch.arange(ITEMS) % 2  # cat or dog
CATALOGUE = ActionsCatalogue(ITEMS, actions=("like", "skip"), labels=("like",), categories=KIND[:, None])


def users(count: int, context: int = 12, candidates: int = 4) -> dict[str, torch.Tensor]:
    """Half of the items are dogs; half of the users like them, the other half like all others."""
    item = torch.randint(ITEMS, (count, context + candidates))
    liked = (KIND[item] == torch.randint(2, (count, 1))).float()[..., None]
    time = torch.arange(context + candidates).expand(count, -1)
    whole = {
        "item": item, "time": time, "label": liked, "valid": torch.ones_like(item, dtype=torch.bool),
        "feature": torch.zeros(*item.shape, 0),
    }  # fmt: skip
    batch = {name: value[:, :context] for name, value in whole.items()}
    batch |= {f"candidate_{name}": value[:, context:] for name, value in whole.items()}
    return batch | {"action": torch.cat([liked, 1 - liked], 2)[:, :context], "learn": batch["valid"]}


def learned(model: ActionsModel, steps: int) -> float:
    """Normalised entropy over the candidates of new users."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(users(64))["loss"].backward()
        optimizer.step()
    with torch.no_grad():
        return metrics.means(metrics.measure(model.eval(), users(500)))["like/normalised_entropy"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (AttnLFA, AttnLFAConfig(**SMALL)),
        (AttnMVP, AttnMVPConfig(**SMALL)),
        (AttnMVP, AttnMVPConfig(late_fusion=False, **SMALL)),
    ],
)
def test_models_of_actions_tell_the_users_apart(kind, config):
    torch.manual_seed(0)
    assert learned(kind(config, CATALOGUE), 150) < 0.1


@pytest.mark.long
def test_a_model_without_actions_cannot():
    torch.manual_seed(0)
    blind = AttnMVP(AttnMVPConfig(late_fusion=False, **SMALL, action_weight=0.0), CATALOGUE)
    assert 0.98 < learned(blind, 150) < 1.1
