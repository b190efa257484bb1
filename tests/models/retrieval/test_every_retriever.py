"""What holds for every model that decodes semantic IDs: search against its definition,
its own row alone, training, and what is refused."""

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
from models.retrieval.distillation.student import ReusesDecoder
from models.retrieval.distillation.teacher import TaughtModel, build_teacher
from models.retrieval.parts import History
from models.storage import checkpoint
from models.storage.tables import UserError
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
"""Small ones of all."""
TAUGHT_BY = {
    name: ("lc_rec" if name.startswith("lc_rec_") else "tiger") for name in MODELS
}
ABLATIONS = {
    f"{name} {path.stem}": (
        name,
        {**MODELS[name], **yaml.safe_load(path.read_text())["model"]},
    )
    for name in ("sid_mlp", "one_layer")
    for path in sorted((CONFIGS / name).glob("*.yaml"))
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, options) for name, options in MODELS.items()},
    **ABLATIONS,
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
"""And their variants: each ablation that is shipped, digits of the teacher's, other
teachers."""


def build(name: str, options: dict[str, Any]) -> Any:
    """A model with its teacher, if it has one; its log-probabilities are far from
    uniform.
    """
    torch.manual_seed(1)
    if issubclass(registry.find(name), TaughtModel):
        options = {
            "teacher_model": {"name": TAUGHT_BY[name], **MODELS[TAUGHT_BY[name]]},
            **options,
        }
    model: Any = build_model({"name": name, **options}, build_catalogue())
    if isinstance(model, TaughtModel):
        model.set_teacher(
            build_teacher(model.config, build_catalogue()).requires_grad_(False).eval()
        )
    own = model.backbone if name == "lc_rec" else model.decoder
    for part, parameter in own.named_parameters():
        if parameter.requires_grad and parameter.dim() == 2 and "readout" not in part:
            torch.nn.init.normal_(parameter.data, std=0.3 if name == "lc_rec" else 0.5)
    return model.eval()


@cache
def model_of(case: str) -> Any:
    """For tests that leave it as it is."""
    return build(*CASES[case])


def digits(decoder: Any, history: History, codes: Tensor) -> list[Tensor]:
    """(B, C_l) of each level that the decoder has: log-probabilities of its codebook,
    each given the codes before; of TIGER's decoder over its whole vocabulary."""
    if isinstance(decoder, ReusesDecoder):
        before = digits(decoder.teacher, history, codes)[: decoder.first_level]
        return (
            before
            + digits(decoder.own, history, codes)[
                decoder.first_level - decoder.own.first_level :
            ]
        )
    found = []
    for level, logits in enumerate(
        decoder.teacher_forced(history, codes), start=decoder.first_level
    ):
        first, size = decoder.tokens.first[level] - decoder.span(level)[0], SIZES[level]
        if isinstance(decoder, T5Decoder) and not decoder.codebook_scores:
            found.append(logits.log_softmax(-1)[:, first : first + size])
        else:
            found.append(logits[:, first : first + size].log_softmax(-1))
    return found


def among_children(own: list[Tensor], codes: Tensor) -> list[Tensor]:
    """Log-probabilities (N, C_l) of each level, after the first one anew over what the
    catalogue has after the codes of item N."""
    found = own[:1]
    for level, digit in enumerate(own[1:], start=1):
        same = (codes[:, None, :level] == codes[None, :, :level]).all(
            -1
        )  # items of the same prefix
        valid = (
            torch.zeros(ITEMS, SIZES[level]).index_add_(
                1, codes[:, level], same.float()
            )
            > 0
        )
        found.append(digit.masked_fill(~valid, -torch.inf).log_softmax(-1))
    return found


