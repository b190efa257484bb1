"""Checks of every model that decodes semantic IDs.

Search is compared with its definition, rows are independent, training reaches all
trained weights, and impossible options are rejected.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional

from models import registry
from models.build import build_model, load_model
from models.dataset.encoding import PAD
from models.retrieval.data import Catalogue, RequestBatch
from models.retrieval.decoders.t5 import T5Decoder
from models.retrieval.distillation.student import ReusesDecoder, Student
from models.retrieval.distillation.teacher import TaughtModel, build_teacher
from models.retrieval.parts import History
from models.retrieval.students.sid_mlp import SidMlp
from models.storage import checkpoint
from tests.fixtures.small_retrieval import (
    ITEMS,
    SIZES,
    TEACHER,
    build_catalogue,
    make_requests,
)

CONFIGS = Path(__file__).parents[3] / "jobs/configs"
LC_REC = {
    "width": 16,
    "num_layers": 3,
    "num_heads": 2,
    "ffn_width": 24,
    "max_history": 6,
}
HEADS = {"attention_heads": 2, "attention_width": 24, "ffn_width": 32, "head_width": 20}
GDN = {"num_layers": 2, "heads": 2, "head_width": 6, "ffn_width": 24, "chunk": 8}
MAMBA2 = {"num_layers": 2, "width": 24, "head_width": 12, "state": 10, "chunk": 8}
EARLY = {
    "width": 12,
    "attention_heads": 2,
    "ffn_width": 16,
    "head_width": 20,
    "readout_layers": 2,
}
DRAFT = {"draft_d_ff": 24, "draft_heads": 2, "beam": 6, "draft_beam": 9}
MODELS: dict[str, dict[str, Any]] = {
    "tiger": TEACHER,
    "lc_rec": LC_REC,
    "lc_rec_sid_mlp": EARLY,
    "lc_rec_nezha": {},
    "sid_mlp": HEADS,
    "one_layer": {},
    "gdn": GDN,
    "mamba2": MAMBA2,
    "earn": {"register_layer": 2},
    "nezha": {},
    "atspeed_s": DRAFT,
    "atspeed_r": DRAFT,
    "sid_mlp_pp": {
        **HEADS,
        "encoder_layers": 2,
        "encoder_width": 24,
        "end_to_end": True,
    },
}
"""Small options of each model."""
TEACHER_NAMES = {
    name: ("lc_rec" if name.startswith("lc_rec_") else "tiger") for name in MODELS
}
"""Model of each model's teacher."""


def load_ablations() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the model and the options of each shipped ablation."""
    ablations = {}
    for name in ("sid_mlp", "one_layer"):
        for path in sorted((CONFIGS / name).glob("*.yaml")):
            changes = yaml.safe_load(path.read_text())["model"]
            ablations[f"{name} {path.stem}"] = (name, {**MODELS[name], **changes})
    return ablations


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, options) for name, options in MODELS.items()},
    **load_ablations(),
    "tiger end": ("tiger", {**TEACHER, "end_token": True}),
    "lc_rec_sid_mlp m2": ("lc_rec_sid_mlp", {**EARLY, "m": 2}),
    "sid_mlp per_digit m1": ("sid_mlp", {**HEADS, "readout": "per_digit", "m": 1}),
    "gdn m2": ("gdn", {**GDN, "m": 2}),
    "mamba2 wide": ("mamba2", {**MAMBA2, "width": 0, "head_width": 8}),
    "earn 1": ("earn", {"register_layer": 1}),
    "earn 3": ("earn", {"register_layer": 3}),
    "one_layer vocabulary": (
        "one_layer",
        {"cross_attention": False, "logits": "vocabulary"},
    ),
    "sid_mlp of lc_rec": (
        "sid_mlp",
        {**HEADS, "teacher_model": {"name": "lc_rec", **LC_REC}},
    ),
    "sid_mlp of nezha": (
        "sid_mlp",
        {**HEADS, "teacher_model": {"name": "nezha", "teacher_model": TEACHER}},
    ),
    "one_layer of earn": (
        "one_layer",
        {"teacher_model": {"name": "earn", "teacher_model": TEACHER}},
    ),
    "sid_mlp of sid_mlp": (
        "sid_mlp",
        {**HEADS, "teacher_model": {"name": "sid_mlp", "teacher_model": TEACHER}},
    ),
}
"""The models and their variants.

