"""SID-MLP: its equations written out, its search against every item, and its ablations."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from jobs.train import parse
from models import checkpoint, registry
from models.retrieval.data import PAD, Catalogue
from models.retrieval.decoding.shared_kv import SharedKV
from models.retrieval.distillation import TeacherMemory, distillation_loss
from models.retrieval.readout import CrossAttention
from models.retrieval.sid_mlp import SidMlp, SidMlpConfig
from models.retrieval.tiger import Tiger, TigerConfig
from models.tables import UserError

CONFIGS = Path(__file__).parents[3] / "jobs/configs"
ABLATIONS = sorted((CONFIGS / "sid_mlp").glob("*.yaml"))
SIZES = (6, 5, 3, 2)
FIRST = [1, 7, 12, 15]
TEACHER = {"d_model": 16, "d_ff": 32, "num_heads": 2, "d_kv": 8, "num_encoder_layers": 2, "num_decoder_layers": 2,
           "n_user_tokens": 2}  # fmt: skip
SMALL = {"attention_heads": 2, "attention_width": 24, "ffn_width": 32, "head_width": 20}


def catalogue(items: int = 30) -> Catalogue:
    generator = torch.Generator().manual_seed(0)
    codes = torch.cartesian_prod(*(torch.arange(size) for size in SIZES))
    return Catalogue.from_codes(codes[torch.randperm(len(codes), generator=generator)[:items]], SIZES)


def requests(count: int, items: int = 30, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, 6, (count,), generator=generator)
    length[0] = 2
    history = torch.randint(0, items, (count, 5), generator=generator)
    return {
        "history": history.masked_fill(torch.arange(5) >= length[:, None], PAD),
        "history_length": length,
        "user": torch.randint(0, 2**62, (count,), generator=generator),
        "target": torch.randint(0, items, (count,), generator=generator),
    }


def tiger(seed: int = 0) -> Tiger:
    torch.manual_seed(seed)
    return Tiger(TigerConfig(**TEACHER), catalogue()).requires_grad_(False).eval()


def student(seed: int = 1, **options: Any) -> SidMlp:
    """A student of `tiger()`, its weights random and its log-probabilities far from uniform."""
    torch.manual_seed(seed)
    model = SidMlp(SidMlpConfig(teacher_model=TEACHER, **{**SMALL, **options}), catalogue())
    model.set_teacher(tiger())
    for name, parameter in model.named_parameters():
        if name.startswith(("heads", "decoder")) and parameter.dim() == 2:
            torch.nn.init.normal_(parameter.data, std=0.5)
    return model.eval()


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


@pytest.mark.parametrize(("alpha", "tau"), [(0.7, 1.0), (0.3, 2.5), (1.0, 0.5), (0.0, 1.0)])
@pytest.mark.parametrize("logits", ["codebook", "vocabulary"])
def test_the_loss_is_equation_3(alpha: float, tau: float, logits: str) -> None:
    model, batch = student(alpha=alpha, tau=tau, logits=logits), requests(5)
    codes = catalogue().sids
    states, padding = model.encode(batch)
    context = model.context(states, padding)
    total = 0.0
    for row in range(5):
        target = codes[batch["target"][row]].tolist()
        for level in range(4):
            given = torch.tensor([[0, *(FIRST[j] + target[j] for j in range(level))]])
            source = padding if padding is None else padding[row : row + 1]
            taught = tiger().t5.decode(given, states[row : row + 1], source, 0.0)[0, -1].tolist()
            output = model.outputs(level, context, codes[batch["target"]][:, None, :level])[row, 0].tolist()
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
    states, padding = model.encode(batch)
    z = model.context(states, padding)
    readout = model.readout
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
        table = tiger().t5.shared.weight
        given = torch.cat([z[row], table[1 + 4], table[7 + 2]])
        hidden = torch.nn.functional.gelu(model.heads[2][1](model.heads[2][0](given)))
        logits = model.logits(2, z, torch.tensor([[[0, 0], [4, 2]]]).expand(6, -1, -1))
        torch.testing.assert_close(logits[row, 1], model.heads[2][4](hidden), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scores", ["children", "codebook"])
@pytest.mark.parametrize(
    "options", [{}, {"m": 1}, {"m": 2}, {"decoder": "transformer", "m": 1}, {"logits": "vocabulary"}]
)
def test_a_beam_as_wide_as_the_catalogue_scores_every_item(scores: Any, options: dict[str, Any]) -> None:
    """Each digit's log-probability from its definition: the teacher's over the vocabulary for the first m, then the
    student's; with `children` the digits after the first are normalised anew over what the catalogue has."""
    model, batch = student(**options), requests(3)
    items, found = model.recommend(batch, 32, beam=1000, scores=scores)
    assert items[:, 30:].tolist() == [[-1, -1]] * 3  # K above the catalogue
    assert found[:, 30:].tolist() == [[-math.inf] * 2] * 3
    codes = catalogue().sids.tolist()
    states, padding = model.encode(batch)
    context = model.context(states, padding)
    for row in range(3):
        expected = {}
        for item, code in enumerate(codes):
            total = 0.0
            for level in range(4):
                if level < model.config.m:
                    given = torch.tensor([[0, *(FIRST[j] + code[j] for j in range(level))]])
                    source = padding if padding is None else padding[row : row + 1]
                    logits = tiger().t5.decode(given, states[row : row + 1], source, 0.0)[0, -1]
                    digit = logits.log_softmax(-1)[FIRST[level] : FIRST[level] + SIZES[level]]
                else:
                    prefix = torch.tensor(code[:level]).view(1, 1, -1).expand(3, -1, -1)
                    digit = model.logits(level, context, prefix.long())[row, 0].log_softmax(-1)
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
    start = model.logits(0, model.context(*model.encode(batch)), torch.zeros(4, 1, 0, dtype=torch.long))[:, 0]
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


