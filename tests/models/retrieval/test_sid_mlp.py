"""SID-MLP: its equations written out, options of its search, and its ablations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional

from jobs.options import parse
from jobs.train import Config
from models.build import build_model
from models.retrieval.decoders.sid_mlp import CrossAttention
from models.retrieval.distillation.student import Student
from models.retrieval.parts import History
from tests.fixtures.small_retrieval import (
    FIRST,
    SIZES,
    TEACHER,
    build_catalogue,
    build_tiger,
    make_requests,
    select_row,
)

CONFIGS = Path(__file__).parents[3] / "jobs/configs"
ABLATIONS = [
    *sorted((CONFIGS / "one_layer").glob("*.yaml")),
    *sorted((CONFIGS / "sid_mlp").glob("*.yaml")),
]
"""Config files of the ablations."""
SMALL = {"attention_heads": 2, "attention_width": 24, "ffn_width": 32, "head_width": 20}


def build_student(name: str = "sid_mlp", seed: int = 1, **options: Any) -> Student:
    """Return a student of `build_tiger()` with random weights.

    Its log-probabilities are far from uniform.
    """
    torch.manual_seed(seed)
    sizes = SMALL if name == "sid_mlp" else {}
    options = {"name": name, "teacher_model": TEACHER, **sizes, **options}
    model: Any = build_model(options, build_catalogue())
    model.set_teacher(build_tiger())
    for key, parameter in model.named_parameters():
        if parameter.requires_grad and "readout" not in key and parameter.dim() == 2:
            torch.nn.init.normal_(parameter.data, std=0.5)
    return model.eval()


def compute_logits(model: Student, history: History, prefix: list[int]) -> Tensor:
    """Return the logits (B, O_l) of the code after a prefix that all rows share."""
    codes = torch.tensor([*prefix, *[0] * (4 - len(prefix))])
    codes = codes.expand(len(history.lengths), -1)
    level = len(prefix) - model.decoder.first_level
    return model.decoder.teacher_forced(history, codes)[level]


def read_changes(path: Path) -> dict[str, Any]:
    """Return the model options that an ablation's file changes."""
    return yaml.safe_load(path.read_text())["model"]


def log_softmax(values: list[float]) -> list[float]:
    """Return log-probabilities, without PyTorch."""
    total = math.log(sum(math.exp(value) for value in values))
    return [value - total for value in values]