Variants are shipped ablations, levels that the teacher decodes, and other teachers.
"""


def build(name: str, options: dict[str, Any]) -> Any:
    """Return a model with its teacher, if it needs one.

    Its log-probabilities are far from uniform.
    """
    torch.manual_seed(1)
    if issubclass(registry.find(name), TaughtModel):
        teacher = TEACHER_NAMES[name]
        named_teacher = {"name": teacher, **MODELS[teacher]}
        options = {"teacher_model": named_teacher, **options}
    model: Any = build_model({"name": name, **options}, build_catalogue())
    if isinstance(model, TaughtModel):
        teacher_model = build_teacher(model.config, build_catalogue())
        model.set_teacher(teacher_model.requires_grad_(False).eval())
    module = model.backbone if name == "lc_rec" else model.decoder
    std = 0.3 if name == "lc_rec" else 0.5
    for key, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dim() == 2 and "readout" not in key:
            torch.nn.init.normal_(parameter.data, std=std)
    return model.eval()


@cache
def build_case(case: str) -> Any:
    """Return the model of a case, shared by the tests that do not change it."""
    return build(*CASES[case])


def option_names(case: str) -> set[str]:
    """Return the names of the options of a case's `recommend`."""
    name, _ = CASES[case]
    return set(registry.find(name).recommend_options())


def score_options(case: str) -> list[dict[str, str]]:
    """Return the choices of what log-probabilities are normalised over."""
    if "scores" in option_names(case):
        return [{"scores": "codebook"}, {"scores": "children"}]
    return [{}]


def level_log_probs(decoder: Any, history: History, codes: Tensor) -> list[Tensor]:
    """Return the log-probabilities (B, C_l) of each level, given the codes before.

    TIGER's decoder normalises over its vocabulary, all others over the codebook.

    Args:
        decoder: A decoder.
        history: States of B histories.
        codes: (B, L) codes.
    """
    if isinstance(decoder, ReusesDecoder):
        teacher_levels = level_log_probs(decoder.teacher, history, codes)
        student_levels = level_log_probs(decoder.own, history, codes)
        skipped = decoder.first_level - decoder.own.first_level
        return teacher_levels[: decoder.first_level] + student_levels[skipped:]
    over_vocabulary = isinstance(decoder, T5Decoder) and not decoder.codebook_scores
    all_logits = decoder.teacher_forced(history, codes)
    levels = []
    for level, logits in enumerate(all_logits, start=decoder.first_level):
        first_token, _ = decoder.span(level)
        first = decoder.tokens.first[level] - first_token
        codebook = slice(first, first + SIZES[level])
        if over_vocabulary:
            levels.append(logits.log_softmax(-1)[:, codebook])
        else:
            levels.append(logits[:, codebook].log_softmax(-1))
    return levels


def normalise_over_children(levels: list[Tensor], codes: Tensor) -> list[Tensor]:
    """Return log-probabilities that are normalised over the catalogue's children.

    The first level stays normalised over its codebook.

    Args:
        levels: (N, C_l) log-probabilities of each level after the codes of item n.
        codes: (N, L) codes of the items.
    """
    normalised = levels[:1]
    for level, log_probs in enumerate(levels[1:], start=1):
        prefixes = codes[:, :level]
        same_prefix = (prefixes[:, None] == prefixes[None]).all(-1)  # (N, N)
        counts = torch.zeros(ITEMS, SIZES[level])
        counts.index_add_(1, codes[:, level], same_prefix.float())
        children = log_probs.masked_fill(counts == 0, -torch.inf)
        normalised.append(children.log_softmax(-1))
    return normalised


def repeat_row(batch: RequestBatch, row: int, count: int = 1) -> RequestBatch:
    """Return a batch that holds one request of `batch`, `count` times."""
    return batch.map(lambda value: value[row : row + 1].expand(count, *value.shape[1:]))


