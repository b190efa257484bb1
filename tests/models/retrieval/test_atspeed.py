"""AtSpeed: what verifies is the teacher prefix by prefix, strict recommends what the
teacher does, and its losses.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.build import build_model, load_model
from models.retrieval.decoders.t5 import T5Decoder, T5Target
from models.retrieval.parts import History
from models.retrieval.retriever import Retriever
from models.retrieval.search import speculative
from models.retrieval.search.beam import beam_search
from models.retrieval.search.speculative import Tree
from models.retrieval.students.atspeed import (
    TOP_CODES,
    AtSpeed,
    relaxed_loss,
    strict_loss,
)
from models.storage.tables import UserError
from tests.fixtures.small_retrieval import (
    FIRST,
    SIZES,
    TEACHER,
    build_catalogue,
    build_tiger,
    make_requests,
)
from tests.models.retrieval.conftest import TrainedTiger

CONFIGS = Path(__file__).parents[3] / "jobs/configs"
SMALL = {"draft_d_ff": 24, "draft_heads": 2, "beam": 6, "draft_beam": 9}


def untrained(name: str, **options: Any) -> AtSpeed:
    options = {"name": name, "teacher_model": TEACHER, **SMALL, **options}
    return build_model(options, build_catalogue())  # type: ignore[return-value]


def teacher(seed: int) -> Retriever:
    """A TIGER whose log-probabilities are far from uniform."""
    made = build_tiger(seed)
    torch.nn.init.normal_(made.backbone.embedding.weight, std=3.0)
    return made


def student(name: str = "atspeed_s", seed: int = 1, **options: Any) -> AtSpeed:
    torch.manual_seed(seed)
    model = untrained(name, **options)
    model.set_teacher(teacher(seed))
    return model.eval()


def random_tree(
    rows: int, generator: torch.Generator, widths: tuple[int, ...] = (4, 5, 7)
) -> Tree:
    tree, before = Tree(), 1
    for level, width in enumerate(widths):
        shape = (rows, width)
        tree.add(
            torch.randint(0, before, shape, generator=generator),
            torch.randint(0, SIZES[level], shape, generator=generator),
        )
        before = width
    return tree


@pytest.mark.parametrize("codebook", [False, True])
def test_a_tree_in_one_pass_is_every_prefix_by_itself(
    codebook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    made = teacher(0)
    decoder = T5Decoder(
        made.tokens,
        made.backbone.sizes,
        made.backbone.embedding,
        codebook_logits=codebook,
        codebook_scores=codebook,
    ).eval()
    generator = torch.Generator().manual_seed(2)
    history = made.encode(make_requests(5))
    rows, tree = torch.tensor([3, 0, 4, 1]), random_tree(4, generator)
    found = T5Target(decoder, history)(rows, tree, 0)
    assert [x.shape[1] for x in found] == [1, 4, 5, 7]
    for at, row in enumerate(rows.tolist()):
        own = History(history.states[row : row + 1], history.lengths[row : row + 1])
        prefixes: list[list[int]] = [[]]
        for level, log_probs in enumerate(found):
            if level:
                steps = zip(
                    tree.parents[level - 1][at].tolist(),
                    tree.codes[level - 1][at].tolist(),
                    strict=True,
                )
                prefixes = [[*prefixes[parent], code] for parent, code in steps]
            for place, prefix in enumerate(prefixes):
                codes = torch.tensor([[*prefix, *[0] * (4 - len(prefix))]])
                logits = decoder.teacher_forced(own, codes)[level][0]
                first = 0 if codebook else FIRST[level]
                expected = logits.log_softmax(-1)[first : first + SIZES[level]]
                torch.testing.assert_close(
                    log_probs[at, place], expected, rtol=1e-4, atol=1e-5
                )
    later = T5Target(decoder, history)(rows, tree, 2)
    monkeypatch.setattr(
        "models.retrieval.decoders.t5.MAX_TREE_SCORES", 1
    )  # user by user
    for one, whole in zip(
        T5Target(decoder, history)(rows, tree, 2), later, strict=True
    ):
        torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(later[0], found[2])


@pytest.mark.parametrize("seed", range(3))
def test_strict_recommends_what_its_teacher_does(seed: int) -> None:
    """With drafts that know nothing and drafts that are the teacher, at any batch size,
    beam and number of steps.
    """
    model, verified_by = student(seed=seed), teacher(seed)
    if seed % 3 == 0:  # a draft that is often right
        model = student(seed=seed, draft_layers=2, draft_d_ff=32, draft_beam=20)
        model.decoder.load_state_dict(verified_by.decoder.state_dict())
    for count, k, beam, steps in (
        (1, 5, 3, 4),
        (7, 10, 6, 4),
        (16, 20, 20, 2),
        (3, 4, 2, 0),
    ):
        batch = make_requests(count, seed=100 * seed + count)
        found = model.speculate(batch, k, beam=beam, draft_steps=steps)
        items, scores = verified_by.recommend(batch, k, beam=beam)
        assert found.items.tolist() == items.tolist()
        torch.testing.assert_close(found.scores, scores, rtol=1e-5, atol=1e-5)
        assert torch.equal(model.recommend(batch, k, beam=beam)[0], items)
        among = beam_search(
            verified_by.decoder.scorer(verified_by.encode(batch)),
            model.trie,
            k,
            beam,
            children=True,
        )
        items, scores = model.recommend(batch, k, beam=beam, scores="children")
        assert items.tolist() == among[0].tolist()
        torch.testing.assert_close(scores, among[1], rtol=1e-4, atol=1e-5)


def test_a_draft_that_is_the_teacher_needs_one_pass() -> None:
    model = student(draft_layers=2, draft_d_ff=32, draft_beam=1000)
    model.decoder.load_state_dict(teacher(1).decoder.state_dict())
    found = model.speculate(make_requests(9), 5)
    assert found.passes.tolist() == [1] * 9
    assert found.accepted.tolist() == found.drafted.tolist() == [3] * 9
    stepwise = model.speculate(make_requests(9), 5, draft_steps=1)
    assert stepwise.passes.tolist() == [2] * 9
    assert (
        model.speculate(make_requests(9), 5, draft_steps=0).passes.tolist() == [4] * 9
    )


def test_what_is_relaxed_is_an_item_with_the_score_of_the_teacher() -> None:
    for rule in ("published", "exact"):
        model, batch = student("atspeed_r", rule=rule), make_requests(8)
        items, scores = model.recommend(batch, 5)
        again, other = (
            model.recommend(batch, 5)[0],
            model.recommend(batch, 5, seed=3)[0],
        )
        assert torch.equal(items, again)
        assert not torch.equal(items, other)
        every, expected = teacher(1).recommend(batch, 30, beam=1000)
        for row in range(8):
            assert len(set(items[row].tolist())) == 5
            known = dict(zip(every[row].tolist(), expected[row].tolist(), strict=True))
            assert scores[row].tolist() == pytest.approx(
                [known[item] for item in items[row].tolist()], abs=1e-4
            )
            assert scores[row].tolist() == sorted(scores[row].tolist(), reverse=True)


def softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in values)
    return [math.exp(x) / total for x in values]


@pytest.mark.parametrize("codes", [5, 40])
def test_the_losses_written_out(codes: int) -> None:
    torch.manual_seed(0)
    draft, taught = torch.randn(3, codes) * 2, torch.randn(3, codes) * 2
    strict, relaxed = 0.0, 0.0
    for q, p in zip(
        map(softmax, draft.tolist()), map(softmax, taught.tolist()), strict=True
    ):
        top = sorted(range(codes), key=lambda code: -q[code])[:TOP_CODES]
        kth = sorted(p, reverse=True)[min(TOP_CODES, codes) - 1]
        strict += sum(q[i] * math.log(q[i] / p[i]) for i in top)
        rest_q, rest_p = 1 - sum(q[i] for i in top), 1 - sum(p[i] for i in top)
        if codes > TOP_CODES:
            strict += rest_q * math.log(rest_q / rest_p)
        strict -= kth * sum(q[i] * math.log(q[i]) for i in top)
        relaxed += sum(abs(a - b) for a, b in zip(q, p, strict=True)) / 2
    assert strict_loss(draft, taught).item() == pytest.approx(strict / 3, rel=1e-4)
    assert relaxed_loss(draft, taught).item() == pytest.approx(relaxed / 3, rel=1e-4)
    assert relaxed_loss(draft, draft + 3).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ["atspeed_s", "atspeed_r"])
@pytest.mark.parametrize(("alpha", "tau"), [(0.7, 1.0), (0.0, 1.0), (1.0, 2.0)])
def test_the_loss_is_a_share_of_each(name: str, alpha: float, tau: float) -> None:
    model, batch = student(name, alpha=alpha, tau=tau), make_requests(5)
    history, codes = model.encode(batch), build_catalogue().sids[batch.target]
    align = strict_loss if name == "atspeed_s" else relaxed_loss
    ours = model.decoder.teacher_forced(history, codes)
    theirs = [
        x[:, at : at + n]
        for x, at, n in zip(
            model.target.teacher_forced(history, codes), FIRST, SIZES, strict=True
        )
    ]
    total = sum(
        (1 - alpha) * torch.nn.functional.cross_entropy(a, codes[:, level])
        + alpha * align(a / tau, b / tau)
        for level, (a, b) in enumerate(zip(ours, theirs, strict=True))
    )
    loss = model(batch)["loss"]
    torch.testing.assert_close(loss, total)
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.requires_grad == key.startswith("decoder.")
        assert (
            parameter.grad is not None and bool(parameter.grad.any())
        ) == parameter.requires_grad, key


@pytest.mark.long
@pytest.mark.parametrize("name", ["atspeed_s", "atspeed_r"])
def test_training_leaves_the_target_and_a_checkpoint_needs_no_teacher(
    name: str, trained_tiger: TrainedTiger, tmp_path: Path
) -> None:
    setup, events = trained_tiger.train(
        {"name": name, "teacher": str(trained_tiger.folder), **SMALL}, tmp_path, 3
    )
    batch = setup.val.collate(next(setup.val.evaluation_batches(40)))
    assert events[-1].loss < 0.9 * events[0].loss
    metrics = events[-1].metrics
    assert 0 < metrics["acceptance"] <= 1
    assert (
        1 <= metrics["target_passes"] < 3
    )  # of the three levels of these semantic IDs
    verified_by = load_model(trained_tiger.folder / "best", setup.catalogue)[0]
    kept = verified_by.decoder.state_dict()
    assert all(
        torch.equal(value, kept[key])
        for key, value in setup.model.target.state_dict().items()
    )
    if name == "atspeed_s":
        items = setup.model.eval().recommend(batch, 5)[0]
        assert torch.equal(items, verified_by.recommend(batch, 5, beam=6)[0])


def test_the_numbers_of_steps_are_means_over_requests() -> None:
    model, batch = student(), make_requests(6)
    found = model.speculate(batch, 20)
    halves = [
        model.measure(batch.select("B", part)) for part in (slice(2), slice(2, 6))
    ]
    means = model.metric_means(
        {key: halves[0][key] + halves[1][key] for key in halves[0]}
    )
    assert set(means) == set(model.metric_names(build_catalogue()))
    assert means["target_passes"] == pytest.approx(float(found.passes.double().mean()))
    assert means["acceptance"] == pytest.approx(
        float(found.accepted.sum() / found.drafted.sum())
    )
    undrafted = model.metric_means(model.measure(batch, draft_steps=0))
    assert (undrafted["acceptance"], undrafted["target_passes"]) == (0.0, 4.0)


def test_what_is_measured_without_known_items_is_what_is_recommended_without_them() -> (
    None
):
    model, batch = student(), make_requests(6)
    sums = model.measure(replace(batch, target=batch.history[:, 0]), unseen=True)
    assert sums["recall@20"] == 0
    items, _ = model.recommend(batch, 20, unseen=True)
    assert (
        model.measure(replace(batch, target=items[:, 2]), unseen=True)["ndcg@10"]
        == 6 / 2
    )


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="AtSpeed-S does not sample; leave seed out"):
        student().recommend(make_requests(2), 3, seed=1)
    spoiled = student()
    spoiled.decoder.stack.final_layer_norm.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="scores that are not finite"):
        spoiled.recommend(make_requests(2), 3)


def test_draws_are_spread_evenly() -> None:
    keys = torch.arange(200)
    noise = speculative.Noise(keys, 1).at_level(None, 2)
    drawn = noise.uniform(torch.arange(500).expand(200, -1), "beams")
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.005)
    assert drawn.var().item() == pytest.approx(1 / 12, abs=0.002)
    assert len(drawn.flatten().unique()) == 100_000
    by_use: list[Tensor] = [
        noise.uniform(torch.arange(500).expand(200, -1), use) for use in noise.USES
    ]
    together = torch.corrcoef(torch.stack([x.flatten() for x in by_use]))
    assert (together - torch.eye(len(by_use))).abs().max() < 0.02
