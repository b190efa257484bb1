"""Gated DeltaNet and Mamba2 as decoders: steps, padding, cost and configs."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from jobs.options import parse
from jobs.train import Config
from models import registry
from models.build import build_model
from models.retrieval import retriever
from models.retrieval.data import Catalogue
from models.retrieval.distillation.student import Student
from models.retrieval.parts import History
from models.retrieval.students.recurrent import RecurrentDecoder, RecurrentScorer
from models.retrieval.tiger import Tiger, TigerConfig
from tests.fixtures.small_retrieval import (
    TEACHER,
    build_catalogue,
    build_tiger,
    make_requests,
)
from tuning.grid import load_grid

ROOT = Path(__file__).parents[3]
SMALL: dict[str, dict[str, Any]] = {
    "gdn": {"num_layers": 2, "heads": 2, "head_width": 6, "ffn_width": 24, "chunk": 8},
    "mamba2": {"num_layers": 2, "width": 24, "head_width": 12, "state": 10, "chunk": 8},
}
NAMES = sorted(SMALL)
EXACT = {"rtol": 0.0, "atol": 1e-10}


def build_student(name: str, **options: Any) -> Student:
    """Return a student of `build_tiger()` with random weights.

    Its log-probabilities are far from uniform.
    """
    torch.manual_seed(1)
    options = {"name": name, "teacher_model": TEACHER, **SMALL[name], **options}
    model: Any = build_model(options, build_catalogue())
    model.set_teacher(build_tiger())
    for key, parameter in model.named_parameters():
        if "heads" in key:
            torch.nn.init.normal_(parameter.data)
    return model.eval()


def build_double(name: str, **options: Any) -> tuple[RecurrentDecoder, History, Tensor]:
    """Return a decoder in float64, states of ragged histories and codes of targets."""
    model, batch = build_student(name, **options), make_requests(5)
    history = model.encode(batch)
    double_history = History(history.states.double(), history.lengths)
    decoder: Any = model.decoder
    decoder._embedding[0].double()
    return decoder.double(), double_history, build_catalogue().sids[batch.target]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 5, 64])
@torch.no_grad()
def test_steps_after_the_history_equal_the_whole_row_in_chunks(
    name: str, chunk: int
) -> None:
    decoder, history, codes = build_double(name, chunk=chunk)
    prefix = decoder.embed(decoder.tokens.shift_right(codes)[:, 1:])
    expected, expected_states = decoder.read(history, prefix)

    outputs, states = decoder.read(history, prefix[:, :0])

    torch.testing.assert_close(outputs[:, 0], expected[:, 0], **EXACT)
    for position in range(prefix.shape[1]):
        x = decoder.enter(prefix[:, position])
        for layer, block in enumerate(decoder.blocks):
            x, states[layer] = block.step(x, states[layer], True)
        torch.testing.assert_close(decoder.norm(x), expected[:, position + 1], **EXACT)
    for state, expected_state in zip(states, expected_states, strict=True):
        torch.testing.assert_close(state.memory, expected_state.memory, **EXACT)
        torch.testing.assert_close(state.window, expected_state.window, **EXACT)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_values_and_width_of_padding_change_nothing(name: str) -> None:
    decoder, history, codes = build_double(name)
    prefix = decoder.embed(codes[:, :3])
    positions = torch.arange(history.states.shape[1])
    is_padding = positions >= history.lengths.unsqueeze(1)
    assert is_padding.any()
    expected, (*_, expected_state) = decoder.read(history, prefix)

    filled = history.states.masked_fill(is_padding.unsqueeze(-1), 7.0)
    wider = torch.cat([filled, torch.full_like(filled, -3.0)], 1)
    for states in (filled, wider):
        padded = History(states, history.lengths)
        outputs, (*_, state) = decoder.read(padded, prefix)
        torch.testing.assert_close(outputs, expected, **EXACT)
        torch.testing.assert_close(state.memory, expected_state.memory, **EXACT)
    for row, length in enumerate(history.lengths.tolist()):
        request = history.rows(row, row + 1)
        unpadded = History(request.states[:, :length], request.lengths)
        outputs, _ = decoder.read(unpadded, prefix[row : row + 1])
        torch.testing.assert_close(outputs[0], expected[row], **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_a_history_is_read_once_per_request_and_not_per_beam(name: str) -> None:
    model, batch = build_student(name), make_requests(3)
    blocks: Any = model.decoder.blocks
    shapes = []
    for block in blocks:
        block.mixer.register_forward_pre_hook(
            lambda module, inputs: shapes.append(tuple(inputs[0].shape[:2]))
        )

    model.recommend(batch, 5, beam=9)

    length = 2 + 4 * int(batch.history_length.max()) + 1
    assert shapes == [(3, length)] * 2


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_depend_on_the_whole_prefix_and_on_the_whole_history(name: str) -> None:
    decoder, history, _ = build_double(name)

    def last_logits(prefix: list[int], states: Tensor) -> Tensor:
        codes = torch.tensor([*prefix, 0]).expand(5, -1)
        return decoder.teacher_forced(History(states, history.lengths), codes)[3]

    reference = last_logits([1, 2, 0], history.states)
    for prefix in ([0, 2, 0], [1, 3, 0], [1, 2, 1]):
        assert not torch.allclose(reference, last_logits(prefix, history.states))
    changed = history.states.clone()
    changed[:, 0] += 1  # the oldest position
    difference = (last_logits([1, 2, 0], changed) - reference).abs()
    assert (difference.amax(-1) > 1e-9).all()


@pytest.mark.parametrize("name", NAMES)
def test_it_has_about_as_many_parameters_as_the_teachers_decoder(name: str) -> None:
    codes = torch.tensor([[0, 0, 0, 0], [255, 1, 2, 3]])
    catalogue = Catalogue.from_codes(codes, (256,) * 4)
    student: Any = build_model({"name": name}, catalogue)
    teacher = Tiger(TigerConfig(), catalogue)
    student_size, teacher_size = (
        sum(p.numel() for p in model.decoder.parameters())
        for model in (student, teacher)
    )
    assert student_size == pytest.approx(teacher_size, rel=0.06)


def parse_config(name: str) -> Config:
    """Return the options of `jobs.train` from a model's config file."""
    path = ROOT / f"jobs/configs/{name}.yaml"
    rest = ["--tables", "t", "--storage", "s", "--name", "n"]
    return parse(Config, ["--config", str(path), *rest])


