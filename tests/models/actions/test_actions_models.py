"""All seven models: causal, candidates apart, padding unread, all weights learned; and
their own promises.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from models.actions import fusions, metrics
from models.actions.base import ActionsConfig, FusionModel, ItemNetwork
from models.actions.batch import ActionsBatch, has_tied_times

SMALL = {
    "width": 16,
    "num_layers": 2,
    "num_heads": 2,
    "ffn": 24,
    "experts": 3,
    "expert_width": 8,
    "tower_width": 6,
    "dropout": 0.0,
}
VARIANTS = {
    "interleaved": (fusions.Interleaved, fusions.InterleavedConfig),
    "attn_lfa": (fusions.AttnLFA, fusions.AttnLFAConfig),
    "attn_mvp": (fusions.AttnMVP, fusions.AttnMVPConfig),
    "attn_mvp_no_lfa": (
        fusions.AttnMVP,
        partial(fusions.AttnMVPConfig, late_fusion=False),
    ),
    "attn_dhn": (fusions.AttnDHN, fusions.AttnDHNConfig),
    "lac": (fusions.LAC, fusions.LACConfig),
    "genrank": (fusions.GenRank, fusions.GenRankConfig),
}
LEARN_FROM_HISTORY = [name for name in VARIANTS if name != "genrank"]


def make(name: str, catalogue, **changes) -> FusionModel:
    kind, config = VARIANTS[name]
    torch.manual_seed(0)
    model = kind(config(**(SMALL | changes)), catalogue).eval()
    with torch.no_grad():  # away from zeros, so that a leak would show
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def predictions(
    model: FusionModel, batch: ActionsBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of context events (B, T, K), where the model has such, and of candidates
    (B, C, K).
    """
    with torch.no_grad():
        logits = model.logits(batch, history=model.history_targets)
    n = logits.shape[1] - batch.candidate_item.shape[1]
    return logits[:, :n], logits[:, n:]


def moved(
    model: FusionModel, batch: ActionsBatch, changed: ActionsBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    before, after = predictions(model, batch), predictions(model, changed)
    past, candidates = (
        (b - a).abs().amax(2) > 1e-5 for b, a in zip(before, after, strict=True)
    )
    return past, candidates


def visible(batch: ActionsBatch) -> torch.Tensor:
    """(B, C, T): which context events each candidate sees."""
    return (
        torch.arange(7) < batch.count_earlier()[:, 7:, None]
    ) & batch.candidate_valid[..., None]


def edit(batch: ActionsBatch, name: str, place: tuple, value: float) -> ActionsBatch:
    copy = batch.map(Tensor.clone)
    getattr(copy, name)[place] = value
    return copy


@pytest.mark.parametrize("name", VARIANTS)
def test_labels_are_never_read_as_inputs(name, catalogue, batch):
    model = make(name, catalogue)
    flipped = replace(
        batch, label=1 - batch.label, candidate_label=1 - batch.candidate_label
    )
    assert not any(part.any() for part in moved(model, batch, flipped))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "changed",
    ["candidate_item", "candidate_time", "candidate_feature", "candidate_viewer"],
)
def test_a_candidate_moves_no_other_prediction(name, changed, catalogue, batch):
    model = make(name, catalogue)
    for c in range(3):
        place, value = ((0, c, 0), 2) if changed == "candidate_viewer" else ((0, c), 21)
        past, candidates = moved(model, batch, edit(batch, changed, place, value))
        assert not past.any()
        assert not candidates[1:].any()
        assert candidates[0].tolist() == [place == c for place in range(3)]