def test_attention_of_a_single_query_is_the_same_in_training() -> None:
    """Training takes another path for one query; outputs and gradients are equal."""
    torch.manual_seed(0)
    layer = CrossAttention(12, 20, 4).double()
    query = torch.randn(5, 1, 12, dtype=torch.double, requires_grad=True)
    states = torch.randn(5, 7, 12, dtype=torch.double, requires_grad=True)
    padding = torch.zeros(5, 1, 1, 7, dtype=torch.double)
    padding[2, ..., 4:] = -torch.inf
    padding[4, ..., 1:] = -torch.inf

    results = []
    for training in (True, False):
        output = layer.train(training)(query, states, padding)
        loss = (output * torch.arange(12)).sum()
        gradients = torch.autograd.grad(loss, [query, states, *layer.parameters()])
        results.append([output, *gradients])

    for in_training, in_evaluation in zip(*results, strict=True):
        torch.testing.assert_close(in_training, in_evaluation, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("num_queries", [1, 2])
def test_dropout_of_attention_weights_keeps_their_mean_and_is_off_in_evaluation(
    num_queries: int,
) -> None:
    torch.manual_seed(0)
    plain = CrossAttention(12, 20, 4).double()
    dropping = CrossAttention(12, 20, 4, dropout=0.3).double()
    dropping.load_state_dict(plain.state_dict())
    query = torch.randn(5, 2, 12, dtype=torch.double)[:, :num_queries]
    states = torch.randn(5, 7, 12, dtype=torch.double)
    expected = plain.eval()(query, states, None)
    torch.testing.assert_close(dropping.eval()(query, states, None), expected)

    dropping.train()
    draws = torch.stack([dropping(query, states, None) for _ in range(4000)])

    assert not torch.allclose(draws[0], expected)
    torch.testing.assert_close(draws.mean(0), expected, atol=0.05, rtol=0)


def test_the_option_attention_dropout_reaches_the_readout() -> None:
    model: Any = build_student(attention_dropout=0.3)
    assert model.decoder.readout.attention.dropout.p == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("alpha", "tau"), [(0.7, 1.0), (0.3, 2.5), (1.0, 0.5), (0.0, 1.0)]
)
@pytest.mark.parametrize("logits", ["codebook", "vocabulary"])
def test_the_loss_is_equation_3(alpha: float, tau: float, logits: str) -> None:
    model, batch = (
        build_student(alpha=alpha, tau=tau, logits=logits),
        make_requests(5),
    )
    teacher, sids = build_tiger(), build_catalogue().sids
    history = model.encode(batch)
    total = 0.0
    for row in range(5):
        row_history = select_row(history, row)
        codes = sids[batch.target[row]].tolist()
        all_teacher_logits = teacher.decoder.teacher_forced(
            row_history, torch.tensor([codes])
        )
        for level in range(4):
            first, size = FIRST[level], SIZES[level]
            teacher_logits = all_teacher_logits[level][0].tolist()
            student_logits = compute_logits(model, row_history, codes[:level])[0]
            target = codes[level]
            if logits == "codebook":
                teacher_logits = teacher_logits[first : first + size]
            else:
                target += first
            log_p = log_softmax([x / tau for x in teacher_logits])
            log_q = log_softmax([x / tau for x in student_logits.tolist()])
            divergence = 0.0
            for teacher_log, student_log in zip(log_p, log_q, strict=True):
                divergence += math.exp(teacher_log) * (teacher_log - student_log)
            cross_entropy = -log_softmax(student_logits.tolist())[target]
            total += alpha * tau**2 * divergence + (1 - alpha) * cross_entropy

    loss = model(batch)["loss"].item()

    assert loss == pytest.approx(total / 5, rel=1e-4)


def test_the_context_is_equation_1() -> None:
    model, batch = build_student(), make_requests(6)
    history = model.encode(batch)
    readout: Any = model.decoder.readout
    attention = readout.attention

    context = model.decoder.context(history)

    for row, length in enumerate(history.lengths.tolist()):
        states = history.states[row, :length]  # (S, D) without padding
        query = readout.query(states.mean(0))
        queries = query @ attention.q.weight.T
        keys = states @ attention.k.weight.T
        values = states @ attention.v.weight.T
        heads = []
        for part in (slice(0, 12), slice(12, 24)):
            weights = (keys[:, part] @ queries[part] / 12**0.5).softmax(0)
            heads.append(weights @ values[:, part])
        x = readout.norm1(query + torch.cat(heads) @ attention.o.weight.T)
        expected = readout.norm2(x + readout.ffn[3](readout.ffn[0](x).relu()))
        torch.testing.assert_close(context[row], expected, rtol=1e-4, atol=1e-5)


def test_the_heads_are_equation_2() -> None:
    """The head of a level reads the context and the embeddings of the codes before."""
    model, batch = build_student(), make_requests(6)
    history = model.encode(batch)
    context = model.decoder.context(history)
    embedding = build_tiger().backbone.embedding.weight
    prefix = torch.cat([embedding[FIRST[0] + 4], embedding[FIRST[1] + 2]])
    head: Any = model.decoder.heads[2]

    logits = compute_logits(model, history, [4, 2])

    for row in range(6):
        hidden = head[1](head[0](torch.cat([context[row], prefix])))
        expected = head[4](functional.gelu(hidden))
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-5)


def test_more_items_than_beams_come_from_all_children_of_the_last_beams() -> None:
    model, batch = build_student(), make_requests(8)
    items, _ = model.recommend(batch, 10, beam=3)
    assert (items[:, :3] >= 0).all()
    for row in items.tolist():
        ranked = [item for item in row if item >= 0]
        assert len(set(ranked)) == len(ranked)


def test_a_beam_wider_than_the_catalogue_changes_nothing() -> None:
    model, batch = build_student(), make_requests(8)
    _, scores = model.recommend(batch, 10, beam=30)
    _, wide_scores = model.recommend(batch, 10, beam=10**6)
    assert torch.equal(scores, wide_scores)