def row_of(batch: RequestBatch, row: int, count: int = 1) -> RequestBatch:
    """One request, so many times."""
    return batch.map(lambda value: value[row : row + 1].expand(count, *value.shape[1:]))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_beam_as_wide_as_the_catalogue_scores_every_item(case: str) -> None:
    """Each digit's log-probability from its definition; with `children` the digits
    after the first are normalised anew over what the catalogue has."""
    model, batch, codes = model_of(case), make_requests(3), build_catalogue().sids
    options = registry.find(CASES[case][0]).recommend_options()
    decoder = model.target if "atspeed" in case else model.decoder
    own = [
        digits(decoder, model.encode(row_of(batch, row, ITEMS)), codes)
        for row in range(3)
    ]
    for scores in ("codebook", "children") if "scores" in options else ("codebook",):
        given = {"scores": scores} if "scores" in options else {}
        items, found = model.recommend(batch, ITEMS + 2, beam=1000, **given)
        assert items[:, ITEMS:].tolist() == [[-1, -1]] * 3
        assert found[:, ITEMS:].isneginf().all()
        for row in range(3):
            total = torch.zeros(ITEMS)
            for level, digit in enumerate(
                own[row] if scores == "codebook" else among_children(own[row], codes)
            ):
                total += digit.gather(1, codes[:, level, None])[:, 0]
            assert sorted(items[row, :ITEMS].tolist()) == list(range(ITEMS))
            torch.testing.assert_close(
                found[row, :ITEMS], total[items[row, :ITEMS]], rtol=1e-4, atol=1e-4
            )
            assert (found[row, :ITEMS].diff() <= 0).all()
        if "path" in options:
            plain, values = model.recommend(
                batch, ITEMS + 2, beam=1000, path="plain", **given
            )
            torch.testing.assert_close(values, found, rtol=1e-4, atol=1e-5)
            assert plain.tolist() == items.tolist()
        if (
            "constrained" in options and scores == "codebook"
        ):  # of all tuples the trie alone decides which are dropped
            free, values = model.recommend(
                batch, ITEMS + 2, beam=180, constrained=False
            )
            assert free.tolist() == items.tolist()
            torch.testing.assert_close(values, found, rtol=1e-4, atol=1e-5)


def narrow_search(
    own: list[Tensor], codes: Tensor, some: list[int], beam: int
) -> list[int]:
    """Items that a search within the items `some` ends at, best first: of each level
    the best `beam` prefixes stay, by log-probabilities (N, C_l) of each level after the
    codes of item N."""
    kept, score = [()], torch.zeros(len(codes))
    for level, digit in enumerate(own):
        score = score + digit.gather(1, codes[:, level, None])[:, 0]
        found = {
            tuple(codes[item, : level + 1].tolist()): float(score[item])
            for item in some
        }
        found = {
            prefix: value for prefix, value in found.items() if prefix[:-1] in kept
        }
        kept = sorted(found, key=found.__getitem__, reverse=True)
        kept = kept if level == len(own) - 1 else kept[:beam]
    return [codes.tolist().index(list(code)) for code in kept]


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_narrow_search_within_allowed_items_follows_its_definition(case: str) -> None:
    """Whatever the beam keeps is allowed, and scores know of no set."""
    model, batch, codes = model_of(case), make_requests(3), build_catalogue().sids
    beam = (
        1000 if case == "atspeed_r" else 3
    )  # which draws its beams, unless all are kept
    options = registry.find(CASES[case][0]).recommend_options()
    decoder = model.target if "atspeed" in case else model.decoder
    own = [
        digits(decoder, model.encode(row_of(batch, row, ITEMS)), codes)
        for row in range(3)
    ]
    for some in (
        [4],
        [0, 3, 11, 17, 18, 22, 29],
        list(range(0, ITEMS, 2)),
        list(range(ITEMS)),
    ):
        allowed = model.encode_allowed(
            torch.zeros(ITEMS, dtype=torch.bool).index_fill(
                0, torch.tensor(some), True
            ),
        )
        for scores in (
            ("codebook", "children") if "scores" in options else ("codebook",)
        ):
            given = {"scores": scores} if "scores" in options else {}
            of_search = (
                own
                if scores == "codebook"
                else [among_children(row, codes) for row in own]
            )
            for how in (
                [given, {**given, "path": "plain"}] if "path" in options else [given]
            ):
                items, values = model.recommend(
                    batch, ITEMS, beam=beam, allowed=allowed, **how
                )
                new, _ = model.recommend(
                    batch, ITEMS, beam=beam, allowed=allowed, unseen=True, **how
                )
                for row in range(3):
                    expected = narrow_search(of_search[row], codes, some, beam)
                    assert items[row].tolist() == expected + [-1] * (
                        ITEMS - len(expected)
                    )
                    expected = [
                        item for item in expected if item not in batch.history[row]
                    ]
                    assert new[row].tolist() == expected + [-1] * (
                        ITEMS - len(expected)
                    )
                if len(some) == ITEMS:
                    whole = model.recommend(batch, ITEMS, beam=beam, **how)
                    assert torch.equal(items, whole[0])
                    assert torch.equal(values, whole[1])


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_search_is_teacher_forcing_of_its_prefix(case: str) -> None:
    """Beams that leave, double and change places, each against its whole prefix read at
    once.
    """
    model, batch = model_of(case), make_requests(4)
    history, generator = model.encode(batch), torch.Generator().manual_seed(3)
    scorer = model.decoder.scorer(model.backbone.infer(batch))
    found, prefixes = (
        scorer.start().unsqueeze(1),
        torch.zeros((4, 1, 0), dtype=torch.long),
    )
    for level, size in enumerate(SIZES):
        for beam in range(found.shape[1]):
            codes = functional.pad(prefixes[:, beam], (0, 4 - level))
            expected = digits(model.decoder, history, codes)[level]
            torch.testing.assert_close(found[:, beam], expected, rtol=1e-4, atol=1e-4)
        if level < 3:
            parents = torch.randint(0, found.shape[1], (4, 5), generator=generator)
            tokens = torch.randint(0, size, (4, 5), generator=generator)
            kept = prefixes.gather(1, parents.unsqueeze(-1).expand(-1, -1, level))
            prefixes, found = (
                torch.cat([kept, tokens.unsqueeze(-1)], 2),
                scorer.step(parents, tokens),
            )