@pytest.mark.parametrize("options", [{}, {"readout": "mean"}, {"readout": "per_digit"}, {"decoder": "transformer"}])
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


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_each_ablation_learns_and_recommends(path: Path, tmp_path: Path) -> None:
    """It differs from the paper's student in what it names, trains what it has, and comes back from a checkpoint."""
    options = ablation(path)
    default = asdict(SidMlpConfig())
    assert options
    assert all(default[name] != value for name, value in options.items())
    torch.manual_seed(0)
    model = SidMlp(SidMlpConfig(teacher_model=TEACHER, **SMALL, **options), catalogue())
    model.set_teacher(tiger())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), 1e-2)
    losses = []
    for _ in range(8):
        loss = model.train()(requests(32))["loss"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in trained.values())  # a gradient for all, as DDP needs it
        optimizer.step()
    assert losses[-1] < losses[0]
    for name, value in model.state_dict().items():
        if name.startswith("source."):
            assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.source.parameters())
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    items, scores = model.eval().recommend(requests(6), 8, beam=12)
    assert ((items >= 0) & (items < 30)).all()
    assert all(len(set(row)) == 8 for row in items.tolist())
    assert (scores.diff(dim=1) <= 0).all()
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
    found = [ablation(path) for path in ABLATIONS]
    layer = {"decoder": "transformer"}
    rows: list[dict[str, Any]] = [
        {"m": 1}, {"m": 2}, {"m": 3}, layer, {**layer, "m": 1}, {**layer, "m": 2}, {**layer, "m": 3},
        {**layer, "self_attention": False}, {**layer, "cross_attention": False},
        {**layer, "self_attention": False, "cross_attention": False}, {"alpha": 0.0}, {**layer, "alpha": 0.0},
        {"prefix": "none"}, {"prefix": "sum"}, {"prefix": "sum", "shared_head": True}, {"prefix": "cascade"},
        {"readout": "mean"}, {"readout": "per_digit"}, {"context_ffn": False},
        {"logits": "vocabulary"}, {"embeddings": "random"},
    ]  # fmt: skip
    assert all(row in found for row in rows)
    assert len(found) == len(rows)


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_an_ablation_is_read_after_the_base(path: Path) -> None:
    base = ["--config", str(CONFIGS / "sid_mlp.yaml")]
    rest = ["--config", str(path), "--tables", "t", "--storage", "s", "--name", "n"]
    whole, cut = parse("train", [*base, *rest]), parse("train", [*base, *rest[2:]])
    changed = {name: value for name, value in vars(whole.model).items() if getattr(cut.model, name) != value}
    assert changed == ablation(path)
    assert whole.fit == cut.fit
    assert (whole.fit.lr, whole.fit.weight_decay, whole.fit.batch_size, whole.fit.max_epochs) == (5e-5, 1e-4, 512, 200)
    with pytest.raises(UserError, match="no model is named"):
        parse("train", rest)  # alone it would train with other settings than the paper's


