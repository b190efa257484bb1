"""SID-MLP: its equations written out, its search against every item, and its ablations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from jobs.options import parse
from jobs.train import Config
from models.build import build_model
from models.retrieval.decoders.sid_mlp import CrossAttention
from models.retrieval.distillation.student import Student
from models.retrieval.parts import History
from models.storage.tables import UserError
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
ABLATIONS = sorted(
    path
    for name in ("sid_mlp", "one_layer")
    for path in (CONFIGS / name).glob("*.yaml")
)
SMALL = {"attention_heads": 2, "attention_width": 24, "ffn_width": 32, "head_width": 20}


def untrained(name: str = "sid_mlp", **options: Any) -> Student:
    small = SMALL if name == "sid_mlp" else {}
    options = {"name": name, "teacher_model": TEACHER, **small, **options}
    return build_model(options, build_catalogue())  # type: ignore[return-value]


def student(name: str = "sid_mlp", seed: int = 1, **options: Any) -> Student:
    """A student of `build_tiger()`, its weights random and its log-probabilities far from
    uniform.
    """
    torch.manual_seed(seed)
    model = untrained(name, **options)
    model.set_teacher(build_tiger())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "readout" not in name and parameter.dim() == 2:
            torch.nn.init.normal_(parameter.data, std=0.5)
    return model.eval()


def logits_at(model: Student, history: History, prefix: list[int]) -> Tensor:
    """(B, O_l): logits of the code after `prefix`, the same for every row."""
    codes = torch.tensor([*prefix, *[0] * (4 - len(prefix))]).expand(
        len(history.lengths), -1
    )
    return model.decoder.teacher_forced(history, codes)[
        len(prefix) - model.decoder.first_level
    ]


def ablation(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["model"]


def log_softmax(values: list[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in values))
    return [value - total for value in values]


def test_one_query_in_training_is_the_same_attention() -> None:
    torch.manual_seed(0)
    layer = CrossAttention(12, 20, 4).double()
    query, states = (
        torch.randn(5, 1, 12, dtype=torch.double),
        torch.randn(5, 7, 12, dtype=torch.double),
    )
    padding = torch.zeros(5, 1, 1, 7, dtype=torch.double)
    padding[2, ..., 4:] = padding[4, ..., 1:] = -torch.inf
    found = []
    for training in (True, False):
        given = [query.clone().requires_grad_(), states.clone().requires_grad_()]
        out = layer.train(training)(*given, padding)
        grads = torch.autograd.grad(
            (out * torch.arange(12)).sum(), [*given, *layer.parameters()]
        )
        found.append([out, *grads])
    for one, all_ in zip(*found, strict=True):
        torch.testing.assert_close(one, all_, atol=1e-12, rtol=1e-10)


def test_dropout_of_attention_weights_is_of_training_alone_and_keeps_their_mean() -> (
    None
):
    torch.manual_seed(0)
    plain, dropping = (
        CrossAttention(12, 20, 4).double(),
        CrossAttention(12, 20, 4, dropout=0.3).double(),
    )
    dropping.load_state_dict(plain.state_dict())
    query, states = (
        torch.randn(5, 2, 12, dtype=torch.double),
        torch.randn(5, 7, 12, dtype=torch.double),
    )
    for asked in (
        query,
        query[:, :1],
    ):  # more queries of a user, and the one of a readout
        expected = plain.eval()(asked, states, None)
        torch.testing.assert_close(dropping.eval()(asked, states, None), expected)
        dropping.train()
        drawn = torch.stack([dropping(asked, states, None) for _ in range(4000)])
        assert not torch.allclose(drawn[0], expected)
        torch.testing.assert_close(drawn.mean(0), expected, atol=0.05, rtol=0)
    torch.testing.assert_close(
        student(attention_dropout=0.3).decoder.readout.attention.dropout.p, 0.3
    )


@pytest.mark.parametrize(
    ("alpha", "tau"), [(0.7, 1.0), (0.3, 2.5), (1.0, 0.5), (0.0, 1.0)]
)
@pytest.mark.parametrize("logits", ["codebook", "vocabulary"])
def test_the_loss_is_equation_3(alpha: float, tau: float, logits: str) -> None:
    model, batch = student(alpha=alpha, tau=tau, logits=logits), make_requests(5)
    codes = build_catalogue().sids
    history, taught_by = model.encode(batch), build_tiger()
    total = 0.0
    for row in range(5):
        own = select_row(history, row)
        target = codes[batch.target[row]].tolist()
        for level in range(4):
            taught = taught_by.decoder.teacher_forced(own, torch.tensor([target]))[
                level
            ][0].tolist()
            output = logits_at(model, own, target[:level])[0].tolist()
            truth = target[level]
            if logits == "codebook":
                taught = taught[FIRST[level] : FIRST[level] + SIZES[level]]
            else:
                truth += FIRST[level]
            p = [math.exp(x) for x in log_softmax([x / tau for x in taught])]
            q = log_softmax([x / tau for x in output])
            divergence = sum(p[i] * (math.log(p[i]) - q[i]) for i in range(len(p)))
            total += (
                alpha * tau**2 * divergence - (1 - alpha) * log_softmax(output)[truth]
            )
    assert model(batch)["loss"].item() == pytest.approx(total / 5, rel=1e-4)


def test_context_and_heads_are_equations_1_and_2() -> None:
    model, batch = student(), make_requests(6)
    history = model.encode(batch)
    states, z = history.states, model.decoder.context(history)
    readout, heads_of = model.decoder.readout, model.decoder.heads
    for row in range(6):
        real = states[
            row, : 2 + 4 * int(batch.history_length[row])
        ]  # (S, D) without padding
        query = readout.query(real.mean(0))
        heads = []
        for head in range(2):
            part = slice(12 * head, 12 * head + 12)
            q, k, v = (
                (x @ layer.weight.T)[..., part]
                for x, layer in (
                    (query, readout.attention.q),
                    (real, readout.attention.k),
                    (real, readout.attention.v),
                )
            )
            heads.append((k @ q / 12**0.5).softmax(0) @ v)
        x = readout.norm1(query + torch.cat(heads) @ readout.attention.o.weight.T)
        expected = readout.norm2(x + readout.ffn[3](readout.ffn[0](x).relu()))
        torch.testing.assert_close(z[row], expected, rtol=1e-4, atol=1e-5)
        table = build_tiger().backbone.embedding.weight
        given = torch.cat([z[row], table[1 + 4], table[7 + 2]])
        hidden = torch.nn.functional.gelu(heads_of[2][1](heads_of[2][0](given)))
        logits = logits_at(model, history, [4, 2])[row]
        torch.testing.assert_close(logits, heads_of[2][4](hidden), rtol=1e-4, atol=1e-5)


def test_options_of_recommend() -> None:
    model, batch = student(), make_requests(8)
    wide, _ = model.recommend(
        batch, 10, beam=3
    )  # K above the beam: the last digit is taken from all of its children
    assert all(
        len(set(row)) == len(row)
        for row in [[i for i in row if i >= 0] for row in wide.tolist()]
    )
    assert (wide[:, :3] >= 0).all()
    same = (
        model.recommend(batch, 10, beam=30)[1],
        model.recommend(batch, 10, beam=10**6)[1],
    )
    assert torch.equal(*same)  # a beam above the catalogue keeps every prefix
    with pytest.raises(ValueError, match="need to be at least 1"):
        model.recommend(batch, 0)


def test_every_ablation_of_the_paper_has_its_file() -> None:
    """Rows of Tables 1, 2, 8 and 5 (G1, G2, G3), each by what it switches."""
    found = [{"name": path.parent.name, **ablation(path)} for path in ABLATIONS]
    mlp: list[dict[str, Any]] = [
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
    layer: list[dict[str, Any]] = [
        {"m": 1},
        {"m": 2},
        {"m": 3},
        {"alpha": 0.0},
        {"self_attention": False},
        {"cross_attention": False},
        {"self_attention": False, "cross_attention": False},
    ]
    rows = [{"name": "sid_mlp", **row} for row in mlp] + [
        {"name": "one_layer", **row} for row in layer
    ]
    assert all(row in found for row in rows)
    assert len(found) == len(rows)


def test_ablations_are_read_after_the_base() -> None:
    rest = ["--tables", "t", "--storage", "s", "--name", "n"]
    for name in ("sid_mlp", "one_layer"):
        base = ["--config", str(CONFIGS / f"{name}.yaml")]
        cut = parse(Config, [*base, *rest])
        fit = cut.fit
        assert (fit.lr, fit.weight_decay, fit.batch_size, fit.max_epochs) == (
            5e-5,
            1e-4,
            512,
            200,
        )
        for path in ABLATIONS:
            if path.parent.name == name:
                whole = parse(Config, [*base, "--config", str(path), *rest])
                changed = {
                    key: value
                    for key, value in vars(whole.model).items()
                    if getattr(cut.model, key) != value
                }
                assert changed == ablation(path)
                assert whole.fit == fit
    with pytest.raises(UserError, match="no model is named"):
        parse(
            Config, ["--config", str(ABLATIONS[0]), *rest]
        )  # alone it would train with other settings than the paper's


def logits_of(model: Student, prefix: list[int], seed: int = 1) -> Tensor:
    return logits_at(model, model.encode(make_requests(2, seed=seed)), prefix)


def test_ablations_cut_what_they_name() -> None:
    def depends(model: Student, ours: list[int], others: list[int]) -> bool:
        return not torch.allclose(
            logits_of(model, ours), logits_of(model, others), atol=1e-6
        )

    for options in (
        {},
        {"prefix": "sum"},
        {"prefix": "cascade"},
        {"readout": "per_digit"},
        {"name": "one_layer"},
    ):
        assert depends(student(**options), [1, 2], [0, 2])
        assert depends(student(**options), [1, 2], [1, 3])
    no_prefix = student(prefix="none")
    assert not depends(no_prefix, [1, 2], [0, 3])
    newest_only = student("one_layer", self_attention=False)
    assert not depends(newest_only, [1, 2], [0, 2])
    assert depends(newest_only, [1, 2], [1, 3])
    blind = student("one_layer", cross_attention=False)
    assert torch.allclose(
        logits_of(blind, [1, 2], seed=1), logits_of(blind, [1, 2], seed=2)
    )
    seeing = student("one_layer")
    assert not torch.allclose(
        logits_of(seeing, [1, 2], seed=1), logits_of(seeing, [1, 2], seed=2)
    )
