"""SID-MLP on LC-Rec reads what an early layer of the language model keeps of the history, and learns from LC-Rec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_retrieval import ITEMS, catalogue, requests
from torch import Tensor

from models import checkpoint, registry
from models.fit import FitConfig, fit
from models.inputs import Inputs
from models.retrieval.lc_rec_sid_mlp import LcRecSidMlp, LcRecSidMlpConfig
from models.retrieval.sid_mlp import SidMlp
from models.retrieval.student import distillation_loss
from models.setup import set_up
from models.tables import UserError
from tests.models.retrieval.test_lc_rec import SMALL, TINY, history_of, make, plain_tokens
from tests.models.retrieval.test_tiger import tiger  # noqa: F401 - a fixture

HEADS: dict[str, Any] = {"width": 12, "attention_heads": 2, "ffn_width": 16, "head_width": 20}


def taught(name: str = "lc_rec_sid_mlp", teacher: Any = None, **options: Any) -> Any:
    teacher = teacher or make()
    torch.manual_seed(2)
    config = {"name": name, "teacher_model": registry.config_to_dict(teacher.config), **options}
    model: Any = registry.build(registry.config_from_dict(config), catalogue())
    model.set_teacher(teacher)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(("layer", "read"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_keys_and_values_are_those_of_the_layer_at_the_historys_tokens(layer: int, read: int) -> None:
    """By hooks on the projections of the layer, one row at a time; by default a quarter of 3 layers, the first."""
    model, batch = taught(layer=layer, **HEADS), requests(5)
    lm: Any = model.backbone.lm
    attention = lm.model.layers[read].self_attn
    seen: dict[str, Tensor] = {}
    hooks = [
        attention.k_proj.register_forward_hook(lambda module, given, output: seen.__setitem__("k", output)),
        attention.v_proj.register_forward_hook(lambda module, given, output: seen.__setitem__("v", output)),
        lm.model.norm.register_forward_hook(lambda module, given, output: seen.__setitem__("last", output)),
    ]
    history = model.encode(batch)
    place, real = model.backbone.of_history(history)
    kept = model.kept(history)[:, place]
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    for row in range(5):
        tokens = torch.tensor([plain_tokens(model.teacher, history_of(batch, row))])
        model.backbone.run(model.backbone.embed(tokens))
        keys = seen["k"].unflatten(-1, (2, -1)).transpose(1, 2)
        turned = lm.model.rotary_emb(keys, torch.arange(tokens.shape[1])[None])
        keys = apply_rotary_pos_emb(keys, keys, *turned)[1].transpose(1, 2).flatten(2)
        at = (tokens[0] >= model.backbone.vocabulary).nonzero()[:, 0]
        expected = torch.cat([keys, seen["v"]], -1)[0, at]
        torch.testing.assert_close(kept[row, real[row]], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(history.query[row], seen["last"][0, -1], rtol=1e-4, atol=1e-5)
    for hook in hooks:
        hook.remove()


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_readouts_stand_on_each_other(layers: int) -> None:
    model, batch = taught(readout_layers=layers, **HEADS), requests(4)
    history = model.encode(batch)
    place, real = model.backbone.of_history(history)
    kept = model.kept(history)[:, place]
    found, readout = model.decoder.context(history), model.decoder.readout
    assert len(readout.layers) == layers
    for row in range(4):
        keys, values = kept[row, real[row]].split(readout.width, -1)
        z = readout.query(history.query[row])
        for layer in readout.layers:
            mixed = []
            for head in range(2):
                part = slice(6 * head, 6 * head + 6)
                q, k, v = layer.q(z)[part], layer.k(keys)[:, part], layer.v(values)[:, part]
                mixed.append((k @ q / 6**0.5).softmax(0) @ v)
            x = layer.norm1(z + layer.o(torch.cat(mixed)))
            z = layer.norm2(x + layer.ffn(x))
        torch.testing.assert_close(found[row], z, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_search_scores_every_item_as_the_heads_do() -> None:
    model, batch = taught(**HEADS), requests(3)
    items, scores = model.recommend(batch, ITEMS, beam=ITEMS, scores="codebook")
    for row in range(3):
        one = {name: value[row : row + 1].expand(ITEMS, *value.shape[1:]) for name, value in batch.items()}
        codes = catalogue().sids[items[row]]
        logits = model.decoder.teacher_forced(model.encode(one), codes)
        expected = sum(x.log_softmax(-1).gather(1, codes[:, i : i + 1])[:, 0] for i, x in enumerate(logits))
        torch.testing.assert_close(scores[row], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_other_rows_change_nothing() -> None:
    model, batch = taught(**HEADS), requests(5)
    items, scores = model.recommend(batch, 10)
    for row in range(5):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        alone["history"] = alone["history"][:, : int(batch["history_length"][row])]
        items_alone, scores_alone = model.recommend(alone, 10)
        assert items_alone.tolist() == items[row : row + 1].tolist()
        torch.testing.assert_close(scores_alone, scores[row : row + 1], rtol=1e-4, atol=1e-5)


def test_it_learns_the_teachers_logits_and_leaves_the_language_model_as_it_is() -> None:
    teacher = make()
    model, batch = taught(teacher=teacher, **HEADS), requests(32)
    codes = model.tokens.codes(batch["target"])
    with torch.no_grad():
        history = model.encode(batch)
        own = model.decoder.teacher_forced(history, codes)
        soft = teacher.decoder.teacher_forced(teacher.encode(batch), codes)
        losses = [distillation_loss(own[i], soft[i], codes[:, i], 0.7, 1.0) for i in range(4)]
    loss = model(batch)["loss"]
    torch.testing.assert_close(loss, torch.stack(losses).sum(), rtol=1e-4, atol=1e-4)
    model.train()
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in model.decoder.parameters()}
    optimizer = torch.optim.AdamW(trained, 3e-3)
    for _ in range(25):
        optimizer.zero_grad()
        model(batch)["loss"].backward()
        assert all(p.grad is not None for p in trained)
        optimizer.step()
    assert model.eval()(batch)["loss"] < 0.8 * loss
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.state_dict().items())


@torch.no_grad()
def test_lc_rec_may_write_the_first_digits() -> None:
    teacher = make()
    model, batch = taught(teacher=teacher, m=2, **HEADS), requests(3)
    items, scores = model.recommend(batch, ITEMS, beam=ITEMS, scores="codebook")
    codes = catalogue().sids[items]
    for row in range(3):
        one = {name: value[row : row + 1].expand(ITEMS, *value.shape[1:]) for name, value in batch.items()}
        history = model.encode(one)
        first = teacher.decoder.teacher_forced(history, codes[row])[:2]
        both = [*first, *model.decoder.own.teacher_forced(history, codes[row])]
        expected = sum(x.log_softmax(-1).gather(1, codes[row][:, i : i + 1])[:, 0] for i, x in enumerate(both))
        torch.testing.assert_close(scores[row], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["lc_rec_sid_mlp", "sid_mlp"])
def test_a_training_with_and_without_the_teachers_tables(name: str, small: tuple[str, str], tmp_path: Path) -> None:
    """A teacher trained a little, a student of each kind, its losses from the tables those of the teacher itself."""
    config = FitConfig(lr=5e-3, batch_size=32, max_epochs=1, patience=0, log_every_steps=5, seed=1)
    teacher = set_up(TINY, config, Inputs(*small))
    checkpoint.save(tmp_path / "teacher", teacher.model, teacher.checkpoint(epoch=1))
    sizes = HEADS if name == "lc_rec_sid_mlp" else {"attention_heads": 2, "attention_width": 12, "ffn_width": 16}
    model = {"name": name, "teacher": str(tmp_path / "teacher"), "dropout": 0.0, **sizes}
    plain = set_up(model, config, Inputs(*small))
    kept = set_up({**model, "teacher_cache": str(tmp_path / "cache")}, config, Inputs(*small))
    assert any("encoder states" in note for note in kept.notes)
    batch = plain.train.examples.collate(np.arange(16))
    for setup in (plain, kept):
        setup.model.eval()
    torch.testing.assert_close(kept.model(batch)["loss"], plain.model(batch)["loss"], rtol=2e-3, atol=2e-3)
    events = list(fit(kept.model, kept.train, kept.validate, config, means=kept.means))
    losses = [event.loss for event in events]
    assert losses[-2] < losses[0]
    checkpoint.save(tmp_path / "student", kept.model, kept.checkpoint(epoch=1))
    loaded: Any = registry.load(tmp_path / "student", kept.catalogue)[0]
    batch = kept.val.collate(np.arange(20)) | {"request": torch.full((20,), 10**9)}  # of no table
    trained: Any = kept.model
    items, scores = trained.eval().recommend(batch, 10)
    again, scores_again = loaded.recommend(batch, 10)
    assert again.tolist() == items.tolist()
    assert torch.equal(scores_again, scores)


def test_any_student_can_learn_from_lc_rec() -> None:
    model = taught("sid_mlp", attention_heads=2, attention_width=12, ffn_width=16, head_width=12)
    assert isinstance(model, SidMlp)
    batch = requests(4)
    items, scores = model.recommend(batch, 10)
    plain, plain_scores = model.recommend(batch, 10, path="plain")
    assert plain.tolist() == items.tolist()
    torch.testing.assert_close(plain_scores, scores, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_is_refused(tiger: Any) -> None:  # noqa: F811
    with pytest.raises(UserError, match=r"the teacher is a Tiger, .* give an LC-Rec as model.teacher"):
        LcRecSidMlp(LcRecSidMlpConfig(), catalogue(), tiger)
    with pytest.raises(UserError, match=r"layer 4 exceeds the 3 of the language model"):
        taught(layer=4, **HEADS)
    for change, text in (({"readout_layers": 0}, "at least 1"), ({"width": 10, "attention_heads": 4}, "divide")):
        with pytest.raises(ValueError, match=text):
            LcRecSidMlpConfig(**change)
    assert LcRecSidMlpConfig(teacher_model={"max_history": SMALL["max_history"]}).max_history == 6
