"""SID-MLP: its equations written out, its search against every item, and its ablations."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_retrieval import FIRST, SIZES, TEACHER, catalogue, requests, row_of, tiger
from torch import Tensor

from jobs.train import parse
from models import checkpoint, registry
from models.retrieval.data import Catalogue
from models.retrieval.decoders.readout import CrossAttention
from models.retrieval.decoders.sid_mlp import SidMlpConfig
from models.retrieval.parts import History
from models.retrieval.student import Student, distillation_loss
from models.retrieval.tiger import Tiger, TigerConfig
from models.tables import UserError

CONFIGS = Path(__file__).parents[3] / "jobs/configs"
ABLATIONS = sorted(path for name in ("sid_mlp", "one_layer") for path in (CONFIGS / name).glob("*.yaml"))
SMALL = {"attention_heads": 2, "attention_width": 24, "ffn_width": 32, "head_width": 20}


def untrained(name: str = "sid_mlp", **options: Any) -> Student:
    small = SMALL if name == "sid_mlp" else {}
    config = registry.config_from_dict({"name": name, "teacher_model": TEACHER, **small, **options})
    return registry.build(config, catalogue())


def student(name: str = "sid_mlp", seed: int = 1, **options: Any) -> Student:
    """A student of `tiger()`, its weights random and its log-probabilities far from uniform."""
    torch.manual_seed(seed)
    model = untrained(name, **options)
    model.set_teacher(tiger())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "readout" not in name and parameter.dim() == 2:
            torch.nn.init.normal_(parameter.data, std=0.5)
    return model.eval()


def logits_at(model: Student, history: History, prefix: list[int]) -> Tensor:
    """(B, O_l): logits of the code after `prefix`, the same for every row."""
    codes = torch.tensor([*prefix, *[0] * (4 - len(prefix))]).expand(len(history.lengths), -1)
    return model.decoder.teacher_forced(history, codes)[len(prefix) - model.decoder.first_level]


def digit_of(model: Student, history: History, prefix: list[int]) -> Tensor:
    """(B, C_l): log-probabilities of the level's codebook."""
    level = len(prefix)
    first = FIRST[level] - model.decoder.span(level)[0]
    return logits_at(model, history, prefix)[:, first : first + SIZES[level]].log_softmax(-1)