@pytest.mark.parametrize("name", VARIANTS)
def test_an_item_moves_no_earlier_prediction(name, catalogue, batch):
    past, candidates = moved(
        make(name, catalogue), batch, edit(batch, "item", (0, 4), 29)
    )
    assert not past[0, :4].any()
    assert (
        candidates[0].tolist()
        == visible(batch)[0, :, 4].tolist()
        == [True, False, True]
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_is_not_read(name, catalogue, batch):
    model = make(name, catalogue)
    padded = batch.map(Tensor.clone)
    padded.item[~batch.valid] = 1
    padded.action[~batch.valid] = 1
    padded.candidate_item[~batch.candidate_valid] = 1
    with torch.no_grad():
        torch.testing.assert_close(model.score(padded), model.score(batch))
        # user 1 without padding
        alone = batch.select("B", slice(1, 2))
        alone = alone.map(lambda value: value[:, :3] if value.ndim > 1 else value)
        torch.testing.assert_close(model.score(alone), model.score(batch)[3:6])
        torch.testing.assert_close(model(padded)["loss"], model(batch)["loss"])


TIES = {
    "none": [0, 1, 2, 3, 4, 5, 6],
    "some": [0, 1, 1, 3, 4, 4, 4],
    "a page": [0, 0, 0, 0, 0, 5, 5],
}


@pytest.mark.parametrize("times", TIES)
@pytest.mark.parametrize("name", LEARN_FROM_HISTORY)
def test_one_pass_gives_every_event_what_it_has_alone_after_what_is_strictly_earlier(
    name, times, catalogue, batch
):
    """A slow loop over the events, each a candidate after its own context; of events of
    one time in any order.
    """
    model = make(name, catalogue)
    row = replace(batch.select("B", slice(1)), time=torch.tensor([TIES[times]]))
    in_context, _ = predictions(model, row)
    for n, time in enumerate(TIES[times]):
        before = sum(other < time for other in TIES[times])
        changes = {
            name: value[:, : max(before, 1)]
            for name, value in row.tensors().items()
            if "T" in row.tensor_axes()[name]
        }
        changes["valid"] = changes["valid"] & torch.tensor(before > 0)
        for name in ("item", "time", "feature", "viewer", "label", "valid"):
            changes[f"candidate_{name}"] = getattr(row, name)[:, n : n + 1]
        cut = replace(row, **changes)
        torch.testing.assert_close(
            predictions(model, cut)[1][0, 0], in_context[0, n], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_an_action_moves_no_prediction_of_its_own_time(name, catalogue, batch):
    model = make(name, catalogue)
    batch.time[0] = torch.tensor([0, 10, 10, 10, 40, 50, 50])
    batch.candidate_time[0] = torch.tensor([10, 50, 60])
    for t in range(7):
        past, candidates = moved(model, batch, edit(batch, "action", (0, t), 3.0))
        later = [int(number) > t for number in batch.count_earlier()[0]]
        if name != "genrank":  # whose context holds its labels, and is not learned from
            assert not any(
                moved and not may
                for moved, may in zip(past[0].tolist(), later[:7], strict=True)
            )
        assert not any(
            moved and not may
            for moved, may in zip(candidates[0].tolist(), later[7:], strict=True)
        )
        if name not in ("lac", "genrank"):
            assert past[0].tolist() + candidates[0].tolist() == later


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_reaches_every_weight(name, catalogue, batch):
    model = make(name, catalogue).train()
    model(batch)["loss"].backward()
    unreached = [
        name
        for name, weight in model.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ]
    assert not unreached


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_is_of_events_that_do_not_hold_their_label(name, catalogue, batch):
    """Nor of those that another row learns from."""
    model = make(name, catalogue)
    batch.learn[0, 0] = False
    logits = torch.cat(predictions(model, batch), 1)
    positions = logits.shape[1]
    label = batch.join("label")[:, -positions:]
    learned = torch.cat([batch.learn, batch.candidate_valid], 1)[:, -positions:]
    cost = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, label, reduction="none"
    ).sum(2)
    assert int(learned.sum()) == (9 if name == "genrank" else 9 + 10)
    found = model(batch)
    torch.testing.assert_close(found["loss"], cost[learned].mean())
    assert float(found["padding"]) == pytest.approx(1 - (11 + 9) / (4 * 10))


def test_without_lambda_mvp_ignores_actions_until_the_late_fusion(catalogue, batch):
    other = replace(batch, action=1 - batch.action)
    blind = make("attn_mvp_no_lfa", catalogue, action_weight=0.0)
    assert not any(part.any() for part in moved(blind, batch, other))
    late = make("attn_mvp", catalogue, action_weight=0.0)
    assert all(part[0, 1:].all() for part in moved(late, batch, other))
    width, inputs = late.config.width, []
    late.pool.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    late.head.register_forward_pre_hook(
        lambda _, given: inputs.append(given[0][..., :width])
    )
    for some in (batch, other):
        predictions(late, some)
    states, head, other_states, other_head = inputs
    assert torch.equal(states, other_states)
    assert torch.equal(head, other_head)


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_lambda_weighs_the_actions_in_the_values_of_mvp(weight, catalogue, batch):
    model = make("attn_mvp", catalogue, action_weight=weight)
    read = []
    model.transformer[0].attention.register_forward_pre_hook(
        lambda _, given: read.append(given)
    )
    predictions(model, batch)
    states, values, layout = read[0]
    expected = states[:, : layout.context] + weight * model.actions(batch.action)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)