def score_catalogue(
    case: str, batch: RequestBatch, options: dict[str, str]
) -> list[list[Tensor]]:
    """Return the log-probabilities (N, C_l) after the codes of each item, by request.

    Args:
        case: The case of the model.
        batch: Requests.
        options: An element of `score_options(case)`.
    """
    model, codes = build_case(case), build_catalogue().sids
    decoder = model.target if "atspeed" in case else model.decoder
    by_request = []
    for row in range(batch.num_rows):
        history = model.encode(repeat_row(batch, row, ITEMS))
        levels = level_log_probs(decoder, history, codes)
        if options.get("scores") == "children":
            levels = normalise_over_children(levels, codes)
        by_request.append(levels)
    return by_request


def gather_codes(log_probs: Tensor, codes: Tensor) -> Tensor:
    """Return the log-probability (N,) of the code (N,) of each row."""
    return log_probs.gather(1, codes[:, None])[:, 0]


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_beam_as_wide_as_the_catalogue_scores_every_item(case: str) -> None:
    """Compare with the sum of the log-probabilities of the item's codes."""
    model, batch, codes = build_case(case), make_requests(3), build_catalogue().sids
    for options in score_options(case):
        by_request = score_catalogue(case, batch, options)

        items, scores = model.recommend(batch, ITEMS + 2, beam=1000, **options)

        assert items[:, ITEMS:].tolist() == [[-1, -1]] * 3
        assert scores[:, ITEMS:].isneginf().all()
        for row, levels in enumerate(by_request):
            total = torch.zeros(ITEMS)
            for level, log_probs in enumerate(levels):
                total += gather_codes(log_probs, codes[:, level])
            ranked, row_scores = items[row, :ITEMS], scores[row, :ITEMS]
            assert sorted(ranked.tolist()) == list(range(ITEMS))
            torch.testing.assert_close(row_scores, total[ranked], rtol=1e-4, atol=1e-4)
            assert (row_scores.diff() <= 0).all()


@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if issubclass(registry.find(CASES[case][0]), SidMlp)],
)
def test_the_plain_and_the_fast_path_rank_every_item_alike(case: str) -> None:
    model, batch = build_case(case), make_requests(3)
    for options in score_options(case):
        items, scores = model.recommend(batch, ITEMS + 2, beam=1000, **options)
        plain_items, plain_scores = Student.recommend(
            model, batch, ITEMS + 2, beam=1000, **options
        )
        torch.testing.assert_close(plain_scores, scores, rtol=1e-4, atol=1e-5)
        assert plain_items.tolist() == items.tolist()


@torch.no_grad()
@pytest.mark.parametrize(
    "case", [case for case in CASES if "constrained" in option_names(case)]
)
def test_an_unconstrained_beam_over_all_tuples_ranks_the_same_items(case: str) -> None:
    """With 180 beams, every tuple of codes survives until the trie drops the others."""
    model, batch = build_case(case), make_requests(3)
    codebook_scores = score_options(case)[0]
    items, scores = model.recommend(batch, ITEMS + 2, beam=1000, **codebook_scores)

    free_items, free_scores = model.recommend(
        batch, ITEMS + 2, beam=180, constrained=False
    )

    assert free_items.tolist() == items.tolist()
    torch.testing.assert_close(free_scores, scores, rtol=1e-4, atol=1e-5)


def search_allowed(
    levels: list[Tensor], codes: Tensor, allowed: list[int], beam: int
) -> list[int]:
    """Return the items that a beam search within `allowed` ends at, best first.

    Args:
        levels: (N, C_l) log-probabilities of each level after the codes of item n.
        codes: (N, L) codes of the items.
        allowed: Items that the search may end at.
        beam: Number of prefixes that each level but the last keeps.
    """
    beams: list[tuple[int, ...]] = [()]
    total = torch.zeros(len(codes))
    for level, log_probs in enumerate(levels):
        total = total + gather_codes(log_probs, codes[:, level])
        prefix_scores = {}
        for item in allowed:
            prefix = tuple(codes[item, : level + 1].tolist())
            if prefix[:-1] in beams:
                prefix_scores[prefix] = float(total[item])
        beams = sorted(prefix_scores, key=prefix_scores.__getitem__, reverse=True)
        if level < len(levels) - 1:
            beams = beams[:beam]
    all_codes = codes.tolist()
    return [all_codes.index(list(prefix)) for prefix in beams]


