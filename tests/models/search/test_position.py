"""Positions of results are inputs in training alone, as `position` sets it, and never
when results are ranked.
"""

from __future__ import annotations

import pytest
import torch

from models.metrics.ranking_metrics import ranking_means, ranking_sums
from models.search import metrics
from models.search.batch import SearchBatch
from models.search.catalogue import SearchCatalogue
from models.search.position import Position
from tests.fixtures.search_models import build_variant
from tests.fixtures.search_tables import change_batch


def get_position_columns(catalogue: SearchCatalogue) -> list[int]:
    """Return the columns of the features that depend on the position."""
    return [
        column
        for column, name in enumerate(catalogue.features)
        if name in catalogue.unknown_when_ranking
    ]


def change_positions(catalogue: SearchCatalogue, batch: SearchBatch) -> SearchBatch:
    """Return the batch with the same results at other positions."""
    features = batch.features.clone()
    for column in get_position_columns(catalogue):
        features[:, column] += torch.rand(len(features)) * 3
    return change_batch(batch, catalogue, features=features)


@pytest.mark.parametrize("mode", ["hidden", "dropout", "bias"])
@pytest.mark.parametrize(
    "name", ["base", "qgs", "qgs no_groups", "hllm item_tower_match"]
)
def test_scores_of_a_ranking_do_not_depend_on_the_position(
    name, mode, catalogue, batch
):
    model = build_variant(name, catalogue, position=mode)
    other = change_positions(catalogue, batch)
    with torch.no_grad():
        assert torch.equal(model.score(batch), model.score(other))
        shown = model.score(batch, shown=True)
        other_shown = model.score(other, shown=True)
    assert torch.equal(shown, other_shown) == (mode == "hidden")


def test_dropout_hides_the_positions_of_whole_requests():
    torch.manual_seed(0)
    module = Position(
        "dropout", 0.3, ("price", "position", "page"), ("position", "page"), 1
    ).train()
    features = torch.rand(9000, 3) + 1
    request, count = torch.arange(3000).repeat_interleave(3), 3000

    inputs = module.hide(features, request, count, shown=True)

    assert torch.equal(inputs[:, 0], features[:, 0])
    # (requests, 3 results of 2 position features)
    is_hidden = (inputs[:, 1:] == 0).view(3000, 6)
    assert torch.equal(is_hidden.any(1), is_hidden.all(1))
    assert is_hidden.all(1).float().mean() == pytest.approx(0.3, abs=0.03)
    assert not module.hide(features, request, count, shown=False)[:, 1:].any()
    module.eval()
    assert torch.equal(module.hide(features, request, count, shown=True), features)


@pytest.mark.parametrize("mode", ["dropout", "bias"])
def test_metrics_with_the_position_are_reported_separately(mode, catalogue, batch):
    model = build_variant("base", catalogue, position=mode)

    values = metrics.means(metrics.measure(model, batch))

    with_position = {
        name.removeprefix("with_position/")
        for name in values
        if name.startswith("with_position/")
    }
    assert with_position == {name for name in values if "with_position" not in name}
    logits = model.score(batch, shown=True)[:, 0]
    sums = ranking_sums(logits, batch.labels[:, 0], batch.candidate_request)
    assert values["with_position/auc"] == ranking_means(sums)["auc"]
    assert values["with_position/auc"] != values["auc"]