def test_actions_of_dhn_read_the_items_of_their_own_layer(catalogue, batch):
    model = make("attn_dhn", catalogue)
    items, read = [], []
    model.item_blocks[0].register_forward_hook(
        lambda _, given, made: items.append(made)
    )
    model.action_blocks[0].attention.register_forward_pre_hook(
        lambda _, given: read.append(given)
    )
    predictions(model, batch)
    states, values, layout = read[0]
    torch.testing.assert_close(
        values, states + items[0][:, : layout.context], rtol=0, atol=1e-6
    )


def test_without_ids_items_of_like_attributes_are_alike(catalogue, batch):
    """Items 0 and 15 have the same categories; their numbers are made the same."""
    numbers = catalogue.numbers.clone()
    numbers[15] = numbers[0]
    alike = replace(catalogue, numbers=numbers)
    batch.candidate_item[0, :2] = torch.tensor([0, 15])
    for other in ("candidate_viewer", "candidate_feature", "candidate_time"):
        values = getattr(batch, other)
        values[0, 1] = values[0, 0]
    for item_ids, same in {"learned": False, "hashed": False, "none": True}.items():
        _, scores = predictions(
            make("attn_mvp", alike, item_ids=item_ids, id_buckets=20), batch
        )
        assert torch.allclose(scores[0, 0], scores[0, 1]) == same
    one_bucket = make("attn_mvp", alike, item_ids="hashed", id_buckets=1)
    _, scores = predictions(one_bucket, batch)
    assert torch.allclose(scores[0, 0], scores[0, 1])
    assert one_bucket.items.tables[0].weight.shape == (1, SMALL["width"])


@pytest.mark.parametrize("name", VARIANTS)
def test_an_item_of_the_request_is_read_as_one_of_the_catalogue(name, catalogue, batch):
    """With its content from the batch and no id; text moves scores."""
    told = replace(catalogue, text=torch.randn(30, 5))
    batch.candidate_item[0, 0] = batch.item[0, 2] = 7
    content = {
        f"new_{key}": getattr(told, key)[[7]]
        for key in ("numbers", "categories", "text")
    }
    brought = edit(edit(batch, "candidate_item", (0, 0), 30), "item", (0, 2), 30)
    brought = replace(brought, **content)
    model = make(name, told, item_ids="none")
    assert not any(part.any() for part in moved(model, batch, brought))
    other_text = replace(brought, new_text=content["new_text"] + 1)
    assert moved(model, batch, other_text)[1][0, 0]
    model = make(name, told)
    with torch.no_grad():
        model.items.tables[0].weight[7] = 0
    assert not any(part.any() for part in moved(model, batch, brought))
    with torch.no_grad():
        model.items.tables[0].weight[7] = 1
    assert moved(model, batch, brought)[1][0, 0]


def test_hashes_spread_items_over_their_buckets(catalogue):
    config = ActionsConfig(**SMALL, item_ids="hashed", id_buckets=64)
    hashed = ItemNetwork(catalogue, config).hash_ids(torch.arange(6400))
    assert torch.bincount(hashed, minlength=64).min() > 60


def test_an_item_that_training_has_not_seen_is_unknown(catalogue, batch):
    torch.manual_seed(0)
    model = fusions.AttnMVP(
        fusions.AttnMVPConfig(**SMALL, id_dropout=0.5), catalogue
    ).train()
    ids = model.items.tables[0].weight
    assert not ids.any()
    batch.item.remainder_(15)
    batch.candidate_item.remainder_(15)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch)["loss"].backward()
        optimizer.step()
    assert ids[:15].any()
    assert not ids[15:].any()
    parts: list[torch.Tensor] = []
    model.items.project.register_forward_pre_hook(
        lambda _, given: parts.append(given[0])
    )
    item = torch.full((2000,), int(ids.abs().sum(1).argmax()))
    model.items(item)
    dropped = (parts[0][:, : SMALL["width"]] == 0).all(1).double().mean()
    assert 0.45 < dropped < 0.55
    model.eval().items(item)
    assert (parts[1][:, : SMALL["width"]] != 0).any(1).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_starts_by_predicting_the_rates_of_training(name, catalogue, batch):
    """So that it starts at a normalised entropy of 1, however rare a task is; a task of
    one class stays finite.
    """
    kind, config = VARIANTS[name]
    torch.manual_seed(0)
    model = kind(config(), replace(catalogue, train_rates=(0.3, 0.01, 0.5))).eval()
    rates = torch.tensor(model.train_rates).expand(9, 3)
    with torch.no_grad():
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            model.score(batch), rates, reduction="none"
        ).mean(0)
    entropy = torch.nn.functional.binary_cross_entropy(
        rates, rates, reduction="none"
    ).mean(0)
    torch.testing.assert_close(loss / entropy, torch.ones(3), rtol=0, atol=0.03)
    of_one_class = kind(
        config(**SMALL), replace(catalogue, train_rates=(0.0, 1.0, 0.5))
    )
    assert of_one_class.head.bias.tolist() == pytest.approx(
        [-9.21024, 9.21024, 0.0], abs=1e-3
    )