def ablation(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["model"]


def log_softmax(values: list[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in values))
    return [value - total for value in values]


def test_one_query_in_training_is_the_same_attention() -> None:
    torch.manual_seed(0)
    layer = CrossAttention(12, 20, 4).double()
    query, states = torch.randn(5, 1, 12, dtype=torch.double), torch.randn(5, 7, 12, dtype=torch.double)
    padding = torch.zeros(5, 1, 1, 7, dtype=torch.double)
    padding[2, ..., 4:] = padding[4, ..., 1:] = -torch.inf
    found = []
    for training in (True, False):
        given = [query.clone().requires_grad_(), states.clone().requires_grad_()]
        out = layer.train(training)(*given, padding)
        grads = torch.autograd.grad((out * torch.arange(12)).sum(), [*given, *layer.parameters()])
        found.append([out, *grads])
    for one, all_ in zip(*found, strict=True):
        torch.testing.assert_close(one, all_, atol=1e-12, rtol=1e-10)


def test_dropout_of_attention_weights_is_of_training_alone_and_keeps_their_mean() -> None:
    torch.manual_seed(0)
    plain, dropping = CrossAttention(12, 20, 4).double(), CrossAttention(12, 20, 4, dropout=0.3).double()
    dropping.load_state_dict(plain.state_dict())
    query, states = torch.randn(5, 2, 12, dtype=torch.double), torch.randn(5, 7, 12, dtype=torch.double)
    for asked in (query, query[:, :1]):  # more queries of a user, and the one of a readout
        expected = plain.eval()(asked, states, None)
        torch.testing.assert_close(dropping.eval()(asked, states, None), expected)
        dropping.train()
        drawn = torch.stack([dropping(asked, states, None) for _ in range(4000)])
        assert not torch.allclose(drawn[0], expected)
        torch.testing.assert_close(drawn.mean(0), expected, atol=0.05, rtol=0)
    torch.testing.assert_close(student(attention_dropout=0.3).decoder.readout.attention.dropout.p, 0.3)


@pytest.mark.parametrize(("alpha", "tau"), [(0.7, 1.0), (0.3, 2.5), (1.0, 0.5), (0.0, 1.0)])
@pytest.mark.parametrize("logits", ["codebook", "vocabulary"])
def test_the_loss_is_equation_3(alpha: float, tau: float, logits: str) -> None:
    model, batch = student(alpha=alpha, tau=tau, logits=logits), requests(5)
    codes = catalogue().sids
    history, taught_by = model.encode(batch), tiger()
    total = 0.0
    for row in range(5):
        own = row_of(history, row)
        target = codes[batch["target"][row]].tolist()
        for level in range(4):
            taught = taught_by.decoder.teacher_forced(own, torch.tensor([target]))[level][0].tolist()
            output = logits_at(model, own, target[:level])[0].tolist()
            truth = target[level]
            if logits == "codebook":
                taught = taught[FIRST[level] : FIRST[level] + SIZES[level]]
            else:
                truth += FIRST[level]
            p = [math.exp(x) for x in log_softmax([x / tau for x in taught])]
            q = log_softmax([x / tau for x in output])
            divergence = sum(p[i] * (math.log(p[i]) - q[i]) for i in range(len(p)))
            total += alpha * tau**2 * divergence - (1 - alpha) * log_softmax(output)[truth]
    assert model(batch)["loss"].item() == pytest.approx(total / 5, rel=1e-4)


def test_a_student_that_equals_its_teacher_pays_the_cross_entropy_alone() -> None:
    logits, target = torch.randn(4, 9), torch.tensor([0, 3, 8, 1])
    mimicry = distillation_loss(logits, logits + 5.0, target, alpha=1.0, tau=3.0)
    assert mimicry.item() == pytest.approx(0, abs=1e-5)


def test_context_and_heads_are_equations_1_and_2() -> None:
    model, batch = student(), requests(6)
    history = model.encode(batch)
    states, z = history.states, model.decoder.context(history)
    readout, heads_of = model.decoder.readout, model.decoder.heads
    for row in range(6):
        real = states[row, : 2 + 4 * int(batch["history_length"][row])]  # (S, D) without padding
        query = readout.query(real.mean(0))
        heads = []
        for head in range(2):
            part = slice(12 * head, 12 * head + 12)
            q, k, v = (
                (x @ layer.weight.T)[..., part]
                for x, layer in (
                    (query, readout.attention.q), (real, readout.attention.k), (real, readout.attention.v)
                )
            )  # fmt: skip
            heads.append((k @ q / 12**0.5).softmax(0) @ v)
        x = readout.norm1(query + torch.cat(heads) @ readout.attention.o.weight.T)
        expected = readout.norm2(x + readout.ffn[3](readout.ffn[0](x).relu()))
        torch.testing.assert_close(z[row], expected, rtol=1e-4, atol=1e-5)
        table = tiger().backbone.embedding.weight
        given = torch.cat([z[row], table[1 + 4], table[7 + 2]])
        hidden = torch.nn.functional.gelu(heads_of[2][1](heads_of[2][0](given)))
        logits = logits_at(model, history, [4, 2])[row]
        torch.testing.assert_close(logits, heads_of[2][4](hidden), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scores", ["children", "codebook"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"m": 1},
        {"m": 2},
        {"logits": "vocabulary"},
        {"prefix": "cascade"},
        {"readout": "per_digit", "m": 1},
        {"name": "one_layer"},
        {"name": "one_layer", "m": 1},
        {"name": "one_layer", "self_attention": False},
        {"name": "one_layer", "cross_attention": False, "logits": "vocabulary"},
    ],
)  # fmt: skip
@pytest.mark.long
def test_a_beam_as_wide_as_the_catalogue_scores_every_item(scores: Any, options: dict[str, Any]) -> None:
    """Each digit's log-probability from its definition: the teacher's over the vocabulary for the first m, then the
    student's; with `children` the digits after the first are normalised anew over what the catalogue has."""
    model, batch = student(**options), requests(3)
    items, found = model.recommend(batch, 32, beam=1000, scores=scores)
    assert items[:, 30:].tolist() == [[-1, -1]] * 3  # K above the catalogue
    assert found[:, 30:].tolist() == [[-math.inf] * 2] * 3
    codes = catalogue().sids.tolist()
    history, taught_by = model.encode(batch), tiger()
    for row in range(3):
        own = row_of(history, row)
        expected, digits = {}, {}
        for item, code in enumerate(codes):
            total = 0.0
            for level in range(4):
                if (prefix := tuple(code[:level])) not in digits:
                    if level < model.config.m:
                        logits = taught_by.decoder.teacher_forced(own, torch.tensor([code]))[level][0]
                        digits[prefix] = logits.log_softmax(-1)[FIRST[level] : FIRST[level] + SIZES[level]]
                    else:
                        digits[prefix] = digit_of(model, own, code[:level])[0]
                digit = digits[prefix]
                score = digit[code[level]].item()
                if scores == "children" and level > 0:
                    valid = sorted({other[level] for other in codes if other[:level] == code[:level]})
                    score = log_softmax([digit[child].item() for child in valid])[valid.index(code[level])]
                total += score
            expected[item] = total
        order = sorted(expected, key=lambda item: -expected[item])
        assert [expected[item] for item in items[row, :30].tolist()] == pytest.approx(
            [expected[item] for item in order], abs=1e-4
        )
        assert sorted(items[row, :30].tolist()) == list(range(30))
        assert found[row, :30].tolist() == pytest.approx([expected[i] for i in items[row, :30].tolist()], abs=1e-4)