def narrow_beam(case: str) -> int:
    """Return 3 beams, or enough for all prefixes if the model samples beams."""
    return 1000 if case == "atspeed_r" else 3


def mark_items(model: Any, items: list[int]) -> Tensor:
    """Return the set of allowed items as `recommend` takes it."""
    mask = torch.zeros(ITEMS, dtype=torch.bool)
    mask[items] = True
    return model.encode_allowed(mask)


def pad_items(items: list[int]) -> list[int]:
    """Return the items and -1 for the missing ones of `ITEMS` items."""
    return items + [-1] * (ITEMS - len(items))


ALLOWED = [
    [4],
    [0, 3, 11, 17, 18, 22, 29],
    list(range(0, ITEMS, 2)),
    list(range(ITEMS)),
]
"""Sets of allowed items."""


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_narrow_search_within_allowed_items_keeps_the_best_allowed_prefixes(
    case: str,
) -> None:
    """Scores do not depend on the set; `unseen` drops the items of the history."""
    model, batch, codes = build_case(case), make_requests(3), build_catalogue().sids
    beam = narrow_beam(case)
    for options in score_options(case):
        by_request = score_catalogue(case, batch, options)
        for allowed in ALLOWED:
            arguments = {
                "beam": beam,
                "allowed": mark_items(model, allowed),
                **options,
            }

            items, _ = model.recommend(batch, ITEMS, **arguments)
            unseen_items, _ = model.recommend(batch, ITEMS, unseen=True, **arguments)

            for row, levels in enumerate(by_request):
                expected = search_allowed(levels, codes, allowed, beam)
                unseen = [item for item in expected if item not in batch.history[row]]
                assert items[row].tolist() == pad_items(expected)
                assert unseen_items[row].tolist() == pad_items(unseen)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_allowing_all_items_is_the_search_without_a_set(case: str) -> None:
    model, batch = build_case(case), make_requests(3)
    allowed = mark_items(model, list(range(ITEMS)))
    for scores in score_options(case):
        options = {"beam": narrow_beam(case), **scores}
        free = model.recommend(batch, ITEMS, **options)
        restricted = model.recommend(batch, ITEMS, allowed=allowed, **options)
        assert torch.equal(restricted[0], free[0])
        assert torch.equal(restricted[1], free[1])


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_scores_of_a_search_step_equal_teacher_forcing_of_the_prefixes(
    case: str,
) -> None:
    """Random parents drop, double and reorder the beams."""
    model, batch = build_case(case), make_requests(4)
    generator = torch.Generator().manual_seed(3)
    history = model.encode(batch)
    scorer = model.decoder.scorer(model.backbone.infer(batch))
    log_probs = scorer.start().unsqueeze(1)  # (B, W, C_l)
    prefixes = torch.zeros((4, 1, 0), dtype=torch.long)  # (B, W, level)
    for level, size in enumerate(SIZES):
        num_beams = log_probs.shape[1]
        for beam in range(num_beams):
            codes = functional.pad(prefixes[:, beam], (0, 4 - level))
            expected = level_log_probs(model.decoder, history, codes)[level]
            torch.testing.assert_close(
                log_probs[:, beam], expected, rtol=1e-4, atol=1e-4
            )
        if level < 3:
            parents = torch.randint(0, num_beams, (4, 5), generator=generator)
            tokens = torch.randint(0, size, (4, 5), generator=generator)
            parent_index = parents.unsqueeze(-1).expand(-1, -1, level)
            parent_prefixes = prefixes.gather(1, parent_index)
            prefixes = torch.cat([parent_prefixes, tokens.unsqueeze(-1)], 2)
            log_probs = scorer.step(parents, tokens)


