"""The registry of models: names, configs, and errors that name the nearest key."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from models import registry
from models.build import build_model, parse_options
from models.retrieval.data import Catalogue, RequestBatch
from models.storage.tables import UserError
from tests.fixtures.batches import fill_batch

CODES = torch.tensor([[0, 0], [0, 1], [1, 0]])


RETRIEVAL = [
    name for name in registry.MODELS if registry.find(name).family == "retrieval"
]


@pytest.mark.parametrize("name", registry.MODELS)
def test_every_config_survives_conversion_to_options_and_back(name):
    model_class, config = parse_options({"name": name})
    assert model_class is registry.find(name)
    assert model_class.name == name
    assert config == model_class.config_class()
    options = model_class.config_to_dict(config)
    assert parse_options(options) == (model_class, config)


@pytest.mark.parametrize("name", RETRIEVAL)
def test_every_retrieval_model_builds_and_recommends_with_default_options(name):
    model: Any = build_model({"name": name}, Catalogue.from_codes(CODES, (2, 2)))
    batch = fill_batch(
        RequestBatch,
        {},
        history=torch.tensor([[0, 1]]),
        history_length=torch.tensor([2]),
        user=torch.tensor([7]),
        target=torch.tensor([2]),
    )
    assert model.config.max_history >= 1
    if model.ranks == "nothing":  # stage 1 of SID-MLP++
        return

    items, scores = model.eval().recommend(batch, 3)

    assert sorted(items[0].tolist()) == [0, 1, 2]
    assert scores.shape == (1, 3)
    options = set(inspect.signature(model.recommend).parameters) - {"batch", "k"}
    options |= {"unseen", "precision", "compile"}
    assert set(model.recommend_options()) == options
    assert model.trains_by_gradient != hasattr(model, "fit_in_one_pass")


def test_an_unknown_model_is_rejected_with_the_nearest_name():
    with pytest.raises(
        UserError, match="unknown model 'sasrek'; the nearest is 'sasrec'"
    ):
        registry.find("sasrek")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "tiger", "d_modle": 3},
            "unknown key 'model.d_modle'",
        ),
        ({"d_model": 3}, "the model has no name"),
        ({"name": "sasrec", "dropout": 2}, "model 'sasrec': dropout 2"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(UserError, match=message):
        parse_options(options)