def logits_of(model: SidMlp, prefix: list[int], seed: int = 1) -> Tensor:
    context = model.context(*model.encode(requests(2, seed=seed)))
    return model.logits(len(prefix), context, torch.tensor(prefix).view(1, 1, -1).expand(2, -1, -1).long())


def test_ablations_cut_what_they_name() -> None:
    def depends(model: SidMlp, ours: list[int], others: list[int]) -> bool:
        return not torch.allclose(logits_of(model, ours), logits_of(model, others), atol=1e-6)

    for options in ({}, {"prefix": "sum"}, {"prefix": "cascade"}, {"readout": "per_digit"}, {"decoder": "transformer"}):
        assert depends(student(**options), [1, 2], [0, 2])
        assert depends(student(**options), [1, 2], [1, 3])
    no_prefix = student(prefix="none")
    assert not depends(no_prefix, [1, 2], [0, 3])
    newest_only = student(decoder="transformer", self_attention=False)
    assert not depends(newest_only, [1, 2], [0, 2])
    assert depends(newest_only, [1, 2], [1, 3])
    blind = student(decoder="transformer", cross_attention=False)
    assert torch.allclose(logits_of(blind, [1, 2], seed=1), logits_of(blind, [1, 2], seed=2))
    seeing = student(decoder="transformer")
    assert not torch.allclose(logits_of(seeing, [1, 2], seed=1), logits_of(seeing, [1, 2], seed=2))


def test_the_one_layer_decoder_is_t5s() -> None:
    """Codebook by codebook, whole prefixes at once: what T5 with one decoder layer computes, and its search."""
    torch.manual_seed(3)
    reference = Tiger(TigerConfig(**{**TEACHER, "num_decoder_layers": 1}), catalogue()).eval()
    model = student(decoder="transformer")
    reference.t5.encoder.load_state_dict(model.source.t5.encoder.state_dict())
    reference.t5.shared.load_state_dict(model.source.t5.shared.state_dict())
    reference.t5.decoder.load_state_dict(model.decoder.stack.state_dict())
    batch = requests(6)
    states, padding = model.encode(batch)
    codes = catalogue().sids[batch["target"]]
    given = torch.nn.functional.pad(codes[:, :3] + torch.tensor(FIRST[:3]), (1, 0))
    expected = reference.t5.decode(given, states, padding, 0.0)
    context = model.context(states, padding)
    for level, first in enumerate(FIRST):
        logits = model.logits(level, context, codes[:, None, :level])[:, 0]
        torch.testing.assert_close(logits, expected[:, level, first : first + SIZES[level]], rtol=1e-4, atol=1e-5)
    teacher = SharedKV(reference.t5, states, padding, FIRST, list(SIZES))
    teacher.start()
    parents, tokens = torch.zeros(6, 4, dtype=torch.long), torch.arange(4).expand(6, 4)
    ours = model.logits(1, context, tokens.unsqueeze(-1)).log_softmax(-1)
    torch.testing.assert_close(ours, teacher.step(parents, tokens).log_softmax(-1), rtol=1e-4, atol=1e-5)


