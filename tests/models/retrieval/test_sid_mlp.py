"""SID-MLP: its equations written out, options of its search, and its ablations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.retrieval.distillation.student import Student
from models.retrieval.retriever import History
from tests.fixtures.small_retrieval import (
    FIRST,
    SIZES,
    build_catalogue,
    build_taught,
    build_tiger,
    make_requests,
    select_row,
)

SMALL = {"attention_heads": 2, "attention_width": 24, "ffn_width": 32, "head_width": 20}


def build_student(**options: Any) -> Student:
    """Return a SID-MLP whose log-probabilities are far from uniform."""
    return build_taught("sid_mlp", spread=0.5, **SMALL, **options)


def compute_logits(model: Student, history: History, prefix: list[int]) -> Tensor:
    """Return the logits (B, O_l) of the code after a prefix that all rows share."""
    codes = torch.tensor([*prefix, *[0] * (4 - len(prefix))])
    codes = codes.expand(len(history.lengths), -1)
    level = len(prefix) - model.decoder.first_level
    return model.decoder.teacher_forced(history, codes)[level]


def log_softmax(values: list[float]) -> list[float]:
    """Return log-probabilities, without PyTorch."""
    total = math.log(sum(math.exp(value) for value in values))
    return [value - total for value in values]


@pytest.mark.parametrize(
    ("alpha", "tau"), [(0.7, 1.0), (0.3, 2.5), (1.0, 0.5), (0.0, 1.0)]
)
@pytest.mark.parametrize("logits", ["codebook", "vocabulary"])
def test_the_loss_is_equation_3(alpha, tau, logits):
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


def test_the_context_is_equation_1():
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


def test_the_heads_are_equation_2():
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
