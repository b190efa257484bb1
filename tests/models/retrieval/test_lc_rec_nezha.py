"""NEZHA on LC-Rec: what it reads behind the prompt, what it starts from, and its search against every item."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_retrieval import ITEMS, catalogue, requests
from torch.nn import functional

from models import registry
from models.retrieval.lc_rec import LcRec
from models.retrieval.lc_rec_nezha import LcRecNezha, LcRecNezhaConfig
from models.tables import UserError
from tests.models.retrieval.test_lc_rec import KINDS, history_of, of_kind, plain_tokens
from tests.models.retrieval.test_tiger import tiger  # noqa: F401 - a fixture


def started(teacher: LcRec) -> Any:
    torch.manual_seed(2)
    config = {"name": "lc_rec_nezha", "teacher_model": registry.config_to_dict(teacher.config)}
    model: Any = registry.build(registry.config_from_dict(config), catalogue())
    model.set_teacher(teacher)
    for head in model.decoder.heads:
        torch.nn.init.normal_(head.weight, std=0.5)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_the_prompts_end_and_the_placeholders(kind: str) -> None:
    """Of the library's pass over one row without padding."""
    teacher = of_kind(kind)
    model, batch = started(teacher), requests(5)
    history = model.encode(batch)
    assert history.states.shape == (5, 5, 16)
    for row in range(5):
        tokens = torch.tensor(plain_tokens(teacher, history_of(batch, row)))
        embedded = torch.cat([teacher.backbone.embed(tokens), model.backbone.extra.weight])
        lm: Any = teacher.backbone.lm
        states = lm.base_model(inputs_embeds=embedded[None], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(history.states[row], states[-5:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_search_scores_every_item_as_the_loss_does() -> None:
    model, batch = started(of_kind("llama")), requests(3)
    items, scores = model.recommend(batch, ITEMS, beam=ITEMS)
    for row in range(3):
        one = {name: value[row : row + 1].expand(ITEMS, *value.shape[1:]) for name, value in batch.items()}
        logits = model.decoder.teacher_forced(model.encode(one), catalogue().sids[items[row]])
        codes = catalogue().sids[items[row]]
        losses = [functional.cross_entropy(x, codes[:, i], reduction="none") for i, x in enumerate(logits)]
        torch.testing.assert_close(scores[row], -torch.stack(losses).sum(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(one | {"target": items[row]})["loss"], torch.stack(losses).mean())


def test_training_starts_from_the_teacher_and_reaches_all_but_the_words_output() -> None:
    teacher = of_kind("llama")
    model, batch = started(teacher), requests(32)
    before = {name: value.clone() for name, value in model.named_parameters()}
    for name, value in teacher.backbone.state_dict().items():
        assert torch.equal(model.backbone.state_dict()[name], value)
    trained = {name: p for name, p in model.train().named_parameters() if p.requires_grad}
    assert before.keys() - trained.keys() == {"backbone.lm.lm_head.weight"}
    optimizer = torch.optim.AdamW(trained.values(), 3e-3)
    losses = []
    for _ in range(15):
        loss = model(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in trained.values())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in trained.items())
    assert torch.equal(teacher.backbone.embedding.weight, of_kind("llama").backbone.embedding.weight)  # copied


def test_another_teacher_is_refused(tiger: Any) -> None:  # noqa: F811
    with pytest.raises(UserError, match="the teacher is a Tiger"):
        LcRecNezha(LcRecNezhaConfig(), catalogue(), tiger)
