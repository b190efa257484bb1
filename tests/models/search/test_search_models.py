"""Every search model: causal, candidates apart, whatever else is in the batch; and
QGS's own promises.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.search.catalogue import SearchCatalogue, pair_key
from models.search.hllm import HLLM, HLLMConfig
from models.search.qgs import QGS, HSTUConfig, QGSConfig
from models.search.ranker import Ranker, RankerConfig
from tests.fixtures.search_tables import ITEM_MODEL, change
from tests.models.search.test_search_equations import loop_loss

SMALL = {
    "max_history": 8,
    "text_width": 6,
    "dnn_width": 12,
    "tower_width": 8,
    "group_output": 10,
    "dropout": 0.0,
}
DEEP = {**SMALL, "width": 24, "num_layers": 2, "num_heads": 2, "ffn": 16}
MATCH = {"next_item": "document", "match": True}
VARIANTS = {
    "base": (Ranker, RankerConfig, SMALL),
    "hstu": (QGS, HSTUConfig, DEEP),
    "hllm": (HLLM, HLLMConfig, DEEP),
    "hllm_item_tower": (HLLM, HLLMConfig, DEEP | {"item_model": ITEM_MODEL}),
    "qgs": (QGS, QGSConfig, DEEP),
    "qgs_hstu": (QGS, QGSConfig, DEEP | {"encoder": "hstu"}),
    "qgs_transformer": (QGS, QGSConfig, DEEP | {"encoder": "transformer"}),
    "qgs_item_only": (QGS, QGSConfig, DEEP | {"query_condition": "none"}),
    "qgs_no_context": (QGS, QGSConfig, DEEP | {"context_features": False}),
    "qgs_no_groups": (QGS, QGSConfig, DEEP | {"group_attention": False}),
    "qgs_batch_negatives": (QGS, QGSConfig, DEEP | {"negatives": "batch"}),
    "qgs_no_infonce": (QGS, QGSConfig, DEEP | {"infonce_weight": 0.0}),
    "qgs_match": (QGS, QGSConfig, DEEP | MATCH),
    "hstu_match": (QGS, HSTUConfig, DEEP | MATCH),
    "hllm_item_tower_match": (
        HLLM,
        HLLMConfig,
        DEEP | MATCH | {"item_model": ITEM_MODEL},
    ),
}
GENERATIVE = [name for name in VARIANTS if name != "base"]


def make(name: str, catalogue: SearchCatalogue, **changes) -> torch.nn.Module:
    kind, config, options = VARIANTS[name]
    torch.manual_seed(0)
    model = kind(config(**(options | changes)), catalogue).eval()
    with torch.no_grad():  # away from zeros, so that a leak would show
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_reaches_every_weight(name, catalogue, batch):
    model = make(name, catalogue).train()
    out = model(batch)
    out["loss"].backward()
    assert torch.isfinite(out["loss"])
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
    assert model.score(batch).shape == (len(batch.candidate), 2)


@pytest.mark.parametrize("name", GENERATIVE)
def test_a_behaviour_reaches_no_earlier_state_and_no_earlier_request(
    name, catalogue, batch
):
    model = make(name, catalogue)
    row = int(batch.history_length.argmax())
    place = int(batch.history_length[row]) // 2
    with torch.no_grad():
        states = model.encode_history(batch, model.history_tokens(batch))
        scores = model.score(batch)
        for key, value in (
            ("history", (batch.history[row, place] + 5) % 24),
            ("history_query", (batch.history_query[row, place] + 2) % 8),
            ("history_features", batch.history_features[row, place] + 1),
            ("history_time", batch.history_time[row, place] + 90_000),
        ):
            values = getattr(batch, key).clone()
            values[row, place] = value
            moved = change(batch, catalogue, **{key: values})
            after = model.encode_history(moved, model.history_tokens(moved))
            assert torch.equal(after[row, :place], states[row, :place]), key
            others = torch.arange(len(states)) != row
            assert torch.equal(after[others], states[others]), key
            early = (batch.request_row != row) | (batch.request_end <= place)
            assert torch.equal(
                model.score(moved)[early[batch.candidate_request]],
                scores[early[batch.candidate_request]],
            )
            if key == "history":
                late = (after[row, place:] - states[row, place:]).abs().sum(-1)
                assert (late[: int(batch.history_length[row]) - place] > 0).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_candidates_never_see_each_other_nor_labels(name, catalogue, batch):
    model = make(name, catalogue)
    with torch.no_grad():
        scores = model.score(batch)
        candidate, features = batch.candidate.clone(), batch.features.clone()
        candidate[3] = (candidate[3] + 5) % 24
        features[3] += 1
        moved = change(
            batch,
            catalogue,
            labels=~batch.labels,
            candidate=candidate,
            features=features,
        )
        after = model.score(moved)
    others = torch.arange(len(scores)) != 3
    assert torch.equal(after[others], scores[others])
    assert (after[3] != scores[3]).any()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_users_scores_do_not_depend_on_the_batch(name, catalogue, examples, batch):
    model = make(name, catalogue)
    with torch.no_grad():
        scores = model.score(batch)
        for row in range(3):
            alone = model.score(examples.collate(np.array([row])))
            mine = batch.request_row[batch.candidate_request] == row
            assert torch.allclose(alone, scores[mine], atol=1e-5)


def test_the_joint_condition_has_seen_the_document_and_ours_has_not(catalogue, batch):
    with pytest.warns(UserWarning, match="leaks the document to predict"):
        joint = make("qgs", catalogue, query_condition="joint")
    ours = make("qgs", catalogue)
    # two documents after one query
    keys = np.array([pair_key(item, 1, catalogue.num_queries) for item in (2, 3)])
    pairs, _ = catalogue.text.find_pairs(keys)
    conditions = (
        (joint, catalogue.text.joint[pairs], True),
        (ours, catalogue.text.queries[[1, 1]], False),
    )
    with torch.no_grad():
        for model, text, moves in conditions:
            past = torch.zeros(2, 24)
            z = model.predict_next(past, torch.from_numpy(text), torch.arange(2))
            assert torch.allclose(z[0], z[1], atol=1e-5) != moves
        assert joint.score(batch).shape == (len(batch.candidate), 2)
    joint.train()(batch)["loss"].backward()


def test_the_query_moves_the_prediction_only_where_it_is_a_condition(catalogue, batch):
    other = change(batch, catalogue, request_query=(batch.request_query + 2) % 8)
    with torch.no_grad():
        for name, moves in (("qgs", True), ("qgs_item_only", False)):
            model = make(name, catalogue)
            past = model.request_states(
                model.encode_history(batch, model.history_tokens(batch)), batch
            )
            z = [
                model.predict_next(past, each.query_text, each.request_query_text)
                for each in (batch, other)
            ]
            assert torch.allclose(*z, atol=1e-5) != moves


@pytest.mark.parametrize("negatives", ["position", "batch"])
@pytest.mark.parametrize("name", ["qgs", "hstu", "hllm_item_tower"])
def test_the_next_document_is_compared_in_place_of_the_next_token(
    name, negatives, catalogue, batch
):
    token, document = (
        make(name, catalogue, next_item=what, negatives=negatives)
        for what in ("token", "document")
    )
    document.load_state_dict(
        {**token.state_dict(), "target.weight": document.target.weight}
    )
    item, new = batch.history[:, 1:], batch.history_new[:, None]
    valid = (item >= 0) & (torch.arange(1, batch.history.shape[1]) >= new)
    with torch.no_grad():
        ours, theirs = document(batch), token(batch)
        assert torch.equal(ours["ranking"], theirs["ranking"])
        states = document.encode_history(batch, document.history_tokens(batch))
        z = torch.zeros(*item.shape, document.config.width)
        v = torch.zeros_like(z)
        for b, t in valid.nonzero().tolist():
            asked = batch.history_query_text[b, t + 1]
            z[b, t] = document.predict_next(states[b, t], batch.query_text, asked)
            v[b, t] = document.target.weight @ document.embed_documents(item[b, t])
        want = loop_loss(z, v, item, valid, document.config.temperature, negatives)
        assert float(ours["infonce"]) == pytest.approx(want, rel=1e-4)
        for key in (
            "history_query",
            "history_features",
        ):  # of the last behaviours, which no state before them reads
            values = getattr(batch, key).clone()
            for row, length in enumerate(batch.history_length.tolist()):
                values[row, length - 1] = (values[row, length - 1] + 1) % 8
            moved = change(batch, catalogue, **{key: values})
            moved_loss = document.next_item_loss(
                document.encode_history(batch, document.history_tokens(batch)),
                None,
                moved,
            )
            reads = (
                key == "history_query" and document.config.query_condition == "query"
            )  # the condition
            assert torch.equal(moved_loss, ours["infonce"]) != reads, key


@pytest.mark.parametrize("name", ["qgs_match", "hstu_match", "hllm_item_tower_match"])
def test_towers_read_how_well_a_candidate_matches_the_predicted_next_item(
    name, catalogue, batch
):
    model = make(name, catalogue)
    without = make(name, catalogue, match=False)
    read = {}
    for each in (model, without):
        each.towers[0].register_forward_pre_hook(
            lambda tower, given, each=each: read.update({each: given[0]})
        )
    state = {
        key: value for key, value in model.state_dict().items() if "towers" not in key
    }
    without.load_state_dict(state, strict=False)
    with torch.no_grad():
        model.score(batch), without.score(batch)
        past = model.request_states(
            model.encode_history(batch, model.history_tokens(batch)), batch
        )
        assert torch.equal(read[model][:, :-1], read[without])
        for n, (item, request) in enumerate(
            zip(batch.candidate, batch.candidate_request.tolist(), strict=True)
        ):
            z = model.predict_next(
                past[request], batch.query_text, batch.request_query_text[request]
            )
            v = model.target.weight @ model.embed_documents(item)
            cosine = float((z * v).sum() / (z.norm() * v.norm()))
            assert float(read[model][n, -1]) == pytest.approx(cosine / 0.1, abs=1e-4)


def test_impossible_settings_are_refused():
    for options, message in (
        ({"encoder": "hstu", "width": 30}, "not a multiple of num_heads"),
        ({"query_condition": "all"}, "it must be one of query, joint, none"),
        ({"temperature": 0}, "the paper uses 0.1"),
        ({"pretrained": "x"}, "cannot load; use encoder transformer"),
        ({"group_width": 12}, "not a multiple of group_heads"),
        ({"dropout": 1.0}, "not in"),
        ({"next_item": "item"}, "it must be one of token, document"),
        (
            {"match": True},
            "next_item is 'token' and infonce_weight is 0.1; use next_item document and a weight above 0",
        ),
        ({**MATCH, "infonce_weight": 0}, "infonce_weight is 0; use"),
    ):
        with pytest.raises(ValueError, match=message):
            QGSConfig(**options)
