"""All models of search: they are causal, rank candidates independently, ignore the rest
of the batch and train every weight; and the conditions and inputs of QGS.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.search.catalogue import pair_key
from tests.fixtures.search_models import (
    VARIANTS,
    build_variant,
    compute_infonce_by_loop,
)
from tests.fixtures.search_tables import change_batch

GENERATIVE = [name for name in VARIANTS if name != "base"]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_reaches_every_weight(name, catalogue, batch):
    model = build_variant(name, catalogue).train()

    outputs = model(batch)
    outputs["loss"].backward()

    assert torch.isfinite(outputs["loss"])
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
    assert model.score(batch).shape == (len(batch.candidate), 2)


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


@pytest.mark.parametrize("name", VARIANTS)
def test_scores_of_a_user_do_not_depend_on_the_batch(name, catalogue, examples, batch):
    model = build_variant(name, catalogue)
    with torch.no_grad():
        scores = model.score(batch)
        for row in range(3):
            alone = model.score(examples.collate(np.array([row])))
            in_row = batch.request_row[batch.candidate_request] == row
            assert torch.allclose(alone, scores[in_row], atol=1e-5)


def test_the_joint_condition_depends_on_the_document_and_the_query_does_not(
    catalogue, batch
):
    with pytest.warns(UserWarning, match="leaks the document to predict"):
        joint_model = build_variant("qgs", catalogue, query_condition="joint")
    query_model = build_variant("qgs", catalogue)
    # two documents after one query
    keys = np.array([pair_key(item, 1, catalogue.num_queries) for item in (2, 3)])
    pairs, _ = catalogue.text.find_pairs(keys)
    past, rows = torch.zeros(2, 24), torch.arange(2)

    with torch.no_grad():
        joint_text = torch.from_numpy(catalogue.text.joint[pairs])
        joint = joint_model.predict_next(past, joint_text, rows)
        query_text = torch.from_numpy(catalogue.text.queries[[1, 1]])
        query = query_model.predict_next(past, query_text, rows)

    assert not torch.allclose(joint[0], joint[1], atol=1e-5)
    assert torch.allclose(query[0], query[1], atol=1e-5)


def test_models_with_the_joint_condition_score_and_train(catalogue, batch):
    with pytest.warns(UserWarning, match="leaks the document to predict"):
        model = build_variant("qgs", catalogue, query_condition="joint")
    with torch.no_grad():
        assert model.score(batch).shape == (len(batch.candidate), 2)
    model.train()(batch)["loss"].backward()


@pytest.mark.parametrize(
    ("name", "is_condition"), [("qgs", True), ("qgs_item_only", False)]
)
def test_the_query_changes_the_prediction_only_as_a_condition(
    name, is_condition, catalogue, batch
):
    other = change_batch(batch, catalogue, request_query=(batch.request_query + 2) % 8)
    model = build_variant(name, catalogue)
    with torch.no_grad():
        states = model.encode_history(batch, model.history_tokens(batch))
        past = model.request_states(states, batch)
        prediction = model.predict_next(
            past, batch.query_text, batch.request_query_text
        )
        other_prediction = model.predict_next(
            past, other.query_text, other.request_query_text
        )
    changed = not torch.allclose(prediction, other_prediction, atol=1e-5)
    assert changed == is_condition


def build_document_model(name, negatives, catalogue):
    """Build a model that predicts the next token, and one with the same weights that
    predicts the next document.
    """
    token_model, document_model = (
        build_variant(name, catalogue, next_item=next_item, negatives=negatives)
        for next_item in ("token", "document")
    )
    weights = {
        **token_model.state_dict(),
        "target.weight": document_model.target.weight,
    }
    document_model.load_state_dict(weights)
    return token_model, document_model


@pytest.mark.parametrize("negatives", ["position", "batch"])
@pytest.mark.parametrize("name", ["qgs", "hstu", "hllm_item_tower"])
def test_the_next_document_is_predicted_instead_of_the_next_token(
    name, negatives, catalogue, batch
):
    token_model, model = build_document_model(name, negatives, catalogue)
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


@pytest.mark.parametrize("negatives", ["position", "batch"])
@pytest.mark.parametrize("name", ["qgs", "hstu", "hllm_item_tower"])
@pytest.mark.parametrize("key", ["history_query", "history_features"])
def test_the_next_document_is_predicted_without_its_features_and_with_its_query(
    key, name, negatives, catalogue, batch
):
    """The last behaviours change, which no state before them reads."""
    _, model = build_document_model(name, negatives, catalogue)
    values = getattr(batch, key).clone()
    for row, length in enumerate(batch.history_length.tolist()):
        values[row, length - 1] = (values[row, length - 1] + 1) % 8
    changed = change_batch(batch, catalogue, **{key: values})

    with torch.no_grad():
        loss = model(batch)["infonce"]
        states = model.encode_history(batch, model.history_tokens(batch))
        changed_loss = model.next_item_loss(states, None, changed)

    is_condition = key == "history_query" and model.config.query_condition == "query"
    assert torch.equal(changed_loss, loss) != is_condition


def record_tower_inputs(model):
    """Return a list to which the first tower's inputs are appended."""
    inputs = []
    model.towers[0].register_forward_pre_hook(
        lambda tower, args: inputs.append(args[0])
    )
    return inputs


@pytest.mark.parametrize("name", ["qgs_match", "hstu_match", "hllm_item_tower_match"])
def test_match_adds_the_similarity_to_the_predicted_next_item_to_the_tower_inputs(
    name, catalogue, batch
):
    model = build_variant(name, catalogue)
    model_without = build_variant(name, catalogue, match=False)
    shared_weights = {
        key: value for key, value in model.state_dict().items() if "towers" not in key
    }
    model_without.load_state_dict(shared_weights, strict=False)
    inputs = record_tower_inputs(model)
    inputs_without = record_tower_inputs(model_without)

    with torch.no_grad():
        model.score(batch)
        model_without.score(batch)
        states = model.encode_history(batch, model.history_tokens(batch))
        past = model.request_states(states, batch)

        assert torch.equal(inputs[0][:, :-1], inputs_without[0])
        for n, (item, request) in enumerate(
            zip(batch.candidate, batch.candidate_request.tolist(), strict=True)
        ):
            z = model.predict_next(
                past[request], batch.query_text, batch.request_query_text[request]
            )
            v = model.target.weight @ model.embed_documents(item)
            cosine = float((z * v).sum() / (z.norm() * v.norm()))
            assert float(inputs[0][n, -1]) == pytest.approx(cosine / 0.1, abs=1e-4)
