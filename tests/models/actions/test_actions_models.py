"""All seven models of actions: they are causal, rank candidates independently, ignore
padding and train every weight; and the properties of each fusion.
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


def build_model(name: str, catalogue, **changes) -> FusionModel:
    """Build a small model in evaluation mode."""
    model_class, config_class = VARIANTS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**(SMALL | changes)), catalogue).eval()
    with torch.no_grad():  # away from zeros, so that a leak would show
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def predict(model: FusionModel, batch: ActionsBatch) -> tuple[Tensor, Tensor]:
    """Return logits of context events (B, T, K), with T = 0 for a model without them,
    and of candidates (B, C, K).
    """
    with torch.no_grad():
        logits = model.logits(batch, history=model.history_targets)
    num_context = logits.shape[1] - batch.candidate_item.shape[1]
    return logits[:, :num_context], logits[:, num_context:]


def find_changes(
    model: FusionModel, batch: ActionsBatch, other: ActionsBatch
) -> tuple[Tensor, Tensor]:
    """Return masks of the context events (B, T) and candidates (B, C) whose predictions
    differ between two batches.
    """
    context, candidates = predict(model, batch)
    other_context, other_candidates = predict(model, other)
    return (
        (other_context - context).abs().amax(2) > 1e-5,
        (other_candidates - candidates).abs().amax(2) > 1e-5,
    )


def assert_no_change(
    model: FusionModel, batch: ActionsBatch, other: ActionsBatch
) -> None:
    context_changes, candidate_changes = find_changes(model, batch, other)
    assert not context_changes.any()
    assert not candidate_changes.any()


def build_visibility_mask(batch: ActionsBatch) -> Tensor:
    """Return a mask (B, C, T) of the context events that each candidate sees."""
    is_earlier = torch.arange(7) < batch.count_earlier()[:, 7:, None]
    return is_earlier & batch.candidate_valid[..., None]


def edit(batch: ActionsBatch, name: str, index: tuple, value: float) -> ActionsBatch:
    """Return a copy of a batch with one value changed."""
    copy = batch.map(Tensor.clone)
    getattr(copy, name)[index] = value
    return copy


@pytest.mark.parametrize("name", VARIANTS)
def test_labels_are_never_read_as_inputs(name, catalogue, batch):
    model = build_model(name, catalogue)
    flipped = replace(
        batch, label=1 - batch.label, candidate_label=1 - batch.candidate_label
    )
    assert_no_change(model, batch, flipped)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "changed",
    ["candidate_item", "candidate_time", "candidate_feature", "candidate_viewer"],
)
def test_a_candidate_changes_no_other_prediction(name, changed, catalogue, batch):
    model = build_model(name, catalogue)
    for c in range(3):
        if changed == "candidate_viewer":
            edited = edit(batch, changed, (0, c, 0), 2)
        else:
            edited = edit(batch, changed, (0, c), 21)

        context_changes, candidate_changes = find_changes(model, batch, edited)

        assert not context_changes.any()
        assert not candidate_changes[1:].any()
        assert candidate_changes[0].tolist() == [index == c for index in range(3)]


@pytest.mark.parametrize("name", VARIANTS)
def test_an_item_changes_no_earlier_prediction(name, catalogue, batch):
    model = build_model(name, catalogue)

    context_changes, candidate_changes = find_changes(
        model, batch, edit(batch, "item", (0, 4), 29)
    )

    assert not context_changes[0, :4].any()
    sees_item = build_visibility_mask(batch)[0, :, 4]
    assert candidate_changes[0].tolist() == sees_item.tolist() == [True, False, True]


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_is_not_read(name, catalogue, batch):
    model = build_model(name, catalogue)
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
"""Times of the seven context events of one user."""


def cut_before(row: ActionsBatch, index: int, num_earlier: int) -> ActionsBatch:
    """Return one user's row with context event `index` as its only candidate, after a
    context of the first `num_earlier` events.
    """
    changes = {
        name: value[:, : max(num_earlier, 1)]
        for name, value in row.tensors().items()
        if "T" in row.tensor_axes()[name]
    }
    changes["valid"] = changes["valid"] & torch.tensor(num_earlier > 0)
    for name in ("item", "time", "feature", "viewer", "label", "valid"):
        changes[f"candidate_{name}"] = getattr(row, name)[:, index : index + 1]
    return replace(row, **changes)


@pytest.mark.parametrize("times", TIES)
@pytest.mark.parametrize("name", LEARN_FROM_HISTORY)
def test_one_pass_predicts_every_event_as_if_alone_after_the_strictly_earlier_events(
    name, times, catalogue, batch
):
    """The reference is a slow loop over the events, each a candidate after its context."""
    model = build_model(name, catalogue)
    row = replace(batch.select("B", slice(1)), time=torch.tensor([TIES[times]]))

    in_context, _ = predict(model, row)

    for index, time in enumerate(TIES[times]):
        num_earlier = sum(other < time for other in TIES[times])
        _, alone = predict(model, cut_before(row, index, num_earlier))
        torch.testing.assert_close(
            alone[0, 0], in_context[0, index], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_an_action_changes_no_prediction_of_the_same_time(name, catalogue, batch):
    model = build_model(name, catalogue)
    batch.time[0] = torch.tensor([0, 10, 10, 10, 40, 50, 50])
    batch.candidate_time[0] = torch.tensor([10, 50, 60])
    for t in range(7):
        edited = edit(batch, "action", (0, t), 3.0)
        context_changes, candidate_changes = find_changes(model, batch, edited)
        # (T + C): whether the event with the changed action is strictly earlier
        is_later = batch.count_earlier()[0] > t

        # the context of genrank has its labels as inputs, and is not trained on
        if name != "genrank":
            num_context = context_changes.shape[1]
            assert not (context_changes[0] & ~is_later[:num_context]).any()
        assert not (candidate_changes[0] & ~is_later[7:]).any()
        if name not in ("lac", "genrank"):
            changes = torch.cat([context_changes[0], candidate_changes[0]])
            assert changes.tolist() == is_later.tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_reaches_every_weight(name, catalogue, batch):
    model = build_model(name, catalogue).train()
    model(batch)["loss"].backward()
    unreached = [
        name
        for name, weight in model.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ]
    assert not unreached


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_covers_events_without_their_label_as_input(name, catalogue, batch):
    """Events that another row trains on are not covered either."""
    model = build_model(name, catalogue)
    batch.learn[0, 0] = False
    logits = torch.cat(predict(model, batch), 1)
    num_events = logits.shape[1]
    label = batch.join("label")[:, -num_events:]
    is_learned = torch.cat([batch.learn, batch.candidate_valid], 1)[:, -num_events:]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, label, reduction="none"
    ).sum(2)
    assert int(is_learned.sum()) == (9 if name == "genrank" else 9 + 10)

    outputs = model(batch)

    torch.testing.assert_close(outputs["loss"], expected[is_learned].mean())
    assert float(outputs["padding"]) == pytest.approx(1 - (11 + 9) / (4 * 10))


def test_mvp_without_lambda_ignores_actions_until_the_late_fusion(catalogue, batch):
    other = replace(batch, action=1 - batch.action)
    model_without_fusion = build_model("attn_mvp_no_lfa", catalogue, action_weight=0.0)
    assert_no_change(model_without_fusion, batch, other)

    model = build_model("attn_mvp", catalogue, action_weight=0.0)
    changes = find_changes(model, batch, other)
    assert all(mask[0, 1:].all() for mask in changes)
    # inputs of the late fusion, for both batches
    pool_inputs: list[Tensor] = []
    head_inputs: list[Tensor] = []
    model.pool.register_forward_pre_hook(lambda _, args: pool_inputs.append(args[0]))
    model.head.register_forward_pre_hook(
        lambda _, args: head_inputs.append(args[0][..., : model.config.width])
    )
    predict(model, batch)
    predict(model, other)
    assert torch.equal(*pool_inputs)
    assert torch.equal(*head_inputs)


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_lambda_weighs_the_actions_in_the_values_of_mvp(weight, catalogue, batch):
    model = build_model("attn_mvp", catalogue, action_weight=weight)
    attention_inputs = []
    model.transformer[0].attention.register_forward_pre_hook(
        lambda _, args: attention_inputs.append(args)
    )

    predict(model, batch)

    states, values, layout = attention_inputs[0]
    expected = states[:, : layout.context] + weight * model.actions(batch.action)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)


def test_action_blocks_of_dhn_read_the_items_of_the_same_layer(catalogue, batch):
    model = build_model("attn_dhn", catalogue)
    item_outputs, attention_inputs = [], []
    model.item_blocks[0].register_forward_hook(
        lambda _, args, output: item_outputs.append(output)
    )
    model.action_blocks[0].attention.register_forward_pre_hook(
        lambda _, args: attention_inputs.append(args)
    )

    predict(model, batch)

    states, values, layout = attention_inputs[0]
    expected = states + item_outputs[0][:, : layout.context]
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)


def test_without_ids_items_with_equal_attributes_get_equal_scores(catalogue, batch):
    """Items 0 and 15 have the same categories, and get the same numbers."""
    numbers = catalogue.numbers.clone()
    numbers[15] = numbers[0]
    catalogue = replace(catalogue, numbers=numbers)
    batch.candidate_item[0, :2] = torch.tensor([0, 15])
    for name in ("candidate_viewer", "candidate_feature", "candidate_time"):
        values = getattr(batch, name)
        values[0, 1] = values[0, 0]

    for item_ids, is_equal in {"learned": False, "hashed": False, "none": True}.items():
        model = build_model("attn_mvp", catalogue, item_ids=item_ids, id_buckets=20)
        _, scores = predict(model, batch)
        assert torch.allclose(scores[0, 0], scores[0, 1]) == is_equal

    one_bucket = build_model("attn_mvp", catalogue, item_ids="hashed", id_buckets=1)
    _, scores = predict(one_bucket, batch)
    assert torch.allclose(scores[0, 0], scores[0, 1])
    assert one_bucket.items.tables[0].weight.shape == (1, SMALL["width"])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_new_item_of_the_request_is_scored_by_its_content(name, catalogue, batch):
    """A new item has its content from the batch, text included, and no ID."""
    catalogue = replace(catalogue, text=torch.randn(30, 5))
    batch.candidate_item[0, 0] = batch.item[0, 2] = 7
    content = {
        f"new_{key}": getattr(catalogue, key)[[7]]
        for key in ("numbers", "categories", "text")
    }
    # index 30 is the first new item; its content is that of item 7
    with_new_item = edit(batch, "candidate_item", (0, 0), 30)
    with_new_item = edit(with_new_item, "item", (0, 2), 30)
    with_new_item = replace(with_new_item, **content)

    model = build_model(name, catalogue, item_ids="none")
    assert_no_change(model, batch, with_new_item)
    with_other_text = replace(with_new_item, new_text=content["new_text"] + 1)
    _, candidate_changes = find_changes(model, batch, with_other_text)
    assert candidate_changes[0, 0]

    model = build_model(name, catalogue)
    with torch.no_grad():
        model.items.tables[0].weight[7] = 0
    assert_no_change(model, batch, with_new_item)
    with torch.no_grad():
        model.items.tables[0].weight[7] = 1
    _, candidate_changes = find_changes(model, batch, with_new_item)
    assert candidate_changes[0, 0]


def test_hashes_spread_items_over_their_buckets(catalogue):
    config = ActionsConfig(**SMALL, item_ids="hashed", id_buckets=64)
    hashed = ItemNetwork(catalogue, config).hash_ids(torch.arange(6400))
    assert torch.bincount(hashed, minlength=64).min() > 60


def train_on_first_items(catalogue, batch: ActionsBatch) -> FusionModel:
    """Train a model with ID dropout for three steps on items 0 to 14 of 30."""
    torch.manual_seed(0)
    config = fusions.AttnMVPConfig(**SMALL, id_dropout=0.5)
    model = fusions.AttnMVP(config, catalogue).train()
    assert not model.items.tables[0].weight.any()
    batch.item.remainder_(15)
    batch.candidate_item.remainder_(15)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch)["loss"].backward()
        optimizer.step()
    return model


def test_ids_of_items_outside_training_stay_zero(catalogue, batch):
    ids = train_on_first_items(catalogue, batch).items.tables[0].weight
    assert ids[:15].any()
    assert not ids[15:].any()


def test_ids_are_dropped_at_random_in_training_only(catalogue, batch):
    model = train_on_first_items(catalogue, batch)
    ids = model.items.tables[0].weight
    inputs: list[Tensor] = []
    model.items.project.register_forward_pre_hook(
        lambda _, args: inputs.append(args[0])
    )
    item = torch.full((2000,), int(ids.abs().sum(1).argmax()))

    model.items(item)
    model.eval().items(item)

    # the first columns of the input are the ID's embedding
    train_ids, eval_ids = (part[:, : SMALL["width"]] for part in inputs)
    dropped_share = (train_ids == 0).all(1).double().mean()
    assert 0.45 < dropped_share < 0.55
    assert (eval_ids != 0).any(1).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_an_untrained_model_predicts_the_base_rates_of_training(name, catalogue, batch):
    """Its normalised entropy is 1, however rare a task is."""
    model_class, config_class = VARIANTS[name]
    torch.manual_seed(0)
    catalogue = replace(catalogue, train_rates=(0.3, 0.01, 0.5))
    model = model_class(config_class(), catalogue).eval()
    rates = torch.tensor(model.train_rates).expand(9, 3)

    with torch.no_grad():
        scores = model.score(batch)

    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        scores, rates, reduction="none"
    ).mean(0)
    entropy = torch.nn.functional.binary_cross_entropy(
        rates, rates, reduction="none"
    ).mean(0)
    torch.testing.assert_close(loss / entropy, torch.ones(3), rtol=0, atol=0.03)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_initial_bias_of_a_constant_task_is_finite(name, catalogue):
    model_class, config_class = VARIANTS[name]
    catalogue = replace(catalogue, train_rates=(0.0, 1.0, 0.5))
    bias = model_class(config_class(**SMALL), catalogue).head.bias
    assert bias.tolist() == pytest.approx([-9.21024, 9.21024, 0.0], abs=1e-3)


def test_only_the_fusion_differs_in_size(catalogue):
    counts = {
        name: build_model(name, catalogue).parameter_counts() for name in VARIANTS
    }

    for part in ("items", "actions"):
        assert len({count[part] for count in counts.values()}) == 1
    blocks = [
        count["transformer"] for name, count in counts.items() if name != "attn_dhn"
    ]
    assert len(set(blocks)) == 1
    assert counts["attn_dhn"]["item_blocks"] == blocks[0]
    assert counts["attn_dhn"]["action_blocks"] == blocks[0]
    assert counts["attn_lfa"] == counts["attn_mvp"]
    assert counts["interleaved"] == counts["attn_mvp_no_lfa"]
    with_learned_action = counts["interleaved"]["total"] + SMALL["width"]
    assert counts["lac"]["total"] == with_learned_action
    assert counts["genrank"]["total"] == with_learned_action
    assert all(count["total"] == sum(count.values()) / 2 for count in counts.values())


NEGATIVE_RATE = 0.3


@pytest.mark.parametrize("name", ["attn_mvp", "genrank"])
def test_scores_of_a_model_trained_on_a_share_of_the_negatives_are_corrected(
    name, catalogue, batch
):
    model = build_model(name, catalogue, negative_rate=NEGATIVE_RATE)
    unsampled = build_model(name, catalogue)
    with torch.no_grad():
        # the weights are equal but for the bias, which is initialised to the rates
        bias = model.head.bias - unsampled.head.bias
        expected_bias = torch.full_like(bias, -math.log(NEGATIVE_RATE))
        torch.testing.assert_close(bias, expected_bias)
        torch.testing.assert_close(
            model.score(batch), unsampled.score(batch), rtol=1e-5, atol=1e-5
        )

        _, candidate_logits = predict(model, batch)
        raw = candidate_logits[batch.candidate_valid]
        torch.testing.assert_close(model.score(batch), raw + math.log(NEGATIVE_RATE))


@pytest.mark.parametrize("name", ["attn_mvp", "genrank"])
def test_metrics_report_the_calibration_before_and_after_the_correction(
    name, catalogue, batch
):
    model = build_model(name, catalogue, negative_rate=NEGATIVE_RATE)
    state = torch.get_rng_state()
    with torch.no_grad():
        values = metrics.means(metrics.measure(model, batch))
    assert torch.equal(torch.get_rng_state(), state)  # evaluation draws no negatives

    _, logits = predict(model, batch)
    probabilities = logits[batch.candidate_valid].sigmoid()
    labels = batch.candidate_label[batch.candidate_valid]
    for index, task in enumerate(model.labels):
        expected = probabilities[:, index].sum() / labels[:, index].sum()
        uncorrected = values[f"{task}/calibration_uncorrected"]
        assert uncorrected == pytest.approx(float(expected), rel=1e-5)
        assert values[f"{task}/calibration"] < uncorrected


def negative_log_likelihood(logit: Tensor, is_positive: Tensor) -> float:
    return -math.log(float(torch.sigmoid(logit if is_positive else -logit)))


@pytest.mark.parametrize("name", ["attn_mvp", "genrank"])
def test_the_loss_is_the_mean_over_positives_and_a_share_of_the_negatives(
    name, catalogue, batch
):
    """The reference is a slow loop over the events that are drawn."""
    model = build_model(name, catalogue, negative_rate=NEGATIVE_RATE)
    context_logits, logits = predict(model, batch)
    labels, is_learned = batch.candidate_label, batch.candidate_valid
    if model.history_targets:
        logits = torch.cat([context_logits, logits], 1)
        labels = torch.cat([batch.label, labels], 1)
        is_learned = torch.cat([batch.learn, is_learned], 1)
    logits, labels = logits[is_learned].double(), labels[is_learned]

    torch.manual_seed(3)
    is_drawn = torch.rand(is_learned.numel(), 1)[:, 0] < NEGATIVE_RATE
    is_drawn = is_drawn[is_learned.flatten()]
    task_losses = []
    for index in range(len(model.labels)):
        terms = []
        for logit, is_positive, drawn in zip(
            logits[:, index], labels[:, index], is_drawn, strict=True
        ):
            if is_positive or drawn:
                terms.append(negative_log_likelihood(logit, is_positive))
        task_losses.append(sum(terms) / len(terms))

    torch.manual_seed(3)
    with torch.no_grad():
        loss = float(model(batch)["loss"])
    assert loss == pytest.approx(sum(task_losses), rel=1e-5)


def test_every_event_sees_the_events_strictly_before_it(batch):
    batch.candidate_time[0] = torch.tensor([30, 31, -5])
    assert not has_tied_times(batch.time, batch.valid)
    assert batch.count_earlier()[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 4, 0]
    batch.time[0, 2:5] = 20
    assert has_tied_times(batch.time, batch.valid)
    assert batch.count_earlier()[0].tolist() == [0, 1, 2, 2, 2, 5, 6, 5, 5, 0]
    assert batch.count_earlier()[3, 7:9].tolist() == [0, 0]  # a user without context
