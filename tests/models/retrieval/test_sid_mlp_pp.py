"""SID-MLP++: the encoder is equation 4 token by token, stage 1 learns states, stage 2
leaves the encoder alone.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.build import load_model, parse_options
from models.dataset.encoding import PAD
from models.retrieval.backbones.mlp import EncoderSizes, MlpBackbone
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.students.sid_mlp_pp import (
    SidMlpPp,
    SidMlpPpConfig,
    SidMlpPpEncoder,
    SidMlpPpEncoderConfig,
)
from models.retrieval.tiger import Tiger, TigerConfig
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import TableVersion, UserError
from models.training.fit import FitConfig
from pipelines.evaluation.inference import infer_all
from pipelines.evaluation.ranking import evaluate
from tests.fixtures.small_retrieval import make_requests_with_lengths
from tests.models.retrieval.conftest import TrainedTiger

CONFIGS = Path(__file__).parents[3] / "jobs" / "configs"
ITEMS = 24
TIGER = {
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "n_user_tokens": 3,
    "max_history": 7,
    "dropout": 0.0,
}
SIZES = {"encoder_layers": 2, "encoder_width": 32}
HEADS = {"attention_heads": 2, "attention_width": 16, "ffn_width": 32, "head_width": 32}
requests = partial(make_requests_with_lengths, items=ITEMS)


@cache
def catalogue(levels: int = 3) -> Catalogue:
    sizes = (24,) if levels == 1 else (8,) * levels
    generator = torch.Generator().manual_seed(levels)
    codes = torch.stack(
        [torch.randint(0, size, (40 * ITEMS,), generator=generator) for size in sizes],
        1,
    ).unique(dim=0)
    return Catalogue.from_codes(
        codes[torch.randperm(len(codes), generator=generator)[:ITEMS]], sizes
    )


def token_by_token(encoder: MlpBackbone, batch: HistoryBatch, row: int) -> Tensor:
    """(real tokens, D): equation 4 for one request, one token after the other."""
    levels, own = (
        encoder.tokens.levels,
        batch.select("B", slice(row, row + 1)),
    )
    tokens, count = encoder.tokens.history(own), int(encoder.tokens.lengths(own))
    states = [
        encoder.embedding.weight[tokens[0, at]] + encoder.positions.weight[at]
        for at in range(count)
    ]
    for layer in encoder.layers:
        mean = sum(states) / count
        updated = []
        for at, state in enumerate(states):
            role = levels - 1 if at in (0, count - 1) else (at - 1) % levels
            mlp = layer[0 if encoder.shared else role]
            hidden = mlp.norm(mlp.inner(torch.cat([state, mean])))
            updated.append(state + mlp.outer(torch.nn.functional.gelu(hidden)))
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
def test_the_encoder_is_equation_4_for_every_token(
    packed, training, levels, lengths, layers, shared, seed
):
    torch.manual_seed(seed)
    source = Tiger(TigerConfig(**TIGER), catalogue(levels)).double()
    encoder = (
        MlpBackbone(source.backbone, EncoderSizes(layers, 20, shared_mlp=shared))
        .double()
        .eval()
    )
    batch = requests(lengths, seed)
    with torch.set_grad_enabled(training):
        states, padding = encoded(encoder, batch, packed)
    assert states.shape == (len(lengths), 2 + levels * max(lengths), 16)
    for row, length in enumerate(lengths):
        count = 2 + levels * length
        torch.testing.assert_close(
            states[row, :count], token_by_token(encoder, batch, row)
        )
        assert not states[row, count:].any()
        assert padding is None or padding[row, 0, 0].isinf().tolist() == [
            at >= count for at in range(states.shape[1])
        ]
    assert (padding is None) == (min(lengths) == max(lengths))


def test_packed_and_padded_have_one_gradient():
    source = Tiger(TigerConfig(**TIGER), catalogue()).double().requires_grad_(False)
    encoder = MlpBackbone(source.backbone, EncoderSizes(2, 20)).double()
    encoder.eval()
    batch = requests([2, 7, 1, 4])
    weights = torch.randn(4, 23, 16, dtype=torch.float64)
    gradients = [
        torch.autograd.grad(
            (encoded(encoder, batch, packed)[0] * weights).sum(), trained_of(encoder)
        )
        for packed in (True, False)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("packed", [True, False])
def test_padding_changes_nothing(packed):
    """Neither what stands at padded places nor how many there are; and no row sees
    another.
    """
    source = Tiger(TigerConfig(**TIGER), catalogue()).eval()
    encoder = MlpBackbone(source.backbone, EncoderSizes(2, 20)).eval()
    batch = requests([2, 5, 1])
    states, _ = encoded(encoder, batch, packed)
    filled = torch.where(batch.history == PAD, torch.arange(5) % ITEMS, batch.history)
    torch.testing.assert_close(
        encoded(encoder, replace(batch, history=filled), packed)[0],
        states,
        rtol=0,
        atol=0,
    )
    wider = torch.cat([batch.history, torch.full((3, 2), PAD)], 1)
    more, padding = encoded(encoder, replace(batch, history=wider), packed)
    torch.testing.assert_close(more[:, :17], states)
    assert not more[:, 17:].any()
    assert padding[:, :, :, 17:].isinf().all()
    for row, length in enumerate([2, 5, 1]):
        alone = batch.select("B", slice(row, row + 1))
        alone = replace(alone, history=alone.history[:, :length])
        torch.testing.assert_close(
            encoded(encoder, alone, packed)[0], states[row : row + 1, : 2 + 3 * length]
        )


def trained_of(encoder: MlpBackbone) -> list[Tensor]:
    return [parameter for parameter in encoder.parameters() if parameter.requires_grad]


def encoded(
    encoder: MlpBackbone, batch: HistoryBatch, packed: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """States and padding mask, with nothing done for padding or with it."""
    encoder.pack = packed
    history = encoder.encode(batch)
    return history.states, history.padding


def stage_1(**change: object) -> tuple[SidMlpPpEncoder, Tiger]:
    torch.manual_seed(0)
    model = SidMlpPpEncoder(
        SidMlpPpEncoderConfig(**{**SIZES, "teacher_model": TIGER, **change}),
        catalogue(),
    )
    teacher = Tiger(TigerConfig(**TIGER), catalogue()).requires_grad_(False).eval()
    model.set_teacher(teacher)
    return model.eval(), teacher


def test_stage_1_measures_the_error_over_real_tokens_however_the_rows_are_batched():
    model, teacher = stage_1()
    batch = requests([2, 7, 1, 4, 4])
    states, targets = model.backbone.encode(batch).states, teacher.encode(batch).states
    real = torch.arange(states.shape[1]) < teacher.tokens.lengths(batch)[:, None]
    mse = (states - targets)[real].square().mean().item()
    variance = (targets[real] - targets[real].mean(0)).square().mean().item()
    assert model(batch)["loss"].item() == pytest.approx(mse, rel=1e-5)
    parts = [model.measure(batch.select("B", rows)) for rows in ([0, 3], [1], [2, 4])]
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    means = model.metric_means(total)
    assert means["mse"] == pytest.approx(mse, rel=1e-5)
    assert means["neg_mse"] == -means["mse"]
    assert means["r2"] == pytest.approx(1 - mse / variance, rel=1e-5)
    assert total["examples"].item() == 5
    assert total["tokens"].item() == real.sum().item()


def test_stage_1_needs_its_teacher_to_train_and_keeps_it_out_of_its_weights():
    model = SidMlpPpEncoder(
        SidMlpPpEncoderConfig(**SIZES, teacher_model=TIGER), catalogue()
    )
    with pytest.raises(UserError, match=r"model\.teacher is not set"):
        model(requests([1, 2]))
    names = set(model.state_dict())
    stage_1()[0].load_state_dict(model.state_dict())
    parts = {name.split(".")[1] for name in names if name.startswith("backbone.")}
    assert parts == {"embedding", "positions", "layers", "norm"}
    assert all(name.startswith("backbone.") for name in names)


def stage_2(**change: object) -> tuple[SidMlpPp, Tiger]:
    torch.manual_seed(0)
    model = SidMlpPp(
        SidMlpPpConfig(**{**SIZES, **HEADS, "teacher_model": TIGER, **change}),
        catalogue(),
    )
    teacher = Tiger(TigerConfig(**TIGER), catalogue()).requires_grad_(False).eval()
    model.set_teacher(teacher)
    return model, teacher


def test_stage_2_learns_from_the_teachers_own_states():
    """Its KL is 0 exactly where its logits are those that the whole teacher gives."""
    model, teacher = stage_2(alpha=1.0)
    batch = requests([3, 5, 1, 2])
    codes = catalogue().sids[batch.target]
    logits = teacher.decoder.teacher_forced(teacher.encode(batch), codes)
    model.eval()
    history = model.encode(batch)
    learned = model.teacher_logits(batch, history)
    student = model.decoder.teacher_forced(history, codes)
    expected = torch.zeros(())
    for level in range(3):
        cut = logits[level].narrow(-1, model.tokens.first[level], 8)
        torch.testing.assert_close(learned[level], cut)
        soft, log_q = cut.softmax(-1), student[level].log_softmax(-1)
        expected = expected + (soft * (soft.log() - log_q)).sum(-1).mean()
    torch.testing.assert_close(model(batch)["loss"], expected)


@pytest.fixture(scope="module")
def trained(trained_tiger: TrainedTiger) -> SimpleNamespace:
    """Both stages, trained from the teacher for a few epochs."""
    root = trained_tiger.root / "pp"
    one = {"name": "sid_mlp_pp_encoder", "teacher": str(trained_tiger.folder), **SIZES}
    _, events = trained_tiger.train(one, root / "encoder", 10, "neg_mse")
    two = {"name": "sid_mlp_pp", "encoder": str(root / "encoder"), "beam": 24, **HEADS}
    trained_tiger.train(two, root / "student", 10)
    return SimpleNamespace(
        root=root,
        tables=trained_tiger.tables,
        sids=trained_tiger.sids,
        catalogue=trained_tiger.catalogue,
        teacher=trained_tiger.folder,
        encoder=root / "encoder",
        student=root / "student",
        events_1=events,
    )


def test_stage_1_reduces_the_error_and_is_selected_by_it(trained):
    errors = [event.metrics["mse"] for event in trained.events_1]
    assert errors[-1] < 0.5 * errors[0]
    assert trained.events_1[-1].metrics["r2"] > 0.5
    best = checkpoint.read(trained.encoder / "best")
    assert best.metrics["mse"] == min(errors)


def test_stage_2_takes_the_encoder_as_it_is_and_ranks_better_than_chance(trained):
    one, _ = load_model(
        trained.encoder / "best", trained.catalogue, "sid_mlp_pp_encoder"
    )
    two, about = load_model(trained.student / "best", trained.catalogue, "sid_mlp_pp")
    kept = one.backbone.state_dict()
    assert all(
        torch.equal(value, kept[name])
        for name, value in two.backbone.state_dict().items()
    )
    assert about.model["encoder_width"] == 32
    assert about.metrics["recall@5"] > 2 * 5 / ITEMS


def test_stage_1_is_evaluated_by_its_error_while_its_teacher_is_there_and_recommends_nothing(
    trained,
):
    options = {"split": "test", "batch_size": 64}
    result, _ = evaluate(
        str(trained.encoder / "best"), Inputs(trained.tables, trained.sids), **options
    )
    assert set(result.metrics) == {"mse", "neg_mse", "r2"}
    assert result.metrics["r2"] > 0.5
    moved = trained.teacher.rename(trained.teacher.with_name("gone"))
    try:
        with pytest.raises(
            UserError,
            match=r"the teacher .* is neither a checkpoint nor a finished run",
        ):
            evaluate(
                str(trained.encoder / "best"),
                Inputs(trained.tables, trained.sids),
                **options,
            )
    finally:
        moved.rename(trained.teacher)
    with pytest.raises(
        UserError, match="'sid_mlp_pp_encoder' is not served: it ranks nothing"
    ):
        infer_all(
            str(trained.encoder / "best"),
            Inputs(trained.tables, trained.sids),
            str(trained.root / "top"),
        )


def test_recommending_needs_neither_teacher_nor_stage_1(trained, tmp_path):
    alone = tmp_path / "student"
    shutil.copytree(trained.student / "best", alone)
    batch = requests([3, 9, 1, 5], items=ITEMS)
    before, _ = load_model(trained.student / "best", trained.catalogue)
    items, scores = before.recommend(batch, 10)
    moved = trained.root.rename(trained.root.with_name("moved"))
    try:
        model, about = load_model(alone, trained.catalogue, "sid_mlp_pp")
        again, more = model.recommend(batch, 10)
        assert not Path(about.model["encoder"]).exists()
    finally:
        moved.rename(trained.root)
    assert again.tolist() == items.tolist()
    assert torch.equal(more, scores)


def test_resolving_fills_in_sizes_and_hashes_once(trained):
    config = SidMlpPpConfig(encoder=str(trained.encoder), encoder_layers=7)
    found = SidMlpPp.resolve_config(config, trained.catalogue)
    assert (found.encoder_layers, found.encoder_width) == (2, 32)
    assert found.encoder == str(trained.encoder / "best")
    assert found.teacher == str(trained.teacher / "best")
    assert found.teacher_model["d_model"] == 16
    assert SidMlpPp.resolve_config(found, trained.catalogue) == found
    ends = SidMlpPp.resolve_config(
        SidMlpPpConfig(teacher=str(trained.teacher), end_to_end=True), trained.catalogue
    )
    assert (ends.encoder, ends.encoder_layers, ends.teacher_hash) == (
        "",
        4,
        found.teacher_hash,
    )


def test_another_teacher_encoder_or_table_is_named(trained, tmp_path):
    def resolve(**change: str) -> None:
        SidMlpPp.resolve_config(SidMlpPpConfig(**change), trained.catalogue)

    with pytest.raises(
        UserError, match=r"model\.encoder is not set.*sid_mlp_pp_encoder\.yaml"
    ):
        resolve(teacher=str(trained.teacher))
    with pytest.raises(
        UserError,
        match="the encoder /nowhere is neither a checkpoint nor a finished run",
    ):
        resolve(encoder="/nowhere")
    with pytest.raises(
        UserError, match="of the model 'tiger', not of 'sid_mlp_pp_encoder'"
    ):
        resolve(encoder=str(trained.teacher))
    with pytest.raises(UserError, match="is not the one that this run started with"):
        resolve(encoder=str(trained.encoder), encoder_hash="0" * 64)
    tiger, about = load_model(trained.teacher / "best", trained.catalogue)
    tiger.backbone.embedding.weight.data += 1.0
    checkpoint.save(tmp_path / "other", tiger, about)
    with pytest.raises(
        UserError,
        match=r"matches another teacher.*leave model\.teacher out, or train stage 1",
    ):
        resolve(encoder=str(trained.encoder), teacher=str(tmp_path / "other"))
    elsewhere = replace(
        trained.catalogue,
        versions={**trained.catalogue.versions, "sids": TableVersion("f" * 64)},
    )
    with pytest.raises(UserError, match="another table 'sids'"):
        SidMlpPp.resolve_config(SidMlpPpConfig(encoder=str(trained.encoder)), elsewhere)


@pytest.mark.parametrize(
    ("base", "ablation", "field"),
    [
        ("sid_mlp_pp_encoder", "shared_mlp", "shared_mlp"),
        ("sid_mlp_pp", "end_to_end", "end_to_end"),
    ],
)
def test_the_shown_configs_are_the_papers(base, ablation, field):
    content = yaml.safe_load((CONFIGS / f"{base}.yaml").read_text())
    _, config = parse_options(content["model"])
    assert (config.encoder_layers, config.encoder_width, config.encoder_dropout) == (
        4,
        2048,
        0.1,
    )
    assert not getattr(config, field)
    assert FitConfig(**content["fit"]).metric == (
        "neg_mse" if base == "sid_mlp_pp_encoder" else "ndcg@10"
    )
    change = yaml.safe_load((CONFIGS / "sid_mlp_pp" / f"{ablation}.yaml").read_text())
    _, changed = parse_options({**content["model"], **change["model"]})
    assert getattr(changed, field)
