"""Where a result was shown is read in training alone, as `position` has it, and never
when results are ranked.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_search_models import make

from models.metrics.ranking_metrics import ranking_means, ranking_sums
from models.search import metrics
from models.search.catalogue import SearchCatalogue
from models.search.data import SearchBatch
from models.search.position import Position
from tests.fixtures.search_tables import change


def places(catalogue: SearchCatalogue) -> list[int]:
    """Of the features that say where a result was shown."""
    return [
        place
        for place, name in enumerate(catalogue.features)
        if name in catalogue.unknown_when_ranking
    ]


def elsewhere(catalogue: SearchCatalogue, batch: SearchBatch) -> SearchBatch:
    """The same results, shown at other places."""
    features = batch.features.clone()
    for place in places(catalogue):
        features[:, place] += torch.rand(len(features)) * 3
    return change(batch, catalogue, features=features)


@pytest.mark.parametrize("mode", ["hidden", "dropout", "bias"])
@pytest.mark.parametrize(
    "name", ["base", "qgs", "qgs_no_groups", "hllm_item_tower_match"]
)
def test_a_score_does_not_know_where_a_result_was_shown(name, mode, catalogue, batch):
    model = make(name, catalogue, position=mode)
    moved = elsewhere(catalogue, batch)
    with torch.no_grad():
        assert torch.equal(model.score(batch), model.score(moved))
        told, told_moved = (
            model.score(batch, shown=True),
            model.score(moved, shown=True),
        )
    assert torch.equal(told, told_moved) == (mode == "hidden")


@pytest.mark.parametrize("mode", ["hidden", "dropout", "bias"])
def test_training_reads_it_as_the_mode_says(mode, catalogue, batch):
    model = make("qgs", catalogue, position=mode, infonce_weight=0.0)
    losses = [float(model(of)["loss"]) for of in (batch, elsewhere(catalogue, batch))]
    assert (losses[0] == losses[1]) == (mode == "hidden")


def test_the_bias_is_a_term_of_the_place_alone_and_0_at_the_mean(catalogue, batch):
    model = make("base", catalogue, position="bias")
    other = change(batch, catalogue, candidate=batch.candidate.flip(0))
    with torch.no_grad():
        for of in (batch, other):
            term = model.score(of, shown=True) - model.score(of)
            torch.testing.assert_close(
                term, model.shown_at.compute_bias(model.scale(batch.features), True)
            )
        features = batch.features.clone()
        features[:, places(catalogue)] = model.scale.mean[places(catalogue)]
        at_mean = change(batch, catalogue, features=features)
        torch.testing.assert_close(
            model.score(at_mean, shown=True), model.score(at_mean)
        )


def test_dropout_hides_the_places_of_whole_requests():
    torch.manual_seed(0)
    module = Position(
        "dropout", 0.3, ("price", "position", "page"), ("position", "page"), 1
    ).train()
    features, request = torch.rand(9000, 3) + 1, torch.arange(3000).repeat_interleave(3)
    read = module.hide(features, request, int(request.max()) + 1, shown=True)
    assert torch.equal(read[:, 0], features[:, 0])
    hidden = (read[:, 1:] == 0).view(3000, 6)
    assert torch.equal(hidden.any(1), hidden.all(1))
    assert hidden.all(1).float().mean() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(
        module.eval().hide(features, request, int(request.max()) + 1, shown=True),
        features,
    )
    assert (
        not module.train()
        .hide(features, request, int(request.max()) + 1, shown=False)[:, 1:]
        .any()
    )


def test_a_log_without_places_has_nothing_to_hide(catalogue, batch):
    without = replace(catalogue, unknown_when_ranking=("rank_in_feed",))
    for mode in ("hidden", "dropout", "bias"):
        model = make("base", without, position=mode)
        assert not model.shown_at.reads
        assert torch.equal(model.score(batch), model.score(batch, shown=True))


def test_what_the_place_would_have_added_stands_beside(catalogue, batch):
    for mode in ("hidden", "dropout", "bias"):
        model = make("base", catalogue, position=mode)
        found = metrics.means(metrics.measure(model, batch))
        beside = {
            name.removeprefix("with_position/")
            for name in found
            if name.startswith("with_position/")
        }
        assert beside == (
            set()
            if mode == "hidden"
            else {name for name in found if "with_position" not in name}
        )
        logits = model.score(batch, shown=True)[:, 0]
        sums = ranking_sums(logits, batch.labels[:, 0], batch.candidate_request)
        if beside:
            assert found["with_position/auc"] == ranking_means(sums)["auc"]
            assert found["with_position/auc"] != found["auc"]