def test_an_only_child_costs_nothing_and_children_sum_to_the_first_code() -> None:
    model, batch = student(), requests(4)
    items, scores = model.recommend(batch, 30, beam=1000, scores="children")
    codes = catalogue().sids
    start = logits_at(model, model.encode(batch), [])
    for row in range(4):
        of_code = torch.zeros(6).index_add(0, codes[items[row]][:, 0], scores[row].exp())
        present = codes[:, 0].unique()
        torch.testing.assert_close(of_code[present], start[row].softmax(-1)[present], rtol=1e-4, atol=1e-6)


def test_options_of_recommend() -> None:
    model, batch = student(), requests(8)
    wide, _ = model.recommend(batch, 10, beam=3)  # K above the beam: the last digit is taken from all of its children
    assert all(len(set(row)) == len(row) for row in [[i for i in row if i >= 0] for row in wide.tolist()])
    assert (wide[:, :3] >= 0).all()
    same = model.recommend(batch, 10, beam=30)[1], model.recommend(batch, 10, beam=10**6)[1]
    assert torch.equal(*same)  # a beam above the catalogue keeps every prefix
    free, score = model.recommend(batch, 10, beam=180, constrained=False)
    bound, expected = model.recommend(batch, 10, beam=180, scores="codebook")
    assert free.tolist() == bound.tolist()  # as wide as all tuples, the trie alone decides what is dropped
    torch.testing.assert_close(score, expected)
    for option in ({"scores": "child"}, {"path": "quick"}):
        with pytest.raises(ValueError, match="is unknown; choose one of"):
            model.recommend(batch, 5, **option)
    with pytest.raises(ValueError, match="need to be at least 1"):
        model.recommend(batch, 0)


@pytest.mark.parametrize("options", [{}, {"readout": "mean"}, {"readout": "per_digit"}, {"name": "one_layer"}])
def test_recommendations_depend_on_the_own_row_alone(options: dict[str, Any]) -> None:
    model, batch = student(**options), requests(5)
    items, scores = model.recommend(batch, 6, beam=8)
    for row in range(5):
        length = int(batch["history_length"][row])
        one = {name: value[row : row + 1] for name, value in batch.items()}
        one["history"] = one["history"][:, :length]
        alone, alone_scores = model.recommend(one, 6, beam=8)
        assert alone.tolist() == items[row : row + 1].tolist()
        torch.testing.assert_close(alone_scores, scores[row : row + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_each_ablation_learns_and_recommends(path: Path, tmp_path: Path) -> None:
    """It differs from the paper's student in what it names, trains what it has, and comes back from a checkpoint."""
    options, name = ablation(path), path.parent.name
    default = asdict(registry.model_config(name)())
    assert options
    assert all(default[option] != value for option, value in options.items())
    torch.manual_seed(0)
    model = untrained(name, **options)
    model.set_teacher(tiger())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), 1e-2)
    losses = []
    for _ in range(5):
        loss = model.train()(requests(16))["loss"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in trained.values())  # a gradient for all, as DDP needs it
        optimizer.step()
    assert losses[-1] < losses[0]
    for name, value in model.state_dict().items():
        if name.startswith("backbone."):
            assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.backbone.parameters())
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    items, scores = model.eval().recommend(requests(6), 8, beam=12)
    assert ((items >= 0) & (items < 30)).all()
    assert all(len(set(row)) == 8 for row in items.tolist())
    assert (scores.diff(dim=1) <= 0).all()
    if path.parent.name == "sid_mlp":
        plain, plain_scores = model.recommend(requests(6), 8, beam=12, path="plain")
        assert plain.tolist() == items.tolist()
        torch.testing.assert_close(plain_scores, scores, rtol=1e-4, atol=1e-5)

    about = checkpoint.Checkpoint(model=registry.config_to_dict(model.config))
    checkpoint.save(tmp_path / "saved", model, about)
    loaded, _ = registry.load(tmp_path / "saved", catalogue())
    again, again_scores = loaded.recommend(requests(6), 8, beam=12)
    assert again.tolist() == items.tolist()
    torch.testing.assert_close(again_scores, scores)


