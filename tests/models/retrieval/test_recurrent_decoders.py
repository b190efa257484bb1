"""Gated DeltaNet and Mamba2 as decoders: training form against search, search against every item, padding, learning."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_retrieval import SIZES, TEACHER, catalogue, requests, tiger
from torch import Tensor

from jobs.train import parse
from models import checkpoint, registry
from models.retrieval import retriever
from models.retrieval.data import Catalogue
from models.retrieval.decoders.recurrent import RecurrentDecoder, RecurrentScorer
from models.retrieval.parts import History
from models.retrieval.student import Student
from models.retrieval.tiger import TigerConfig
from models.tables import UserError
from tuning.grid import load

ROOT = Path(__file__).parents[3]
SMALL: dict[str, dict[str, Any]] = {
    "gdn": {"num_layers": 2, "heads": 2, "head_width": 6, "ffn_width": 24, "chunk": 8},
    "mamba2": {"num_layers": 2, "width": 24, "head_width": 12, "state": 10, "chunk": 8},
}
NAMES = sorted(SMALL)


def student(name: str, **options: Any) -> Student:
    """Of `tiger()`, its weights random and its log-probabilities far from uniform."""
    torch.manual_seed(1)
    model: Any = registry.build(
        registry.config_from_dict({"name": name, "teacher_model": TEACHER, **SMALL[name], **options}), catalogue()
    )
    model.set_teacher(tiger())
    for part, parameter in model.named_parameters():
        if "heads" in part:
            torch.nn.init.normal_(parameter.data)
    return model.eval()


def exact(name: str, **options: Any) -> tuple[RecurrentDecoder, History, Tensor]:
    """A decoder in float64, states of ragged histories and codes of targets."""
    model, batch = student(name, **options), requests(5)
    history = model.encode(batch)
    decoder: Any = model.decoder
    decoder._embedding[0].double()
    return decoder.double(), History(history.states.double(), history.lengths), catalogue().sids[batch["target"]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_search_scores_what_training_does(name: str, chunk: int) -> None:
    """Beams that leave, double and change places, step by step against each whole prefix read anew."""
    decoder, history, _ = exact(name, chunk=chunk)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        scorer = decoder.scorer(history)
        found = scorer.start().unsqueeze(1)  # (B, W, C_0)
        prefixes = torch.zeros((5, 1, 0), dtype=torch.long)
        for level in range(4):
            for beam in range(found.shape[1]):
                codes = torch.nn.functional.pad(prefixes[:, beam], (0, 4 - level))
                expected = decoder.teacher_forced(history, codes)[level].log_softmax(-1)
                torch.testing.assert_close(found[:, beam], expected.float(), rtol=1e-6, atol=1e-6)
            if level == 3:
                break
            width = (4, 6, 3)[level]
            parents = torch.randint(0, found.shape[1], (5, width), generator=generator)
            tokens = torch.randint(0, SIZES[level], (5, width), generator=generator)
            kept = prefixes.gather(1, parents.unsqueeze(-1).expand(-1, -1, level))
            prefixes = torch.cat([kept, tokens.unsqueeze(-1)], -1)
            found = scorer.step(parents, tokens)


@pytest.mark.parametrize("name", NAMES)
def test_states_by_steps_are_those_of_the_whole_row(name: str) -> None:
    """To 1e-10, in float64: the history once, then the prefix by steps, against all of it in chunks."""
    decoder, history, codes = exact(name)
    with torch.no_grad():
        prefix = decoder.embedded(decoder.tokens.started(codes)[:, 1:])
        expected, after = decoder.read(history, prefix)
        x, states = decoder.read(history, prefix[:, :0])
        torch.testing.assert_close(x[:, 0], expected[:, 0], rtol=0, atol=1e-10)
        for at in range(prefix.shape[1]):
            x = decoder.enter(prefix[:, at])
            for i, block in enumerate(decoder.blocks):
                x, states[i] = block.step(x, states[i], True)
            torch.testing.assert_close(decoder.norm(x), expected[:, at + 1], rtol=0, atol=1e-10)
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
        expected, (*_, after) = decoder.read(history, decoder.embedded(codes[:, :3]))
        for states in (other, longer):
            found, (*_, state) = decoder.read(History(states, history.lengths), decoder.embedded(codes[:, :3]))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(state.memory, after.memory, rtol=0, atol=1e-10)
        for row, length in enumerate(history.lengths.tolist()):
            alone = History(history.states[row : row + 1, :length], history.lengths[row : row + 1])
            found, _ = decoder.read(alone, decoder.embedded(codes[row : row + 1, :3]))
            torch.testing.assert_close(found[0], expected[row], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_history_is_read_once_for_all_beams(name: str) -> None:
    model, batch = student(name), requests(3)
    read = []
    for block in model.decoder.blocks:  # type: ignore[union-attr]
        block.mixer.register_forward_pre_hook(lambda module, given: read.append(tuple(given[0].shape[:2])))
    model.recommend(batch, 5, beam=9)
    assert read == [(3, 2 + 4 * int(batch["history_length"].max()) + 1)] * 2  # users, not beams


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("scores", "m"), [("children", 0), ("codebook", 0), ("codebook", 2)])
def test_a_beam_as_wide_as_the_catalogue_scores_every_item(name: str, scores: Any, m: int) -> None:
    model, batch = student(name, m=m), requests(3)
    items, found = model.recommend(batch, 32, beam=1000, scores=scores)
    assert items[:, 30:].tolist() == [[-1, -1]] * 3
    codes = catalogue().sids
    history, taught_by = model.encode(batch), tiger()
    first = model.tokens.first
    for row in range(3):
        own = History(history.states[row : row + 1], history.lengths[row : row + 1]).states.expand(30, -1, -1)
        own_history = History(own, history.lengths[row].expand(30))
        with torch.no_grad():
            theirs = taught_by.decoder.teacher_forced(own_history, codes)
            ours = model.decoder.teacher_forced(own_history, codes)
        total = torch.zeros(30)
        for level in range(4):
            if level < m:
                digit = theirs[level].log_softmax(-1)[:, first[level] : first[level] + SIZES[level]]
            else:
                digit = ours[level - m].log_softmax(-1)
            if scores == "children" and level > 0:
                same = (codes[:, None, :level] == codes[None, :, :level]).all(-1)  # items of the same prefix
                valid = torch.zeros(30, SIZES[level]).index_add_(1, codes[:, level], same.float()) > 0
                digit = digit.masked_fill(~valid, -torch.inf).log_softmax(-1)
            total += digit.gather(1, codes[:, level, None])[:, 0]
        assert sorted(items[row, :30].tolist()) == list(range(30))
        torch.testing.assert_close(found[row, :30], total[items[row, :30]], rtol=1e-4, atol=1e-4)
        assert (found[row, :30].diff() <= 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_recommendations_depend_on_the_own_row_alone(name: str) -> None:
    model, batch = student(name), requests(5)
    items, scores = model.recommend(batch, 6, beam=8)
    for row, length in enumerate(batch["history_length"].tolist()):
        one = {part: value[row : row + 1] for part, value in batch.items()}
        alone, alone_scores = model.recommend(one | {"history": one["history"][:, :length]}, 6, beam=8)
        assert alone.tolist() == items[row : row + 1].tolist()
        torch.testing.assert_close(alone_scores, scores[row : row + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [0, 2])
def test_it_learns_and_comes_back_from_a_checkpoint(name: str, m: int, tmp_path: Path) -> None:
    model = student(name, m=m)
    before = {part: value.clone() for part, value in model.state_dict().items()}
    trained = {part: p for part, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), 1e-2)
    losses = []
    for _ in range(8):
        loss = model.train()(requests(32))["loss"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert [part for part, p in trained.items() if p.grad is None] == []  # a gradient for all, as DDP needs it
        assert all(bool(p.grad.abs().sum() > 0) for p in trained.values() if p.grad is not None)
        optimizer.step()
    assert losses[-1] < losses[0]
    changed = {part for part, value in model.state_dict().items() if not torch.equal(value, before[part])}
    assert changed == set(trained)  # the backbone, its embedding and the teacher's decoder stay
    items, scores = model.eval().recommend(requests(6), 8, beam=12)
    assert all(len(set(row)) == 8 for row in items.tolist())
    checkpoint.save(tmp_path / "saved", model, checkpoint.Checkpoint(model=registry.config_to_dict(model.config)))
    loaded, _ = registry.load(tmp_path / "saved", catalogue())
    again, again_scores = loaded.recommend(requests(6), 8, beam=12)
    assert again.tolist() == items.tolist()
    torch.testing.assert_close(again_scores, scores)


@pytest.mark.parametrize("name", NAMES)
def test_logits_depend_on_the_whole_prefix_and_on_the_whole_history(name: str) -> None:
    decoder, history, _ = exact(name)

    def last(codes: list[int], states: Tensor = history.states) -> Tensor:
        given = torch.tensor([*codes, 0]).expand(5, -1)
        with torch.no_grad():
            return decoder.teacher_forced(History(states, history.lengths), given)[3]

    reference = last([1, 2, 0])
    assert all(not torch.allclose(reference, last(other)) for other in ([0, 2, 0], [1, 3, 0], [1, 2, 1]))
    moved = history.states.clone()
    moved[:, 0] += 1  # the oldest position
    assert ((last([1, 2, 0], moved) - reference).abs().amax(-1) > 1e-9).all()


@pytest.mark.parametrize("name", NAMES)
def test_it_has_about_as_many_parameters_as_the_teachers_decoder(name: str) -> None:
    codes = torch.tensor([[0, 0, 0, 0], [255, 1, 2, 3]])
    model = registry.build(registry.config_from_dict({"name": name}), Catalogue.from_codes(codes, (256,) * 4))
    teacher: Any = registry.build(TigerConfig(), Catalogue.from_codes(codes, (256,) * 4))
    own, its = (sum(p.numel() for p in part.decoder.parameters()) for part in (model, teacher))
    assert own == pytest.approx(its, rel=0.06)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gdn", {"heads": 0}, "heads is 0, it must be at least 1"),
        ("gdn", {"ffn_width": -1}, "ffn_width is -1, it must be at least 0"),
        ("gdn", {"width": -1}, "width is -1, it must be at least 0"),
        ("gdn", {"chunk": 0}, "chunk is 0, it must be at least 1"),
        ("mamba2", {"dropout": 1.0}, r"dropout 1.0 is not in \[0, 1\)"),
        ("mamba2", {"state": 0}, "state is 0, it must be at least 1"),
        ("mamba2", {"width": 20, "head_width": 12}, "the inner width 40 of mamba2 does not divide by head_width 12"),
        ("mamba2", {"width": 0, "head_width": 12}, "the inner width 32 of mamba2 does not divide by head_width 12"),
    ],
)
def test_impossible_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        student(name, **options)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_trained_and_swept_as_sid_mlp_is(name: str) -> None:
    rest = ["--tables", "t", "--storage", "s", "--name", "n"]
    files = [str(ROOT / f"jobs/configs/{n}.yaml") for n in (name, "sid_mlp")]
    own, sid_mlp = (parse(["--config", file, *rest]) for file in files)
    assert own.fit == sid_mlp.fit
    assert own.model == {"name": name, **asdict(registry.model_config(name)())}  # the file says the defaults
    grid, theirs = (yaml.safe_load((ROOT / f"tuning/grids/{n}.yaml").read_text()) for n in (name, "sid_mlp"))
    shared = ("fit.lr", "model.dropout", "fit.weight_decay", "model.alpha")
    assert grid["axes"] == {axis: theirs["axes"][axis] for axis in shared}
    assert load(str(ROOT / f"tuning/grids/{name}.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_requests_whose_states_are_many_are_searched_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = student(name), requests(7)
    states = []
    whole = model.recommend(batch, 5, beam=4)
    step = RecurrentScorer.step

    def watched(self: RecurrentScorer, parents: Tensor, tokens: Tensor) -> Tensor:
        found = step(self, parents, tokens)
        states.append(sum(part.nbytes for state in self.states for part in state))
        return found

    monkeypatch.setattr(RecurrentScorer, "step", watched)
    monkeypatch.setattr(retriever, "CARRIED", 3 * 4 * model.decoder.beam_bytes)
    items, scores = model.recommend(batch, 5, beam=4)
    assert items.tolist() == whole[0].tolist()
    torch.testing.assert_close(scores, whole[1])
    assert max(states) == 3 * 4 * model.decoder.beam_bytes  # 3 requests of 4 beams at once
    none = {name: value[:0] for name, value in batch.items()}
    assert model.recommend(none, 5)[0].shape == (0, 5)