def test_every_ablation_of_the_paper_has_a_config() -> None:
    """The ablations are the rows of Tables 1, 2, 8 and 5 (G1, G2, G3)."""
    configs = [{"name": path.parent.name, **read_changes(path)} for path in ABLATIONS]
    sid_mlp: list[dict[str, Any]] = [
        {"m": 1},
        {"m": 2},
        {"m": 3},
        {"alpha": 0.0},
        {"prefix": "none"},
        {"prefix": "sum"},
        {"prefix": "sum", "shared_head": True},
        {"prefix": "cascade"},
        {"readout": "mean"},
        {"readout": "per_digit"},
        {"context_ffn": False},
        {"logits": "vocabulary"},
        {"embeddings": "random"},
    ]
    one_layer: list[dict[str, Any]] = [
        {"m": 1},
        {"m": 2},
        {"m": 3},
        {"alpha": 0.0},
        {"self_attention": False},
        {"cross_attention": False},
        {"self_attention": False, "cross_attention": False},
    ]
    expected = [{"name": "sid_mlp", **row} for row in sid_mlp]
    expected += [{"name": "one_layer", **row} for row in one_layer]
    assert all(row in configs for row in expected)
    assert len(configs) == len(expected)


REQUIRED_OPTIONS = ["--tables", "t", "--storage", "s", "--name", "n"]


@pytest.mark.parametrize("name", ["sid_mlp", "one_layer"])
def test_an_ablation_changes_the_options_of_its_base_that_it_names(name: str) -> None:
    base_options = ["--config", str(CONFIGS / f"{name}.yaml")]
    base = parse(Config, [*base_options, *REQUIRED_OPTIONS])
    assert base.fit.lr == 5e-5
    assert base.fit.weight_decay == 1e-4
    assert base.fit.batch_size == 512
    assert base.fit.max_epochs == 200
    for path in ABLATIONS:
        if path.parent.name != name:
            continue
        options = [*base_options, "--config", str(path), *REQUIRED_OPTIONS]
        ablation = parse(Config, options)
        changed = {
            key: value
            for key, value in vars(ablation.model).items()
            if getattr(base.model, key) != value
        }
        assert changed == read_changes(path)
        assert ablation.fit == base.fit


def compute_logits_of_requests(
    model: Student, prefix: list[int], seed: int = 1
) -> Tensor:
    """Return the logits (2, O_l) after a prefix for the two requests of a seed."""
    history = model.encode(make_requests(2, seed=seed))
    return compute_logits(model, history, prefix)


def depends_on_prefix(model: Student, prefix: list[int], other: list[int]) -> bool:
    """Return whether the logits after two prefixes differ."""
    logits = compute_logits_of_requests(model, prefix)
    other_logits = compute_logits_of_requests(model, other)
    return not torch.allclose(logits, other_logits, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix": "sum"},
        {"prefix": "cascade"},
        {"readout": "per_digit"},
        {"name": "one_layer"},
    ],
    ids=str,
)
def test_logits_depend_on_every_code_of_the_prefix(options: dict[str, str]) -> None:
    model = build_student(**options)
    assert depends_on_prefix(model, [1, 2], [0, 2])
    assert depends_on_prefix(model, [1, 2], [1, 3])


def test_without_a_prefix_logits_depend_on_no_code() -> None:
    model = build_student(prefix="none")
    assert not depends_on_prefix(model, [1, 2], [0, 3])


def test_without_self_attention_logits_depend_on_the_last_code_alone() -> None:
    model = build_student("one_layer", self_attention=False)
    assert not depends_on_prefix(model, [1, 2], [0, 2])
    assert depends_on_prefix(model, [1, 2], [1, 3])


def test_without_cross_attention_logits_do_not_depend_on_the_history() -> None:
    without = build_student("one_layer", cross_attention=False)
    assert torch.allclose(
        compute_logits_of_requests(without, [1, 2], seed=1),
        compute_logits_of_requests(without, [1, 2], seed=2),
    )
    full = build_student("one_layer")
    assert not torch.allclose(
        compute_logits_of_requests(full, [1, 2], seed=1),
        compute_logits_of_requests(full, [1, 2], seed=2),
    )