def test_every_ablation_of_the_paper_has_its_file() -> None:
    """Rows of Tables 1, 2, 8 and 5 (G1, G2, G3), each by what it switches."""
    found = [{"name": path.parent.name, **ablation(path)} for path in ABLATIONS]
    mlp: list[dict[str, Any]] = [
        {"m": 1}, {"m": 2}, {"m": 3}, {"alpha": 0.0},
        {"prefix": "none"}, {"prefix": "sum"}, {"prefix": "sum", "shared_head": True}, {"prefix": "cascade"},
        {"readout": "mean"}, {"readout": "per_digit"}, {"context_ffn": False},
        {"logits": "vocabulary"}, {"embeddings": "random"},
    ]  # fmt: skip
    layer: list[dict[str, Any]] = [
        {"m": 1}, {"m": 2}, {"m": 3}, {"alpha": 0.0}, {"self_attention": False}, {"cross_attention": False},
        {"self_attention": False, "cross_attention": False},
    ]  # fmt: skip
    rows = [{"name": "sid_mlp", **row} for row in mlp] + [{"name": "one_layer", **row} for row in layer]
    assert all(row in found for row in rows)
    assert len(found) == len(rows)


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_an_ablation_is_read_after_the_base(path: Path) -> None:
    base = ["--config", str(CONFIGS / f"{path.parent.name}.yaml")]
    rest = ["--config", str(path), "--tables", "t", "--storage", "s", "--name", "n"]
    whole, cut = parse([*base, *rest]), parse([*base, *rest[2:]])
    changed = {name: value for name, value in whole.model.items() if cut.model[name] != value}
    assert changed == ablation(path)
    assert whole.fit == cut.fit
    assert (whole.fit.lr, whole.fit.weight_decay, whole.fit.batch_size, whole.fit.max_epochs) == (5e-5, 1e-4, 512, 200)
    with pytest.raises(UserError, match="no model is named"):
        parse(rest)  # alone it would train with other settings than the paper's


def logits_of(model: Student, prefix: list[int], seed: int = 1) -> Tensor:
    return logits_at(model, model.encode(requests(2, seed=seed)), prefix)


def test_ablations_cut_what_they_name() -> None:
    def depends(model: Student, ours: list[int], others: list[int]) -> bool:
        return not torch.allclose(logits_of(model, ours), logits_of(model, others), atol=1e-6)

    for options in ({}, {"prefix": "sum"}, {"prefix": "cascade"}, {"readout": "per_digit"}, {"name": "one_layer"}):
        assert depends(student(**options), [1, 2], [0, 2])
        assert depends(student(**options), [1, 2], [1, 3])
    no_prefix = student(prefix="none")
    assert not depends(no_prefix, [1, 2], [0, 3])
    newest_only = student("one_layer", self_attention=False)
    assert not depends(newest_only, [1, 2], [0, 2])
    assert depends(newest_only, [1, 2], [1, 3])
    blind = student("one_layer", cross_attention=False)
    assert torch.allclose(logits_of(blind, [1, 2], seed=1), logits_of(blind, [1, 2], seed=2))
    seeing = student("one_layer")
    assert not torch.allclose(logits_of(seeing, [1, 2], seed=1), logits_of(seeing, [1, 2], seed=2))


