"""The table of models: names, configs, and errors that name the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import registry
from models.retrieval.data import Catalogue
from models.tables import UserError

CODES = torch.tensor([[0, 0], [0, 1], [1, 0]])


@pytest.mark.parametrize("name", registry.MODELS)
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
    items, scores = model.eval().recommend(batch, 3)
    assert sorted(items[0].tolist()) == [0, 1, 2]
    assert scores.shape == (1, 3)
    assert config.max_history >= 1
    assert entry.gradient != hasattr(model, "fit_counts")


def test_mistakes_are_answered_with_the_nearest_name():
    with pytest.raises(UserError, match="unknown model 'sasrek'; the nearest is 'sasrec'"):
        registry.find("sasrek")
    with pytest.raises(UserError, match=r"unknown key 'model.d_modle' .* 'model.d_model'"):
        registry.config_from_dict({"name": "tiger", "d_modle": 3})
    with pytest.raises(UserError, match="the model has no name"):
        registry.config_from_dict({"d_model": 3})
    with pytest.raises(UserError, match="model 'sasrec': dropout 2"):
        registry.config_from_dict({"name": "sasrec", "dropout": 2})
