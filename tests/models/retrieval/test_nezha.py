"""NEZHA's head written out, its input, and its learning rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_retrieval import SIZES, catalogue, requests

from models.fit import EpochEvent, FitConfig, fit
from models.optimizers import grouped
from models.retrieval.decoders.nezha import lr_multipliers
from models.tables import UserError
from tests.models.retrieval.test_joint import NEZHA, started, untaught


@torch.no_grad()
def test_states_are_the_root_and_the_placeholders() -> None:
    """Of T5's encoder over each request's own tokens and the placeholders behind them."""
    model, batch = started(NEZHA), requests(4)
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
        torch.testing.assert_close(history.states[row], states[lengths[row] - 1 :], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_digits_are_read_from_a_root_that_moves_on() -> None:
    model, batch = started(NEZHA), requests(6)
    codes = catalogue().sids[batch["target"]]
    history = model.encode(batch)
    found, cell = model.decoder.teacher_forced(history, codes), model.decoder.transition
    for row in range(6):
        root, *own = history.states[row]
        for level in range(4):
            head = model.decoder.heads[level]
            expected = head.weight @ (root + own[level]) + head.bias
            assert expected.shape == (SIZES[level],)
            torch.testing.assert_close(found[level][row], expected, rtol=1e-4, atol=1e-5)
            chosen = model.backbone.embedding.weight[model.tokens.first[level] + codes[row, level]]
            reset_x, update_x, new_x = (cell.weight_ih @ chosen + cell.bias_ih).chunk(3)
            reset_h, update_h, new_h = (cell.weight_hh @ root + cell.bias_hh).chunk(3)
            update = (update_x + update_h).sigmoid()
            candidate = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
            root = (1 - update) * candidate + update * root


class Batches:
    def steps(self, epoch: int) -> int:
        return 3

    def __call__(self, epoch: int, skip: int) -> Any:
        return (requests(16, seed=i) for i in range(skip, 3))


def trained(rates: dict[str, float], lr: float, state: Any = None) -> tuple[Any, list[Any]]:
    model = untaught({**NEZHA, "rates": rates})
    config = FitConfig(lr=lr, weight_decay=0.0, warmup_steps=0, schedule="constant", max_epochs=2, clip_norm=0)
    factors = lr_multipliers(model.config)
    events = list(fit(model, Batches(), lambda m: ({"ndcg@10": 1.0}, 1), config, lr_multipliers=factors, state=state))
    return model, [event for event in events if isinstance(event, EpochEvent)]


def test_each_part_has_its_learning_rate() -> None:
    model = untaught({**NEZHA, "rates": {"head": 1, "embedding": 100, "transition": 10}})
    names = {id(p): name for name, p in model.named_parameters()}
    found = grouped(model, lr_multipliers(model.config))
    groups = {factor: {names[id(p)] for p in own} for (factor, _), own in found.items()}
    assert set(groups) == {1.0, 10.0, 100.0}
    assert groups[100.0] == {"backbone.embedding.weight", "backbone.extra.weight"}
    assert groups[10.0] == {name for name in names.values() if name.startswith("decoder.transition.")}
    assert {"decoder.heads.0.weight", "backbone.encoder.final_layer_norm.weight"} <= groups[1.0]
    assert sum(map(len, groups.values())) == len(names)
    assert list(grouped(untaught(NEZHA), {})) == [(1.0, True)]


def test_a_factor_on_all_parts_is_another_base_rate() -> None:
    """The first steps of AdamW are as long as the learning rate."""
    before = untaught(NEZHA).state_dict()
    slow, _ = trained({}, 1e-4)
    fast, events = trained({"transition": 10}, 1e-4)
    moved = [
        (model.state_dict()["decoder.transition.bias_hh"] - before["decoder.transition.bias_hh"]).abs().max()
        for model in (slow, fast)
    ]
    assert 5 < float(moved[1] / moved[0]) < 12
    assert len(events[-1].state["optimizer"]["param_groups"]) == 2


def test_rates_of_no_part_are_refused() -> None:
    with pytest.raises(UserError, match="rates has 'heads'; its parts are head, embedding, transition"):
        untaught({**NEZHA, "rates": {"heads": 1}})
    with pytest.raises(UserError, match=r"rates\.head is 0, it must be above 0"):
        untaught({**NEZHA, "rates": {"head": 0}})
    model = untaught(NEZHA)
    model.config.rates["head"] = 2.0
    model.decoder.heads.requires_grad_(False)
    with pytest.raises(
        UserError, match=r"lr_multipliers has 'decoder\.heads', but no trained parameter's name begins so"
    ):
        grouped(model, lr_multipliers(model.config))