def test_remembered_answers_are_the_teachers() -> None:
    """Batches cut and mixed anew give the loss of a student that asks each time, after the teacher is gone too."""
    asking, remembering = student(), student(teacher_memory_mb=1)
    known = {**requests(12), "request": torch.arange(100, 112)}
    parts = [{name: value[rows] for name, value in known.items()} for rows in (slice(0, 7), slice(3, 12), slice(5, 8))]
    for batch in (known, *parts):
        torch.testing.assert_close(remembering(batch)["loss"], asking(batch)["loss"], rtol=1e-2, atol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        rough = student(teacher_memory_mb=1)
        torch.testing.assert_close(rough(known)["loss"], asking(known)["loss"], rtol=3e-2, atol=3e-2)
    first = remembering(known)["loss"]
    for parameter in remembering.teacher.parameters():
        parameter.fill_(math.nan)
    assert torch.equal(remembering(known)["loss"], first)
    forgetful = TeacherMemory(0)
    answer = forgetful(parts[0], asking.ask)
    assert forgetful.bytes == 0
    assert torch.equal(answer[0], forgetful(parts[0], asking.ask)[0])  # rounded alike when asked anew
    memory = TeacherMemory(1)
    memory.limit = 3000
    memory(known, asking.ask)
    assert 2000 < memory.bytes <= 3000
    for ours, theirs in zip(memory(known, asking.ask), forgetful(known, asking.ask), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_a_trie_of_other_codebooks_is_refused() -> None:
    model = student()
    codes = torch.tensor([[0, 0, 0, 0], [5, 7, 2, 1]])
    trie = Catalogue.from_codes(codes, (6, 8, 3, 2)).trie
    own = catalogue()
    with pytest.raises(UserError, match=r"codebooks of \[6, 8, 3, 2\] codes, the heads score \[6, 5, 3, 2\]"):
        SidMlp(SidMlpConfig(), Catalogue(30, own.sids, own.codebook_sizes, trie))
    model.trie = trie
    with pytest.raises(ValueError, match=r"scores 5 codes at level 1, the trie has 8; give the semantic IDs"):
        model.recommend(requests(2), 2, path="plain")
    with pytest.raises(UserError, match="needs semantic IDs; give --sids"):
        SidMlp(SidMlpConfig(), Catalogue(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, r"alpha 1.5 is not in \[0, 1\]"),
        ({"tau": 0.0}, "tau 0.0 is not above 0"),
        ({"dropout": 1.0}, "dropout 1.0 is not in"),
        ({"head_width": 0}, "head_width 0 is below 1"),
        ({"attention_width": 10, "attention_heads": 4}, "10 does not divide by attention_heads 4"),
        ({"m": -1}, "m -1 is below 0"),
        ({"teacher_memory_mb": -5}, "teacher_memory_mb -5 is below 0; give the number of megabytes"),
        ({"prefix": "product"}, "prefix 'product' is unknown; choose one of concat, none, sum, cascade"),
        ({"shared_head": True}, "same input for every digit; set prefix sum"),
        ({"prefix": "none", "embeddings": "random"}, "no embeddings to train"),
        ({"readout": "mean", "context_ffn": False}, "readout mean has no feed-forward"),
        ({"readout": "per_digit", "prefix": "cascade"}, "prefix cascade does not fit it"),
        ({"prefix": "cascade", "m": 1}, "starts at the first digit, and m is 1"),
        ({"decoder": "transformer", "readout": "mean"}, "readout mean is of the MLP decoder"),
        ({"self_attention": False}, "set decoder transformer"),
        ({"teacher_model": {"depth": 3}}, "teacher_model is not a config of TIGER"),
        ({"teacher_model": {"beam": 0}}, "beam 0 is below 1"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SidMlpConfig(**options)
    with pytest.raises(UserError, match=message):
        registry.config_from_dict({"name": "sid_mlp", **options})
