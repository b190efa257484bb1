"""The table of models: names, configs, and errors that name the remedy."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from models import registry
from models.retrieval.data import Catalogue
from models.search.data import SearchCatalogue
from models.tables import UserError

CODES = torch.tensor([[0, 0], [0, 1], [1, 0]])


RETRIEVAL = [name for name, entry in registry.MODELS.items() if entry.family is registry.RETRIEVAL]
ACTIONS = [name for name, entry in registry.MODELS.items() if entry.family is registry.ACTIONS]
SEARCH = [name for name, entry in registry.MODELS.items() if entry.family is registry.SEARCH]


@pytest.mark.parametrize("name", SEARCH)
def test_every_search_model_builds_from_its_config_and_round_trips(name):
    entry = registry.find(name)
    config = registry.config_from_dict({"name": name, "dropout": 0.2})
    assert registry.config_from_dict(registry.config_to_dict(config)) == config
    assert registry.resolve(config, None) == config
    assert entry.reads == {"text": True}
    small = registry.config_from_dict({"name": name, **({} if name == "base" else {"width": 24, "num_layers": 1})})
    text, keys = torch.randn(2, 4), torch.arange(2)
    named = {"feature_mean": torch.zeros(1), "feature_std": torch.ones(1), "groups": {"context": ("position",)}}
    catalogue = SearchCatalogue(2, 1, ("click",), ("position",), text[:1], text, text, keys * 2 + 1, **named)
    model = registry.build(small, catalogue).eval()
    one = torch.zeros(1, dtype=torch.long)
    batch = {
        "history": one[None], "history_query": one[None], "history_time": one[None], "history_length": one + 1,
        "history_features": torch.zeros(1, 1, 1), "request_row": one, "request_end": one + 1, "request_query": one,
        "candidate": torch.tensor([0, 1]), "candidate_request": one.repeat(2), "features": torch.zeros(2, 1),
        "labels": torch.tensor([[True], [False]]),
    }  # fmt: skip
    with torch.no_grad():
        assert model.score(batch).shape == (2, 1)
        sums = entry.measured.measure(model, batch)
    assert entry.measured.means(sums)["requests"] == 1


@pytest.mark.parametrize("name", RETRIEVAL)
def test_every_model_builds_from_its_own_defaults_and_round_trips(name):
    entry = registry.find(name)
    config = entry.config()
    assert registry.config_from_dict(registry.config_to_dict(config)) == config
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
    assert set(registry.recommend_options(name)) == search | {"unseen", "precision", "compile"}
    assert entry.gradient != hasattr(model, "fit_counts")


@pytest.mark.parametrize("name", ACTIONS)
def test_every_actions_model_round_trips_and_does_without_text(name):
    entry = registry.find(name)
    config = registry.config_from_dict({"name": name, "dropout": 0.2})
    assert registry.config_from_dict(registry.config_to_dict(config)) == config
    assert registry.name_of(config) == name
    assert entry.reads == {"text": False}
    assert entry.unit == ("cut" if name == "genrank" else "user")


def test_mistakes_are_answered_with_the_nearest_name():
    with pytest.raises(UserError, match="unknown model 'sasrek'; the nearest is 'sasrec'"):
        registry.find("sasrek")
    with pytest.raises(UserError, match=r"unknown key 'model.d_modle' .* 'model.d_model'"):
        registry.config_from_dict({"name": "tiger", "d_modle": 3})
    with pytest.raises(UserError, match="the model has no name"):
        registry.config_from_dict({"d_model": 3})
    with pytest.raises(UserError, match="model 'sasrec': dropout 2"):
        registry.config_from_dict({"name": "sasrec", "dropout": 2})
