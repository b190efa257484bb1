"""The table of models: names, configs, and errors that name the remedy."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from models import registry
from models.retrieval.data import Catalogue
from models.storage.tables import UserError

CODES = torch.tensor([[0, 0], [0, 1], [1, 0]])


RETRIEVAL = [
    name
    for name, entry in registry.MODELS.items()
    if entry.family is registry.RETRIEVAL
]


@pytest.mark.parametrize("name", registry.MODELS)
def test_every_config_round_trips(name):
    config = registry.config_from_dict({"name": name})
    assert config == registry.find(name).config()
    assert registry.config_from_dict(registry.config_to_dict(config)) == config


@pytest.mark.parametrize("name", RETRIEVAL)
def test_every_model_of_a_catalogue_builds_from_its_own_defaults(name):
    entry = registry.find(name)
    config = entry.config()
    model = registry.build(config, Catalogue.from_codes(CODES, (2, 2)))
    assert isinstance(model, nn.Module)
    batch = {
        "history": torch.tensor([[0, 1]]),
        "history_length": torch.tensor([2]),
        "user": torch.tensor([7]),
        "target": torch.tensor([2]),
    }
    assert config.max_history >= 1
    if not entry.ranks:  # stage 1 of SID-MLP++
        assert not hasattr(model, "recommend")
        return
    items, scores = model.eval().recommend(batch, 3)
    assert sorted(items[0].tolist()) == [0, 1, 2]
    assert scores.shape == (1, 3)
    search = set(inspect.signature(model.recommend).parameters) - {"batch", "k"}
    assert set(registry.recommend_options(name)) == search | {
        "unseen",
        "precision",
        "compile",
    }
    assert entry.gradient != hasattr(model, "fit_counts")


def test_mistakes_are_answered_with_the_nearest_name():
    with pytest.raises(
        UserError, match="unknown model 'sasrek'; the nearest is 'sasrec'"
    ):
        registry.find("sasrek")
    with pytest.raises(
        UserError, match=r"unknown key 'model.d_modle' .* 'model.d_model'"
    ):
        registry.config_from_dict({"name": "tiger", "d_modle": 3})
    with pytest.raises(UserError, match="the model has no name"):
        registry.config_from_dict({"d_model": 3})
    with pytest.raises(UserError, match="model 'sasrec': dropout 2"):
        registry.config_from_dict({"name": "sasrec", "dropout": 2})
