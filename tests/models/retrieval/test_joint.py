"""EARN's encoder and NEZHA's input and head written out, their loss, and learning rates
by part.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.build import build_model
from models.layers.t5 import _bucket
from models.retrieval.students.earn import EarnBackbone
from models.retrieval.students.joint import Joint
from models.storage.tables import UserError
from models.training.fit import EpochEvent, FitConfig, fit
from models.training.optimizers import group_parameters
from tests.fixtures.small_retrieval import (
    SIZES,
    TEACHER,
    build_catalogue,
    build_tiger,
    make_requests,
)

NEZHA = {"name": "nezha"}


def untaught(options: dict[str, Any]) -> Joint:
    torch.manual_seed(1)
    return build_model({"teacher_model": TEACHER, **options}, build_catalogue())  # type: ignore[return-value]


def started(options: dict[str, Any]) -> Any:
    """A model that took its weights from `build_tiger()`."""
    model = untaught(options)
    model.set_teacher(build_tiger())
    return model.eval()


@pytest.mark.parametrize("name", ["earn", "nezha"])
def test_the_loss_is_the_mean_cross_entropy_of_the_digits(name: str) -> None:
    model, batch = started({"name": name}), make_requests(5)
    codes, total = build_catalogue().sids[batch.target], 0.0
    for level, logits in enumerate(
        model.decoder.teacher_forced(model.encode(batch), codes)
    ):
        first = model.tokens.first[level] - model.decoder.span(level)[0]
        total -= (
            logits.log_softmax(-1)[torch.arange(5), first + codes[:, level]]
            .sum()
            .item()
        )
    assert model(batch)["loss"].item() == pytest.approx(total / 20, rel=1e-4)


def layer_by_loops(
    backbone: EarnBackbone, index: int, states: dict[int, Tensor]
) -> dict[int, Tensor]:
    """What a block makes of the states (D,) at some positions, each of which attends to
    all of them.
    """
    block, first = backbone.encoder.blocks[index], backbone.encoder.blocks[0].attention
    attention, found = block.attention, {}
    normed = {
        at: x * (x.square().mean() + 1e-6).rsqrt() * block.get_norm(0).weight
        for at, x in states.items()
    }
    for query in states:
        mixed = []
        for head in range(2):
            part = slice(8 * head, 8 * head + 8)
            q = attention.q.weight[part] @ normed[query]
            scores = []
            for key in states:
                bucket = _bucket(
                    torch.tensor(key - query), backbone.sizes, bidirectional=True
                )
                bias = first.relative_attention_bias.weight[bucket, head]
                scores.append(q @ (attention.k.weight[part] @ normed[key]) + bias)
            weights = torch.stack(scores).softmax(0)
            values = torch.stack(
                [attention.v.weight[part] @ normed[key] for key in states]
            )
            mixed.append(weights @ values)
        x = states[query] + attention.o.weight @ torch.cat(mixed)
        inner = x * (x.square().mean() + 1e-6).rsqrt() * block.get_norm(-1).weight
        found[query] = (
            x
            + block.feedforward.wo.weight @ (block.feedforward.wi.weight @ inner).relu()
        )
    return found


@pytest.mark.parametrize("layer", [1, 2, 3])
@torch.no_grad()
def test_layers_up_to_k_see_all_and_above_the_registers_alone(layer: int) -> None:
    model, batch = started({"name": "earn", "register_layer": layer}), make_requests(4)
    backbone = model.backbone
    torch.nn.init.normal_(
        backbone.encoder.blocks[0].attention.relative_attention_bias.weight
    )
    history = model.encode(batch)
    assert history.states.shape == (4, 2, 16)
    assert history.lengths.tolist() == [2] * 4
    plain, lengths = model.tokens.history(batch), model.tokens.lengths(batch)
    for row in range(4):
        own = backbone.embedding(plain[row, : lengths[row]])
        prefix, suffix = backbone.extra.weight
        states = dict(enumerate([prefix, *own, suffix]))
        for index in range(3):
            states = layer_by_loops(backbone, index, states)
            if index + 1 == layer:
                states = {0: states[0], len(own) + 1: states[len(own) + 1]}
        expected = torch.stack(list(states.values()))
        expected = expected * (expected.square().mean(1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(
            history.states[row],
            expected * backbone.encoder.final_layer_norm.weight,
            rtol=1e-4,
            atol=1e-5,
        )


@torch.no_grad()
def test_states_are_the_root_and_the_placeholders() -> None:
    """Of T5's encoder over each request's own tokens and the placeholders behind them."""
    model, batch = started(NEZHA), make_requests(4)
    plain, lengths = model.tokens.history(batch), model.tokens.lengths(batch)
    history = model.encode(batch)
    assert history.states.shape == (4, 5, 16)
    assert history.lengths.tolist() == [5] * 4
    backbone = model.backbone
    for row in range(4):
        own = plain[row, : lengths[row]]
        assert own[-1] == model.tokens.end  # the root's token
        x = torch.cat([backbone.embedding(own), backbone.extra.weight]).unsqueeze(0)
        states = backbone.encoder(x, backbone.encoder.position_bias(x.shape[1]), 0.0)[0]
        torch.testing.assert_close(
            history.states[row], states[lengths[row] - 1 :], rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
def test_digits_are_read_from_a_root_that_moves_on() -> None:
    model, batch = started(NEZHA), make_requests(6)
    codes = build_catalogue().sids[batch.target]
    history = model.encode(batch)
    found, cell = model.decoder.teacher_forced(history, codes), model.decoder.transition
    for row in range(6):
        root, *own = history.states[row]
        for level in range(4):
            head = model.decoder.heads[level]
            expected = head.weight @ (root + own[level]) + head.bias
            assert expected.shape == (SIZES[level],)
            torch.testing.assert_close(
                found[level][row], expected, rtol=1e-4, atol=1e-5
            )
            chosen = model.backbone.embedding.weight[
                model.tokens.first[level] + codes[row, level]
            ]
            reset_x, update_x, new_x = (cell.weight_ih @ chosen + cell.bias_ih).chunk(3)
            reset_h, update_h, new_h = (cell.weight_hh @ root + cell.bias_hh).chunk(3)
            update = (update_x + update_h).sigmoid()
            candidate = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
            root = (1 - update) * candidate + update * root


class Batches:
    def steps(self, epoch: int) -> int:
        return 3

    def __call__(self, epoch: int, skip: int) -> Any:
        return (make_requests(16, seed=i) for i in range(skip, 3))


def trained(
    rates: dict[str, float], lr: float, state: Any = None
) -> tuple[Any, list[Any]]:
    model = untaught({**NEZHA, "rates": rates})
    config = FitConfig(
        lr=lr,
        weight_decay=0.0,
        warmup_steps=0,
        schedule="constant",
        max_epochs=2,
        clip_norm=0,
    )
    factors = model.lr_multipliers()
    events = list(
        fit(
            model,
            Batches(),
            lambda m: ({"ndcg@10": 1.0}, 1),
            config,
            lr_multipliers=factors,
            state=state,
        )
    )
    return model, [event for event in events if isinstance(event, EpochEvent)]


def test_each_part_has_its_learning_rate() -> None:
    model = untaught(
        {**NEZHA, "rates": {"head": 1, "embedding": 100, "transition": 10}}
    )
    names = {id(p): name for name, p in model.named_parameters()}
    found = group_parameters(model, model.lr_multipliers())
    groups = {factor: {names[id(p)] for p in own} for (factor, _), own in found.items()}
    assert set(groups) == {1.0, 10.0, 100.0}
    assert groups[100.0] == {"backbone.embedding.weight", "backbone.extra.weight"}
    assert groups[10.0] == {
        name for name in names.values() if name.startswith("decoder.transition.")
    }
    assert {
        "decoder.heads.0.weight",
        "backbone.encoder.final_layer_norm.weight",
    } <= groups[1.0]
    assert sum(map(len, groups.values())) == len(names)
    assert list(group_parameters(untaught(NEZHA), {})) == [(1.0, True)]


def test_a_factor_on_all_parts_is_another_base_rate() -> None:
    """The first steps of AdamW are as long as the learning rate."""
    before = untaught(NEZHA).state_dict()
    slow, _ = trained({}, 1e-4)
    fast, events = trained({"transition": 10}, 1e-4)
    moved = [
        (
            model.state_dict()["decoder.transition.bias_hh"]
            - before["decoder.transition.bias_hh"]
        )
        .abs()
        .max()
        for model in (slow, fast)
    ]
    assert 5 < float(moved[1] / moved[0]) < 12
    assert len(events[-1].state["optimizer"]["param_groups"]) == 2


def test_a_factor_of_no_trained_part_is_refused() -> None:
    model = untaught({**NEZHA, "rates": {"head": 2.0}})
    model.decoder.heads.requires_grad_(False)
    with pytest.raises(
        UserError,
        match=r"lr_multipliers has 'decoder\.heads', but no trained parameter's name starts",
    ):
        group_parameters(model, model.lr_multipliers())