@pytest.mark.parametrize(
    "case",
    [*MODELS, "sid_mlp no_attention", "sid_mlp per_digit_readout", "earn 1", "earn 3"],
)
def test_recommendations_depend_on_the_own_row_alone(case: str) -> None:
    """Neither on other requests nor on how far they are padded, nor on the target."""
    model, batch = model_of(case), make_requests(5)
    items, scores = model.recommend(batch, 6, beam=8)
    assert all(len(set(row)) == 6 for row in items.tolist())
    wider = replace(batch, history=functional.pad(batch.history, (0, 1), value=PAD))
    for given, rows in (
        (wider, slice(5)),
        *((row_of(batch, row), slice(row, row + 1)) for row in range(5)),
    ):
        longest = int(given.history_length.max()) if given.num_rows == 1 else 6
        other = replace(
            given,
            history=given.history[:, :longest],
            target=(given.target + 1) % ITEMS,
        )
        found, values = model.recommend(other, 6, beam=8)
        assert found.tolist() == items[rows].tolist()
        torch.testing.assert_close(values, scores[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_training_reaches_every_trained_weight_and_comes_back_from_a_checkpoint(
    case: str, tmp_path: Path
) -> None:
    model = copy.deepcopy(model_of(case)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {
        name: p
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.requires_grad
    }
    optimizer, losses = torch.optim.AdamW(dict.fromkeys(trained.values()), 1e-2), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(make_requests(16))["loss"]
        loss.backward()
        assert [
            name for name, p in trained.items() if p.grad is None
        ] == []  # a gradient for all, as DDP needs it
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    changed = {
        name
        for name, value in model.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {name for name, p in trained.items() if p.grad.any()}
    if hasattr(
        model, "_teacher"
    ):  # what is frozen gets no gradient: the backbone and the teacher's decoder
        frozen = [p for name, p in model.named_parameters() if name not in trained]
        assert all(p.grad is None for p in frozen)
        assert not any(name.startswith("decoder.teacher.") for name in trained)
    items, scores = model.eval().recommend(make_requests(6), 8, beam=12)
    checkpoint.save(
        tmp_path,
        model,
        checkpoint.Checkpoint(model=model.config_to_dict(model.config)),
    )
    loaded, _ = load_model(tmp_path, build_catalogue())
    again, again_scores = loaded.recommend(make_requests(6), 8, beam=12)
    assert again.tolist() == items.tolist()
    torch.testing.assert_close(again_scores, scores)


@pytest.mark.parametrize("name", ["earn", "nezha", "lc_rec_nezha"])
def test_joint_training_starts_from_a_copy_of_the_teachers_weights(name: str) -> None:
    model = build(name, MODELS[name])
    teacher = build_teacher(model.config, build_catalogue())
    before = copy.deepcopy(teacher.state_dict())
    model.set_teacher(teacher)
    own = dict(model.state_dict())
    for key, value in before.items():
        if key.startswith("backbone.") or name == "earn":
            assert torch.equal(own[key], value)
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    assert all(
        torch.equal(value, before[key]) for key, value in teacher.state_dict().items()
    )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in MODELS
        if name not in ("tiger", "lc_rec", "earn", "nezha", "lc_rec_nezha")
    ],
)
def test_a_students_backbone_is_its_teachers_and_stays(name: str) -> None:
    model = model_of(name)
    teacher, own = model.teacher, model.backbone.state_dict()
    same = teacher.backbone.state_dict()
    shared = ["embedding.weight"] if name == "sid_mlp_pp" else list(same)
    assert all(torch.equal(own[key], same[key]) for key in shared)
    assert not any(
        model.get_parameter(f"backbone.{key}").requires_grad for key in shared
    )
    assert not any(
        key.startswith("_teacher") or ".teacher." in key for key in model.state_dict()
    )


TIGER_NAMED = {"teacher_model": {"name": "tiger", **TEACHER}}
LC_REC_NAMED = {"teacher_model": {"name": "lc_rec", **LC_REC}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"beam": 0}, "beam is 0, it must be at least 1") for name in MODELS),
    ("tiger", {"dropout": -0.1}, r"dropout -0.1 is not in \[0, 1\)"),
    ("tiger", {"decoder": "x"}, "decoder is 'x'"),
    ("sasrec", {"dim": 15}, "dim 15 is not a multiple"),
    ("sasrec", {"dropout": 1.0}, "dropout 1.0 is not in"),
    ("sasrec", {"num_layers": 0}, "num_layers is 0, it must be at least 1"),
    ("sid_mlp", {"alpha": 1.5}, "alpha is 1.5"),
    ("sid_mlp", {"tau": 0.0}, "tau 0.0 is not above 0"),
    ("sid_mlp", {"dropout": 1.0}, "dropout 1.0 is not in"),
    ("sid_mlp", {"m": -1}, "m is -1, it must be at least 0"),
    ("sid_mlp", {"head_width": 0}, "head_width is 0, it must be at least 1"),
    (
        "sid_mlp",
        {"attention_width": 10, "attention_heads": 4},
        "10 does not divide by attention_heads 4",
    ),
    ("sid_mlp", {"prefix": "product"}, "prefix is .*product"),
    ("sid_mlp", {"scores": "child"}, "scores is .*child"),
    ("sid_mlp", {"shared_head": True}, "set prefix sum"),
    (
        "sid_mlp",
        {"prefix": "none", "embeddings": "random"},
        "embeddings random has no effect with prefix none",
    ),
    (
        "sid_mlp",
        {"readout": "mean", "context_ffn": False},
        "readout mean has no feed-forward",
    ),
    (
        "sid_mlp",
        {"readout": "per_digit", "prefix": "cascade"},
        "cannot with prefix cascade; set prefix concat or sum",
    ),
    ("sid_mlp", {"prefix": "cascade", "m": 1}, "starts at the first level"),
    ("sid_mlp", {**TIGER_NAMED, "m": 4}, "m 4 leaves no level of 4 to the student"),
    ("sid_mlp", {"teacher_model": {"depth": 3}}, "unknown key 'model.depth'"),
    ("sid_mlp_pp", {"encoder_layers": 0}, "encoder_layers is 0, it must be at least 1"),
    ("sid_mlp_pp", {"encoder_width": 0}, "encoder_width is 0, it must be at least 1"),
    ("sid_mlp_pp", {"encoder_dropout": 1.0}, "encoder_dropout 1.0 is not in"),
    ("sid_mlp_pp", {"m": 1}, "set m to 0"),
    (
        "sid_mlp_pp",
        {"end_to_end": True, "encoder": "somewhere"},
        "leave one of them out",
    ),
    (
        "sid_mlp_pp_encoder",
        {"teacher_model": {"name": "earn", **TIGER_NAMED}},
        "which a 'earn' does not have",
    ),
    ("gdn", {"heads": 0}, "heads is 0, it must be at least 1"),
    ("gdn", {"width": -1}, "width is -1, it must be at"),
    ("gdn", {"ffn_width": -1}, "ffn_width is -1, it must be"),
    ("gdn", {"chunk": 0}, "chunk is 0, it must be at least"),
    ("mamba2", {"dropout": 1.0}, "dropout 1.0 is not in"),
    ("mamba2", {"state": 0}, "state is 0, it must be at least"),
    (
        "mamba2",
        {"width": 20, "head_width": 12},
        "the inner width 40 of mamba2 is not a multiple of head_width 12",
    ),
    (
        "mamba2",
        {**TIGER_NAMED, "width": 0, "head_width": 12},
        "inner width 32 of mamba2 is not a multiple",
    ),
    ("earn", {"register_layer": 0}, "register_layer 0 is below 1"),
    (
        "earn",
        {**TIGER_NAMED, "register_layer": 4},
        "register_layer 4 exceeds the teacher's 3 encoder layers",
    ),
    (
        "earn",
        {"teacher_cache": "runs/cache"},
        "teacher_cache runs/cache cannot be used, as the states change",
    ),
    (
        "nezha",
        {"teacher_model": {"name": "one_layer"}},
        r"the teacher is a 'one_layer', .* give a TIGER as model.teacher",
    ),
    (
        "nezha",
        {"rates": {"heads": 1}},
        "rates has the unknown part 'heads'; the parts are head, embedding,",
    ),
    ("nezha", {"rates": {"head": 0}}, r"rates\.head is 0, it must be above 0"),
    (
        "one_layer",
        LC_REC_NAMED,
        "the model 'one_layer' has a layer of its teacher's T5",
    ),
    (
        "atspeed_s",
        {"teacher_model": {"name": "sid_mlp"}},
        "its teacher's T5 decoder; give a TIGER",
    ),
    ("atspeed_r", {"draft_beam": 0}, "draft_beam is 0, it must be at least 1"),
    ("atspeed_r", {"m": 1}, "m 1 is not 0"),
    ("atspeed_r", {"draft_steps": -1}, "draft_steps is -1, it must be at least 0"),
    ("atspeed_r", {"rule": "strict"}, "rule is .*strict"),
    ("lc_rec", {"width": 30, "num_heads": 4}, "a multiple of 8"),
    ("lc_rec", {"dropout": 1.0}, "dropout 1.0 is not in"),
    ("lc_rec", {"tasks": ["item_to_title"]}, "give 'next'"),
    ("lc_rec", {"tasks": ["next", "x"]}, "give 'next'"),
    ("lc_rec", {"task_share": 1.5}, "task_share 1.5 is not in"),
    ("lc_rec", {"lora_rank": -1}, "lora_rank is -1"),
    ("lc_rec", {"lm": "/nowhere"}, "cannot load the language model .*nowhere"),
    (
        "lc_rec_nezha",
        TIGER_NAMED,
        r"the teacher is a 'tiger', .* give an LC-Rec as model.teacher",
    ),
    (
        "lc_rec_sid_mlp",
        {**LC_REC_NAMED, **EARLY, "layer": 4},
        "layer 4 exceeds the 3 layers of the language model",
    ),
    ("lc_rec_sid_mlp", {"readout_layers": 0}, "readout_layers is 0 and layer 0;"),
    ("lc_rec_sid_mlp", {"width": 10, "attention_heads": 4}, "does not divide"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_impossible_options_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build_model({"name": name, **options}, build_catalogue())


@pytest.mark.parametrize("name", MODELS)
def test_semantic_ids_are_needed_and_of_the_right_codebooks(name: str) -> None:
    with pytest.raises(UserError, match="needs semantic IDs; give --sids"):
        build_model({"name": name}, Catalogue(3))
    model = copy.deepcopy(model_of(name))
    model.trie = Catalogue.from_codes(
        torch.tensor([[0, 0, 0, 0], [5, 7, 2, 1]]), (6, 8, 3, 2)
    ).trie
    with pytest.raises(ValueError, match="give the semantic IDs"):
        model.recommend(make_requests(2), 2)
