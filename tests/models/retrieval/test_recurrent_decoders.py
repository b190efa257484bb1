"""Gated DeltaNet and Mamba2 as decoders: training form against search, search against
every item, padding, learning.
"""

from __future__ import annotations

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


def student(name: str, **options: Any) -> Student:
    """Of `build_tiger()`, its weights random and its log-probabilities far from uniform."""
    torch.manual_seed(1)
    model: Any = build_model(
        {"name": name, "teacher_model": TEACHER, **SMALL[name], **options},
        build_catalogue(),
    )
    model.set_teacher(build_tiger())
    for part, parameter in model.named_parameters():
        if "heads" in part:
            torch.nn.init.normal_(parameter.data)
    return model.eval()


def exact(name: str, **options: Any) -> tuple[RecurrentDecoder, History, Tensor]:
    """A decoder in float64, states of ragged histories and codes of targets."""
    model, batch = student(name, **options), make_requests(5)
    history = model.encode(batch)
    decoder: Any = model.decoder
    decoder._embedding[0].double()
    return (
        decoder.double(),
        History(history.states.double(), history.lengths),
        build_catalogue().sids[batch.target],
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_states_by_steps_are_those_of_the_whole_row(name: str, chunk: int) -> None:
    """To 1e-10, in float64: the history once, then the prefix by steps, against all of
    it in chunks.
    """
    decoder, history, codes = exact(name, chunk=chunk)
    with torch.no_grad():
        prefix = decoder.embed(decoder.tokens.shift_right(codes)[:, 1:])
        expected, after = decoder.read(history, prefix)
        x, states = decoder.read(history, prefix[:, :0])
        torch.testing.assert_close(x[:, 0], expected[:, 0], rtol=0, atol=1e-10)
        for at in range(prefix.shape[1]):
            x = decoder.enter(prefix[:, at])
            for i, block in enumerate(decoder.blocks):
                x, states[i] = block.step(x, states[i], True)
            torch.testing.assert_close(
                decoder.norm(x), expected[:, at + 1], rtol=0, atol=1e-10
            )
    for state, whole in zip(states, after, strict=True):
        torch.testing.assert_close(state.memory, whole.memory, rtol=0, atol=1e-10)
        torch.testing.assert_close(state.window, whole.window, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_never_read(name: str) -> None:
    """Other numbers there, more of it, and none of it: the same states and logits."""
    decoder, history, codes = exact(name)
    padded = torch.arange(history.states.shape[1]) >= history.lengths.unsqueeze(1)
    assert padded.any()
    other = history.states.masked_fill(padded.unsqueeze(-1), 7.0)
    longer = torch.cat([other, torch.full_like(other, -3.0)], 1)
    with torch.no_grad():
        expected, (*_, after) = decoder.read(history, decoder.embed(codes[:, :3]))
        for states in (other, longer):
            found, (*_, state) = decoder.read(
                History(states, history.lengths), decoder.embed(codes[:, :3])
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(state.memory, after.memory, rtol=0, atol=1e-10)
        for row, length in enumerate(history.lengths.tolist()):
            alone = History(
                history.states[row : row + 1, :length], history.lengths[row : row + 1]
            )
            found, _ = decoder.read(alone, decoder.embed(codes[row : row + 1, :3]))
            torch.testing.assert_close(found[0], expected[row], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_history_is_read_once_for_all_beams(name: str) -> None:
    model, batch = student(name), make_requests(3)
    read = []
    for block in model.decoder.blocks:  # type: ignore[union-attr]
        block.mixer.register_forward_pre_hook(
            lambda module, given: read.append(tuple(given[0].shape[:2]))
        )
    model.recommend(batch, 5, beam=9)
    assert (
        read == [(3, 2 + 4 * int(batch.history_length.max()) + 1)] * 2
    )  # users, not beams


@pytest.mark.parametrize("name", NAMES)
def test_logits_depend_on_the_whole_prefix_and_on_the_whole_history(name: str) -> None:
    decoder, history, _ = exact(name)

    def last(codes: list[int], states: Tensor = history.states) -> Tensor:
        given = torch.tensor([*codes, 0]).expand(5, -1)
        with torch.no_grad():
            return decoder.teacher_forced(History(states, history.lengths), given)[3]

    reference = last([1, 2, 0])
    assert all(
        not torch.allclose(reference, last(other))
        for other in ([0, 2, 0], [1, 3, 0], [1, 2, 1])
    )
    moved = history.states.clone()
    moved[:, 0] += 1  # the oldest position
    assert ((last([1, 2, 0], moved) - reference).abs().amax(-1) > 1e-9).all()


@pytest.mark.parametrize("name", NAMES)
def test_it_has_about_as_many_parameters_as_the_teachers_decoder(name: str) -> None:
    codes = torch.tensor([[0, 0, 0, 0], [255, 1, 2, 3]])
    model = build_model({"name": name}, Catalogue.from_codes(codes, (256,) * 4))
    teacher = Tiger(TigerConfig(), Catalogue.from_codes(codes, (256,) * 4))
    own, its = (
        sum(p.numel() for p in part.decoder.parameters()) for part in (model, teacher)
    )
    assert own == pytest.approx(its, rel=0.06)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_trained_and_swept_as_sid_mlp_is(name: str) -> None:
    rest = ["--tables", "t", "--storage", "s", "--name", "n"]
    files = [str(ROOT / f"jobs/configs/{n}.yaml") for n in (name, "sid_mlp")]
    own, sid_mlp = (parse(Config, ["--config", file, *rest]) for file in files)
    assert own.fit == sid_mlp.fit
    assert own.model == registry.find(name).config_class()  # the file has the defaults
    grid, theirs = (
        yaml.safe_load((ROOT / f"tuning/grids/{n}.yaml").read_text())
        for n in (name, "sid_mlp")
    )
    shared = ("fit.lr", "model.dropout", "fit.weight_decay", "model.alpha")
    assert grid["axes"] == {axis: theirs["axes"][axis] for axis in shared}
    assert load_grid(str(ROOT / f"tuning/grids/{name}.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_requests_whose_states_are_many_are_searched_in_pieces(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = student(name), make_requests(7)
    states = []
    whole = model.recommend(batch, 5, beam=4)
    step = RecurrentScorer.step

    def watched(self: RecurrentScorer, parents: Tensor, tokens: Tensor) -> Tensor:
        found = step(self, parents, tokens)
        states.append(sum(part.nbytes for state in self.states for part in state))
        return found

    monkeypatch.setattr(RecurrentScorer, "step", watched)
    monkeypatch.setattr(retriever, "MAX_BEAM_BYTES", 3 * 4 * model.decoder.beam_bytes)
    items, scores = model.recommend(batch, 5, beam=4)
    assert items.tolist() == whole[0].tolist()
    torch.testing.assert_close(scores, whole[1])
    assert (
        max(states) == 3 * 4 * model.decoder.beam_bytes
    )  # 3 requests of 4 beams at once
    none = batch.select("B", slice(0))
    assert model.recommend(none, 5)[0].shape == (0, 5)