@pytest.mark.parametrize("name", NAMES)
def test_its_config_trains_as_sid_mlp_with_the_models_defaults(name: str) -> None:
    config = parse_config(name)
    assert config.fit == parse_config("sid_mlp").fit
    assert config.model == registry.find(name).config_class()


@pytest.mark.parametrize("name", NAMES)
def test_its_grid_has_axes_of_the_grid_of_sid_mlp(name: str) -> None:
    path, sid_mlp_path = (
        ROOT / f"tuning/grids/{model}.yaml" for model in (name, "sid_mlp")
    )
    axes = yaml.safe_load(path.read_text())["axes"]
    sid_mlp_axes = yaml.safe_load(sid_mlp_path.read_text())["axes"]
    shared = ("fit.lr", "model.dropout", "fit.weight_decay", "model.alpha")
    assert axes == {axis: sid_mlp_axes[axis] for axis in shared}
    assert load_grid(str(path))


@pytest.mark.parametrize("name", NAMES)
def test_requests_with_large_beam_states_are_searched_in_parts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = build_student(name), make_requests(7)
    expected_items, expected_scores = model.recommend(batch, 5, beam=4)
    beam_bytes = 3 * 4 * model.decoder.beam_bytes  # 3 requests of 4 beams
    state_bytes = []
    step = RecurrentScorer.step

    def record_step(self: RecurrentScorer, parents: Tensor, tokens: Tensor) -> Tensor:
        log_probs = step(self, parents, tokens)
        parts = chain.from_iterable(self.states)
        state_bytes.append(sum(part.nbytes for part in parts))
        return log_probs

    monkeypatch.setattr(RecurrentScorer, "step", record_step)
    monkeypatch.setattr(retriever, "MAX_BEAM_BYTES", beam_bytes)
    items, scores = model.recommend(batch, 5, beam=4)

    assert items.tolist() == expected_items.tolist()
    torch.testing.assert_close(scores, expected_scores)
    assert max(state_bytes) == beam_bytes
    empty = batch.select("B", slice(0))
    assert model.recommend(empty, 5)[0].shape == (0, 5)
