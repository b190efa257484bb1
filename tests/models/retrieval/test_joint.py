"""EARN and NEZHA alike: what they start from, their loss, their search against every item, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_retrieval import ITEMS, SIZES, TEACHER, catalogue, requests, row_of, tiger
from torch import Tensor

from models import checkpoint, registry
from models.retrieval.joint import Joint
from models.retrieval.parts import History
from models.tables import UserError

EARN_1, EARN_2, EARN_3 = ({"name": "earn", "register_layer": k} for k in (1, 2, 3))
NEZHA = {"name": "nezha"}
ALL = [EARN_1, EARN_2, EARN_3, NEZHA]


def untaught(options: dict[str, Any], seed: int = 1) -> Joint:
    torch.manual_seed(seed)
    return registry.build(registry.config_from_dict({"teacher_model": TEACHER, **options}), catalogue())


def started(options: dict[str, Any]) -> Joint:
    """A model that took its weights from `tiger()`, its log-probabilities far from uniform."""
    model = untaught(options)
    model.set_teacher(tiger())
    for name, parameter in model.decoder.named_parameters():
        if parameter.dim() == 2 and "bias" not in name:
            torch.nn.init.normal_(parameter.data, std=0.5)
    return model.eval()


def log_probs(model: Joint, history: History, code: list[int]) -> list[Tensor]:
    """(O_l,) of each level: over all that the decoder predicts there."""
    return [logits[0].log_softmax(-1) for logits in model.decoder.teacher_forced(history, torch.tensor([code]))]


@pytest.mark.parametrize("options", ALL, ids=str)
def test_training_starts_from_the_teacher_and_reaches_every_weight(options: dict[str, Any]) -> None:
    model, teacher = untaught(options), tiger()
    model.set_teacher(teacher)
    own = model.state_dict()
    for name, value in teacher.state_dict().items():
        if name.startswith("backbone.") or options["name"] == "earn":
            assert torch.equal(own[name], value)
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert all(p.requires_grad for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = model(requests(32))["loss"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())  # a gradient for all, as DDP needs it
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    for name, value in tiger().state_dict().items():
        assert torch.equal(teacher.state_dict()[name], value)  # weights were copied, not shared


@pytest.mark.parametrize("options", [EARN_2, NEZHA], ids=str)
def test_the_loss_is_the_mean_cross_entropy_of_the_digits(options: dict[str, Any]) -> None:
    model, batch = started(options), requests(5)
    codes, history, total = catalogue().sids, model.encode(batch), 0.0
    for row in range(5):
        code = codes[batch["target"][row]].tolist()
        for level, found in enumerate(log_probs(model, row_of(history, row), code)):
            first = model.tokens.first[level] - model.decoder.span(level)[0]
            total -= found[first + code[level]].item()
    assert model(batch)["loss"].item() == pytest.approx(total / 20, rel=1e-4)


@pytest.mark.parametrize("options", [EARN_1, EARN_3, NEZHA], ids=str)
def test_a_beam_as_wide_as_the_catalogue_scores_every_item(options: dict[str, Any]) -> None:
    model, batch = started(options), requests(3)
    items, scores = model.recommend(batch, 32, beam=1000)
    free, free_scores = model.recommend(batch, 32, beam=180, constrained=False)
    assert free.tolist() == items.tolist()  # as wide as all tuples, the trie alone decides what is dropped
    torch.testing.assert_close(free_scores, scores)
    assert items[:, ITEMS:].tolist() == [[-1, -1]] * 3
    codes, history = catalogue().sids.tolist(), model.encode(batch)
    for row in range(3):
        expected = {}
        for item, code in enumerate(codes):
            found = log_probs(model, row_of(history, row), code)
            first = [model.tokens.first[level] - model.decoder.span(level)[0] for level in range(4)]
            expected[item] = sum(found[level][first[level] + code[level]].item() for level in range(4))
        assert sorted(items[row, :ITEMS].tolist()) == list(range(ITEMS))
        assert scores[row, :ITEMS].tolist() == pytest.approx(sorted(expected.values(), reverse=True), abs=1e-4)
        assert [expected[item] for item in items[row, :ITEMS].tolist()] == pytest.approx(
            scores[row, :ITEMS].tolist(), abs=1e-4
        )


@pytest.mark.parametrize("options", [EARN_2, NEZHA], ids=str)
def test_scorer_and_teacher_forcing_agree_step_by_step(options: dict[str, Any]) -> None:
    """Beams that swap places and fork, each against its own prefix read all at once."""
    model, batch = started(options), requests(4)
    with torch.no_grad():
        history = model.backbone.infer(batch)
        scorer, generator = model.decoder.scorer(history), torch.Generator().manual_seed(3)
        found, prefixes = scorer.start().unsqueeze(1), torch.zeros((4, 1, 0), dtype=torch.long)
        for level, size in enumerate(SIZES):
            for row in range(4):
                for beam in range(found.shape[1]):
                    code = [*prefixes[row, beam].tolist(), *[0] * (4 - level)]
                    expected = log_probs(model, row_of(history, row), code)[level]
                    first = model.tokens.first[level] - model.decoder.span(level)[0]
                    torch.testing.assert_close(found[row, beam], expected[first : first + size], rtol=1e-4, atol=1e-5)
            if level < 3:
                parents = torch.randint(0, found.shape[1], (4, 5), generator=generator)
                tokens = torch.randint(0, size, (4, 5), generator=generator)
                kept = prefixes.gather(1, parents.unsqueeze(-1).expand(-1, -1, level))
                prefixes = torch.cat([kept, tokens.unsqueeze(-1)], 2)
                found = scorer.step(parents, tokens)


@pytest.mark.parametrize("options", ALL, ids=str)
def test_recommendations_depend_on_the_own_row_alone(options: dict[str, Any]) -> None:
    model, batch = started(options), requests(5)
    items, scores = model.recommend(batch, 6, beam=8)
    for row in range(5):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        one["history"] = one["history"][:, : int(batch["history_length"][row])]
        alone, alone_scores = model.recommend(one, 6, beam=8)
        assert alone.tolist() == items[row : row + 1].tolist()
        torch.testing.assert_close(alone_scores, scores[row : row + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", ALL, ids=str)
def test_search_reads_the_states_of_training(options: dict[str, Any]) -> None:
    model, batch = started(options), requests(9)
    with torch.no_grad():
        trained, searched = model.backbone.encode(batch), model.backbone.infer(batch)
    torch.testing.assert_close(searched.states, trained.states, rtol=1e-4, atol=1e-5)
    assert searched.lengths.tolist() == trained.lengths.tolist()
    assert not model.recommend({name: value[:0] for name, value in batch.items()}, 3)[0].numel()


@pytest.mark.parametrize("options", [EARN_2, NEZHA], ids=str)
def test_it_comes_back_from_a_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    model = started(options)
    checkpoint.save(tmp_path / "saved", model, checkpoint.Checkpoint(model=registry.config_to_dict(model.config)))
    loaded, _ = registry.load(tmp_path / "saved", catalogue())
    for one, other in zip(model.recommend(requests(6), 8), loaded.recommend(requests(6), 8), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("student", ["sid_mlp", "one_layer"])
@pytest.mark.parametrize("options", [EARN_2, NEZHA], ids=str)
def test_it_can_teach(options: dict[str, Any], student: str) -> None:
    teacher = started(options)
    config = registry.config_from_dict({"name": student, "teacher_model": registry.config_to_dict(teacher.config)})
    assert config.max_history == teacher.config.max_history == 6
    model: Any = registry.build(config, catalogue())
    model.set_teacher(teacher)
    batch = requests(4)
    logits = model.teacher_logits(batch, model.encode(batch))
    own = teacher.decoder.teacher_forced(teacher.encode(batch), model.tokens.codes(batch["target"]))
    for level, (cut, whole) in enumerate(zip(logits, own, strict=True)):
        first = model.tokens.first[level] - teacher.decoder.span(level)[0]
        torch.testing.assert_close(cut, whole[:, first : first + SIZES[level]])
    model(batch)["loss"].backward()
    items, scores = model.eval().recommend(batch, 5, beam=8)
    assert (items >= 0).all()
    if student == "sid_mlp":
        plain, plain_scores = model.recommend(batch, 5, beam=8, path="plain")
        assert plain.tolist() == items.tolist()
        torch.testing.assert_close(plain_scores, scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["earn", "nezha"])
def test_impossible_options_are_refused(name: str) -> None:
    for option, message in (
        ({"beam": 0}, "beam is 0, it must be at least 1"),
        ({"teacher_cache": "runs/cache"}, "teacher_cache runs/cache would hold what changes in every step"),
    ):
        with pytest.raises(UserError, match=message):
            registry.config_from_dict({"name": name, **option})
    config = registry.config_from_dict({"name": "one_layer", "teacher_model": TEACHER})
    with pytest.raises(UserError, match=r"the teacher is a Student, .* give a TIGER as model.teacher"):
        untaught({"name": name, "teacher_model": registry.config_to_dict(config)})