def test_only_the_fusion_differs_in_size(catalogue):
    counts = {name: make(name, catalogue).parameter_counts() for name in VARIANTS}
    for part in ("items", "actions"):
        assert len({count[part] for count in counts.values()}) == 1
    blocks = [
        count["transformer"] for name, count in counts.items() if name != "attn_dhn"
    ]
    assert len(set(blocks)) == 1
    assert (
        counts["attn_dhn"]["item_blocks"]
        == counts["attn_dhn"]["action_blocks"]
        == blocks[0]
    )
    assert counts["attn_lfa"] == counts["attn_mvp"]
    assert counts["interleaved"] == counts["attn_mvp_no_lfa"]
    assert (
        counts["lac"]["total"]
        == counts["genrank"]["total"]
        == counts["interleaved"]["total"] + SMALL["width"]
    )
    assert all(count["total"] == sum(count.values()) / 2 for count in counts.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"width": 0}, "width is 0, it must be at least 1"),
        ({"dropout": 1.0}, "dropout 1.0 is not in"),
        ({"id_dropout": -0.1}, "id_dropout -0.1 is not in"),
        ({"item_ids": "none "}, "item_ids is 'none ', it must be"),
        ({"action_weight": -1}, "action_weight is -1"),
        (
            {"width": 18, "num_heads": 6},
            "width 18 is not a multiple of twice num_heads 6",
        ),
    ],
)
def test_impossible_sizes_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        fusions.AttnMVPConfig(**(SMALL | changes))


@pytest.mark.parametrize("name", ["attn_mvp", "genrank"])
def test_a_share_of_the_negatives_is_learned_from_and_corrected_for(
    name, catalogue, batch
):
    rate = 0.3
    model, whole = make(name, catalogue, negative_rate=rate), make(name, catalogue)
    with (
        torch.no_grad()
    ):  # the same weights but for the bias, which begins at the rates
        bias = model.head.bias - whole.head.bias
        torch.testing.assert_close(bias, torch.full_like(bias, -math.log(rate)))
        state = torch.get_rng_state()
        torch.testing.assert_close(
            model.score(batch), whole.score(batch), rtol=1e-5, atol=1e-5
        )
        found = metrics.means(metrics.measure(model, batch))
        assert torch.equal(
            torch.get_rng_state(), state
        )  # nothing is drawn in evaluation
        logits = model.logits(batch, history=model.history_targets)
        label, learned = batch.candidate_label, batch.candidate_valid
        raw = logits[:, -3:][learned]
        torch.testing.assert_close(model.score(batch), raw + math.log(rate))
        for place, task in enumerate(model.labels):
            expected = raw[:, place].sigmoid().sum() / label[learned][:, place].sum()
            assert found[f"{task}/calibration_uncorrected"] == pytest.approx(
                float(expected), rel=1e-5
            )
            assert (
                found[f"{task}/calibration"] < found[f"{task}/calibration_uncorrected"]
            )
        if model.history_targets:
            label, learned = (
                torch.cat([batch.label, label], 1),
                torch.cat([batch.learn, learned], 1),
            )
        logits, label = logits[learned].double(), label[learned]

        cost = [0.0] * len(
            model.labels
        )  # of all events, negatives by their share, and a loop over the events drawn
        torch.manual_seed(3)
        kept = (torch.rand(learned.numel(), 1)[:, 0] < rate)[learned.flatten()]
        for place in range(len(model.labels)):
            terms = [
                -math.log(float(torch.sigmoid(logit if positive else -logit)))
                for logit, positive, drawn in zip(
                    logits[:, place], label[:, place], kept, strict=True
                )
                if positive or drawn
            ]
            cost[place] = sum(terms) / len(terms)
        torch.manual_seed(3)
        assert float(model(batch)["loss"]) == pytest.approx(sum(cost), rel=1e-5)


def test_every_event_sees_what_is_strictly_before_it(batch):
    batch.candidate_time[0] = torch.tensor([30, 31, -5])
    assert not has_tied_times(batch.time, batch.valid)
    assert batch.count_earlier()[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 4, 0]
    batch.time[0, 2:5] = 20
    assert has_tied_times(batch.time, batch.valid)
    assert batch.count_earlier()[0].tolist() == [0, 1, 2, 2, 2, 5, 6, 5, 5, 0]
    assert batch.count_earlier()[3, 7:9].tolist() == [0, 0]  # a user without context