def test_the_one_layer_decoder_is_t5s() -> None:
    """Codebook by codebook, whole prefixes at once: what T5 with one decoder layer computes, and its search."""
    torch.manual_seed(3)
    reference = Tiger(TigerConfig(**{**TEACHER, "num_decoder_layers": 1}), catalogue()).eval()
    model = student("one_layer")
    reference.backbone.load_state_dict(model.backbone.state_dict())
    reference.decoder.load_state_dict(model.decoder.state_dict())
    batch = requests(6)
    history, codes = model.encode(batch), catalogue().sids[batch["target"]]
    expected = reference.decoder.teacher_forced(history, codes)
    found = model.decoder.teacher_forced(history, codes)
    for level, first in enumerate(FIRST):
        torch.testing.assert_close(found[level], expected[level][:, first : first + SIZES[level]], rtol=1e-4, atol=1e-5)
    theirs, ours = reference.decoder.scorer(history), model.decoder.scorer(history)
    torch.testing.assert_close(ours.start(), theirs.start().log_softmax(-1), rtol=1e-4, atol=1e-5)
    parents, tokens = torch.zeros(6, 4, dtype=torch.long), torch.arange(4).expand(6, 4)
    expected_step = theirs.step(parents, tokens).log_softmax(-1)
    torch.testing.assert_close(ours.step(parents, tokens), expected_step, rtol=1e-4, atol=1e-5)


def test_a_trie_of_other_codebooks_is_refused() -> None:
    model = student()
    codes = torch.tensor([[0, 0, 0, 0], [5, 7, 2, 1]])
    trie = Catalogue.from_codes(codes, (6, 8, 3, 2)).trie
    own = catalogue()
    with pytest.raises(UserError, match=r"codebooks of \[6, 8, 3, 2\] codes, the decoder scores \[6, 5, 3, 2\]"):
        registry.build(SidMlpConfig(), Catalogue(30, own.sids, own.codebook_sizes, trie))
    model.trie = trie
    with pytest.raises(ValueError, match=r"scores 5 codes at level 1, the trie has 8; give the semantic IDs"):
        model.recommend(requests(2), 2, path="plain")
    with pytest.raises(UserError, match="needs semantic IDs; give --sids"):
        registry.build(SidMlpConfig(), Catalogue(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, r"alpha 1.5 is not in \[0, 1\]"),
        ({"tau": 0.0}, "tau 0.0 is not above 0"),
        ({"dropout": 1.0}, "dropout 1.0 is not in"),
        ({"head_width": 0}, "head_width is 0, it must be at least 1"),
        ({"attention_width": 10, "attention_heads": 4}, "10 does not divide by attention_heads 4"),
        ({"m": -1}, "m -1 is below 0"),
        ({"prefix": "product"}, "prefix 'product' is unknown; choose one of concat, none, sum, cascade"),
        ({"shared_head": True}, "same input for every digit; set prefix sum"),
        ({"prefix": "none", "embeddings": "random"}, "no embeddings to train"),
        ({"readout": "mean", "context_ffn": False}, "readout mean has no feed-forward"),
        ({"readout": "per_digit", "prefix": "cascade"}, "prefix cascade does not fit it"),
        ({"prefix": "cascade", "m": 1}, "starts at the first digit, and m is 1"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SidMlpConfig(**options)
    with pytest.raises(UserError, match=message):
        registry.config_from_dict({"name": "sid_mlp", **options})


def test_a_teacher_that_cannot_be_is_refused() -> None:
    for teacher, message in (
        ({"depth": 3}, "unknown key 'model.depth'"),
        ({"beam": 0}, "beam is 0, it must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            registry.build(SidMlpConfig(teacher_model=teacher), catalogue())


def test_a_student_can_teach() -> None:
    """Any backbone with a decoder: here the heads of another student."""
    first = student()
    torch.manual_seed(5)
    config = SidMlpConfig(teacher_model=registry.config_to_dict(first.config), alpha=1.0, **SMALL)
    second = registry.build(config, catalogue())
    second.set_teacher(first)
    second.decoder.load_state_dict(first.decoder.state_dict())
    loss = second.eval()(requests(6))["loss"]
    assert loss.item() == pytest.approx(0, abs=1e-5)  # the same weights say the same
