"""SID-MLP++: equation 4 token by token, stage 1 on states, stage 2 on the encoder."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from core.errors import UserError
from models.loaded_model import load_model
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.sid_mlp.mlp_encoder import EncoderSizes, MlpBackbone, RoleTokens
from models.retrieval.sid_mlp.sid_mlp_pp import (
    SidMlpPp,
    SidMlpPpConfig,
)
from models.retrieval.tiger.tiger import Tiger, TigerConfig
from models.training import checkpoint
from pipelines.evaluation.config import EvaluateConfig
from pipelines.evaluation.ranking import evaluate
from tests.fixtures.small_retrieval import (
    build_catalogue,
    build_taught,
    build_tiger,
    make_requests_with_lengths,
)
from tests.fixtures.trainings import CASES
from tests.models.retrieval.conftest import ENCODER

STAGE_2 = {"name": "sid_mlp_pp", "teacher": ""}
TIGER = {**CASES["tiger"], "max_history": 7}


def encode(
    encoder: MlpBackbone, batch: HistoryBatch, packed: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return states and padding mask; with `packed`, padding is not computed."""
    from_batch = RoleTokens.from_batch
    with pytest.MonkeyPatch.context() as patch:
        if packed is not None:
            patch.setattr(
                RoleTokens,
                "from_batch",
                lambda batch, vocabulary, _: from_batch(batch, vocabulary, packed),
            )
        history = encoder.encode(batch)
    return history.states, history.padding


def encode_token_by_token(encoder: MlpBackbone, batch: HistoryBatch) -> Tensor:
    """Return the states (S, D) of the real tokens of one request, by equation 4."""
    levels = encoder.tokens.levels
    count = int(encoder.tokens.lengths(batch))
    tokens = encoder.tokens.history(batch)[0, :count].tolist()
    states = []
    for position, token in enumerate(tokens):
        embedding = encoder.embedding.weight[token]
        states.append(embedding + encoder.positions.weight[position])
    for layer in encoder.layers:
        mean = sum(states) / count
        updated = []
        for position, state in enumerate(states):
            # user and end share the MLP of the last level
            is_code = 0 < position < count - 1
            role = (position - 1) % levels if is_code else levels - 1
            mlp = layer[0 if encoder.shared else role]
            hidden = mlp.norm(mlp.inner(torch.cat([state, mean])))
            updated.append(state + mlp.outer(functional.gelu(hidden)))
        states = updated
    return torch.stack([encoder.norm(state) for state in states])


@pytest.mark.parametrize(
    ("packed", "training"), [(True, False), (True, True), (False, True)]
)
@settings(max_examples=25)
@given(
    levels=st.integers(1, 5),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    layers=st.integers(1, 3),
    shared=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_encoder_computes_equation_4_for_every_token(
    packed, training, levels, lengths, layers, shared, seed
):
    torch.manual_seed(seed)
    codes = (24,) if levels == 1 else (8,) * levels
    tiger = Tiger(TigerConfig(**TIGER), build_catalogue(24, codes)).double()
    sizes = EncoderSizes(layers, 20, shared_mlp=shared)
    encoder = MlpBackbone(tiger.backbone, sizes).double().eval()
    batch = make_requests_with_lengths(lengths, seed, items=24)

    with torch.set_grad_enabled(training):
        states, padding = encode(encoder, batch, packed)

    width = 2 + levels * max(lengths)
    assert states.shape == (len(lengths), width, 16)
    assert (padding is None) == (min(lengths) == max(lengths))
    for row, length in enumerate(lengths):
        count = 2 + levels * length
        request = batch.select("B", slice(row, row + 1))
        expected = encode_token_by_token(encoder, request)
        torch.testing.assert_close(states[row, :count], expected)
        assert not states[row, count:].any()
        if padding is not None:
            is_padding = padding[row, 0, 0].isinf().tolist()
            assert is_padding == [position >= count for position in range(width)]


def test_stage_1_measures_the_error_over_real_tokens_however_the_rows_are_batched():
    teacher = build_tiger()
    model = build_taught("sid_mlp_pp_encoder", teacher=teacher, encoder_width=32)
    batch = make_requests_with_lengths([2, 6, 1, 4, 4])
    states, targets = model.backbone.encode(batch).states, teacher.encode(batch).states
    is_real = torch.arange(states.shape[1]) < teacher.tokens.lengths(batch)[:, None]
    real_targets = targets[is_real]
    mse = (states[is_real] - real_targets).square().mean().item()
    variance = (real_targets - real_targets.mean(0)).square().mean().item()
    assert model(batch)["loss"].item() == pytest.approx(mse, rel=1e-5)

    parts = [model.measure(batch.select("B", rows)) for rows in ([0, 3], [1], [2, 4])]
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    means = model.metric_means(total)

    assert means["mse"] == pytest.approx(mse, rel=1e-5)
    assert means["neg_mse"] == -means["mse"]
    assert means["r2"] == pytest.approx(1 - mse / variance, rel=1e-5)
    assert total["examples"].item() == 5
    assert total["tokens"].item() == is_real.sum().item()


def test_stage_1_is_evaluated_by_its_error(distillation):
    path, folders = f"{distillation.stage_1}/best", distillation.inputs.folders()
    result, _ = evaluate(EvaluateConfig(checkpoint=path, **folders))
    assert set(result.metrics) == {"mse", "neg_mse", "r2"}


def test_stage_2_has_the_frozen_encoder_of_stage_1_and_loads_without_its_folder(
    distillation, tmp_path
):
    encoder = shutil.copytree(distillation.stage_1, tmp_path / "encoder")
    run = distillation.build(**STAGE_2, encoder=str(encoder))
    stage_1, _ = load_model(encoder / "best", run.catalogue)
    encoder_weights = dict(stage_1.backbone.named_parameters())
    for name, weight in run.model.backbone.named_parameters():
        assert torch.equal(weight, encoder_weights[name])
        assert not weight.requires_grad
    checkpoint.save(tmp_path / "student", run.model, run.checkpoint(epoch=1))
    shutil.rmtree(encoder)

    student, about = load_model(tmp_path / "student", run.catalogue)

    weights = run.model.state_dict()
    torch.testing.assert_close(student.state_dict(), weights, rtol=0, atol=0)
    assert about.model["encoder_width"] == ENCODER["encoder_width"]


def test_a_missing_or_wrong_encoder_is_rejected(distillation, tmp_path):
    catalogue = Catalogue.load(distillation.inputs)
    tiger, about = load_model(f"{distillation.teacher}/best", catalogue)
    tiger.backbone.embedding.weight.data += 1.0
    checkpoint.save(tmp_path / "other", tiger, about)
    teacher, encoder = distillation.teacher, distillation.stage_1
    for message, options in {
        "model.encoder is not set": {"teacher": teacher},
        "neither a checkpoint nor": {"encoder": "/nowhere"},
        "of the model 'tiger'": {"encoder": teacher},
        "is not the one": {"encoder": encoder, "encoder_hash": "0" * 64},
        "another teacher": {"encoder": encoder, "teacher": str(tmp_path / "other")},
    }.items():
        with pytest.raises(UserError, match=message):
            SidMlpPp.resolve_config(SidMlpPpConfig(**options), catalogue)
    versions = dict(catalogue.versions)
    versions["sids"] = replace(versions["sids"], hash="f" * 64)
    other_catalogue = replace(catalogue, versions=versions)
    with pytest.raises(UserError, match="another table 'sids'"):
        SidMlpPp.resolve_config(SidMlpPpConfig(encoder=encoder), other_catalogue)