@pytest.mark.parametrize(
    "case",
    [*MODELS, "sid_mlp no_attention", "sid_mlp per_digit_readout", "earn 1", "earn 3"],
)
def test_recommendations_do_not_depend_on_other_requests_padding_or_the_target(
    case: str,
) -> None:
    model, batch = build_case(case), make_requests(5)
    items, scores = model.recommend(batch, 6, beam=8)
    assert all(len(set(row)) == 6 for row in items.tolist())

    wider = replace(batch, history=functional.pad(batch.history, (0, 1), value=PAD))
    variants = [(wider, slice(5))]
    for row, length in enumerate(batch.history_length.tolist()):
        request = repeat_row(batch, row)
        unpadded = replace(request, history=request.history[:, :length])
        variants.append((unpadded, slice(row, row + 1)))

    for variant, rows in variants:
        other_target = replace(variant, target=(variant.target + 1) % ITEMS)
        variant_items, variant_scores = model.recommend(other_target, 6, beam=8)
        assert variant_items.tolist() == items[rows].tolist()
        torch.testing.assert_close(variant_scores, scores[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_training_changes_every_trained_weight_and_a_checkpoint_restores_the_model(
    case: str, tmp_path: Path
) -> None:
    model = copy.deepcopy(build_case(case)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    optimizer = torch.optim.AdamW(dict.fromkeys(trained.values()), 1e-2)

    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(make_requests(16))["loss"]
        loss.backward()
        # DDP needs a gradient of every trained weight
        assert [name for name, p in trained.items() if p.grad is None] == []
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0]
    changed = {
        name
        for name, value in model.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {name for name, p in trained.items() if p.grad.any()}
    if hasattr(model, "_teacher"):
        # the backbone and the teacher's decoder are frozen
        frozen = [p for name, p in model.named_parameters() if name not in trained]
        assert all(p.grad is None for p in frozen)
        assert not any(name.startswith("decoder.teacher.") for name in trained)

    items, scores = model.eval().recommend(make_requests(6), 8, beam=12)
    about = checkpoint.Checkpoint(model=model.config_to_dict(model.config))
    checkpoint.save(tmp_path, model, about)
    loaded, _ = load_model(tmp_path, build_catalogue())
    loaded_items, loaded_scores = loaded.recommend(make_requests(6), 8, beam=12)
    assert loaded_items.tolist() == items.tolist()
    torch.testing.assert_close(loaded_scores, scores)


@pytest.mark.parametrize("name", ["earn", "nezha", "lc_rec_nezha"])
def test_joint_training_starts_from_a_copy_of_the_teachers_weights(name: str) -> None:
    model = build(name, MODELS[name])
    teacher = build_teacher(model.config, build_catalogue())
    teacher_weights = copy.deepcopy(teacher.state_dict())

    model.set_teacher(teacher)

    weights = model.state_dict()
    for key, value in teacher_weights.items():
        if key.startswith("backbone.") or name == "earn":
            assert torch.equal(weights[key], value)
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    for key, value in teacher.state_dict().items():
        assert torch.equal(value, teacher_weights[key])


JOINT = ("earn", "nezha", "lc_rec_nezha")
"""Models that train the teacher's weights further."""
FROZEN = [name for name in MODELS if name not in ("tiger", "lc_rec", *JOINT)]
"""Students on a frozen backbone."""


@pytest.mark.parametrize("name", FROZEN)
def test_a_students_backbone_is_its_teachers_and_is_frozen(name: str) -> None:
    model = build_case(name)
    weights = model.backbone.state_dict()
    teacher_weights = model.teacher.backbone.state_dict()
    shared = list(teacher_weights)
    if name == "sid_mlp_pp":
        shared = ["embedding.weight"]
    for key in shared:
        assert torch.equal(weights[key], teacher_weights[key])
        assert not model.get_parameter(f"backbone.{key}").requires_grad
    for key in model.state_dict():
        assert not key.startswith("_teacher")
        assert ".teacher." not in key


@pytest.mark.parametrize("name", MODELS)
def test_a_trie_of_other_codebooks_is_rejected(name: str) -> None:
    model = copy.deepcopy(build_case(name))
    codes = torch.tensor([[0, 0, 0, 0], [5, 7, 2, 1]])
    model.trie = Catalogue.from_codes(codes, (6, 8, 3, 2)).trie
    with pytest.raises(ValueError, match="the trie has"):
        model.recommend(make_requests(2), 2)
