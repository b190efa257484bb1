"""All models of search: they are causal, rank candidates independently, ignore the rest
of the batch and train every weight; and the conditions and inputs of QGS.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.search.catalogue import SearchText
from tests.fixtures.search_models import (
    VARIANTS,
    build_variant,
    compute_infonce_by_loop,
)
from tests.fixtures.search_tables import change_batch

GENERATIVE = [name for name in VARIANTS if not name.startswith("base")]


@pytest.mark.parametrize("name", GENERATIVE)
def test_a_behaviour_changes_no_earlier_state_and_no_earlier_request(
    name, catalogue, batch
):
    model = build_variant(name, catalogue)
    row = int(batch.history_length.argmax())
    index = int(batch.history_length[row]) // 2
    changes = {
        "history": (batch.history[row, index] + 5) % 24,
        "history_query": (batch.history_query[row, index] + 2) % 8,
        "history_features": batch.history_features[row, index] + 1,
        "history_time": batch.history_time[row, index] + 90_000,
    }
    with torch.no_grad():
        states = model.encode_history(batch, model.history_tokens(batch))
        scores = model.score(batch)
    other_rows = torch.arange(len(states)) != row
    is_earlier = (batch.request_row != row) | (batch.request_end <= index)
    is_earlier = is_earlier[batch.candidate_request]

    for key, value in changes.items():
        values = getattr(batch, key).clone()
        values[row, index] = value
        changed = change_batch(batch, catalogue, **{key: values})
        with torch.no_grad():
            after = model.encode_history(changed, model.history_tokens(changed))
            after_scores = model.score(changed)

        assert torch.equal(after[row, :index], states[row, :index]), key
        assert torch.equal(after[other_rows], states[other_rows]), key
        assert torch.equal(after_scores[is_earlier], scores[is_earlier])
        if key == "history":
            length = int(batch.history_length[row])
            difference = after[row, index:length] - states[row, index:length]
            assert (difference.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_candidate_changes_no_other_score_and_labels_change_none(
    name, catalogue, batch
):
    model = build_variant(name, catalogue)
    candidate, features = batch.candidate.clone(), batch.features.clone()
    candidate[3] = (candidate[3] + 5) % 24
    features[3] += 1
    changed = change_batch(
        batch,
        catalogue,
        labels=~batch.labels,
        candidate=candidate,
        features=features,
    )

    with torch.no_grad():
        scores, after = model.score(batch), model.score(changed)

    others = torch.arange(len(scores)) != 3
    assert torch.equal(after[others], scores[others])
    assert (after[3] != scores[3]).any()


@pytest.mark.parametrize("negatives", ["position", "batch"])
@pytest.mark.parametrize("name", ["qgs", "hstu", "hllm item_tower"])
def test_the_next_document_is_predicted_instead_of_the_next_token(
    name, negatives, catalogue, batch
):
    token_model, model = (
        build_variant(name, catalogue, next_item=next_item, negatives=negatives)
        for next_item in ("token", "document")
    )
    target = {"target.weight": model.target.weight}
    model.load_state_dict(token_model.state_dict() | target)
    item, new = batch.history[:, 1:], batch.history_new[:, None]
    valid = (item >= 0) & (torch.arange(1, batch.history.shape[1]) >= new)
    with torch.no_grad():
        outputs = model(batch)
        states = model.encode_history(batch, model.history_tokens(batch))
        z = torch.zeros(*item.shape, model.config.width)
        v = torch.zeros_like(z)
        for b, t in valid.nonzero().tolist():
            query_row = batch.history_query_text[b, t + 1]
            z[b, t] = model.predict_next(states[b, t], batch.query_text, query_row)
            v[b, t] = model.target.weight @ model.embed_documents(item[b, t])

        assert torch.equal(outputs["ranking"], token_model(batch)["ranking"])
    expected = compute_infonce_by_loop(
        z, v, item, valid, model.config.temperature, negatives
    )
    assert float(outputs["infonce"]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["base", "hstu", "qgs"])
def test_without_text_items_have_vectors_of_their_ids_and_queries_none(
    name, catalogue, batch
):
    empty = SearchText.empty(catalogue.num_items, catalogue.num_queries)
    no_text = replace(catalogue, text=empty, text_size=0.0)
    model = build_variant(name, no_text)
    batch = change_batch(batch, no_text)
    queries = (batch.request_query + 1) % catalogue.num_queries
    other_queries = change_batch(batch, no_text, request_query=queries)
    items = (batch.candidate + 1) % catalogue.num_items
    other_items = change_batch(batch, no_text, candidate=items)

    with torch.no_grad():
        scores = model.score(batch)
        assert torch.equal(model.score(other_queries), scores)
        assert (model.score(other_items) != scores).any(1).all()
