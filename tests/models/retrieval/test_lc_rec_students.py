"""SID-MLP on LC-Rec reads what an early layer of the language model keeps of the
history, and learns from LC-Rec; NEZHA on LC-Rec reads placeholders behind the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.build import build_model, load_model
from models.retrieval.distillation.student import distillation_loss
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.training.fit import FitConfig, fit
from tests.fixtures.small_retrieval import build_catalogue, make_requests
from tests.fixtures.trainings import build_training
from tests.models.retrieval.test_lc_rec import (
    KINDS,
    TINY,
    history_of,
    make,
    of_kind,
    plain_tokens,
)

HEADS: dict[str, Any] = {
    "width": 12,
    "attention_heads": 2,
    "ffn_width": 16,
    "head_width": 20,
}


def taught(name: str = "lc_rec_sid_mlp", teacher: Any = None, **options: Any) -> Any:
    teacher = teacher or make()
    torch.manual_seed(2)
    config = {
        "name": name,
        "teacher_model": teacher.config_to_dict(teacher.config),
        **options,
    }
    model: Any = build_model(config, build_catalogue())
    model.set_teacher(teacher)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(("layer", "read"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_keys_and_values_are_those_of_the_layer_at_the_historys_tokens(
    layer: int, read: int
) -> None:
    """By hooks on the projections of the layer, one row at a time; by default a quarter
    of 3 layers, the first.
    """
    model, batch = taught(layer=layer, **HEADS), make_requests(5)
    lm: Any = model.backbone.lm
    attention = lm.model.layers[read].self_attn
    seen: dict[str, Tensor] = {}
    hooks = [
        attention.k_proj.register_forward_hook(
            lambda module, given, output: seen.__setitem__("k", output)
        ),
        attention.v_proj.register_forward_hook(
            lambda module, given, output: seen.__setitem__("v", output)
        ),
        lm.model.norm.register_forward_hook(
            lambda module, given, output: seen.__setitem__("last", output)
        ),
    ]
    history = model.encode(batch)
    place, real = model.backbone.locate_history(history)
    kept = model.decoder_input(history)[:, place]
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
        torch.testing.assert_close(
            history.query[row], seen["last"][0, -1], rtol=1e-4, atol=1e-5
        )
    for hook in hooks:
        hook.remove()


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_readouts_stand_on_each_other(layers: int) -> None:
    model, batch = taught(readout_layers=layers, **HEADS), make_requests(4)
    history = model.encode(batch)
    place, real = model.backbone.locate_history(history)
    kept = model.decoder_input(history)[:, place]
    found, readout = model.decoder.context(history), model.decoder.readout
    assert len(readout.layers) == layers
    for row in range(4):
        keys, values = kept[row, real[row]].split(readout.width, -1)
        z = readout.query(history.query[row])
        for layer in readout.layers:
            mixed = []
            for head in range(2):
                part = slice(6 * head, 6 * head + 6)
                q, k, v = (
                    layer.q(z)[part],
                    layer.k(keys)[:, part],
                    layer.v(values)[:, part],
                )
                mixed.append((k @ q / 6**0.5).softmax(0) @ v)
            x = layer.norm1(z + layer.o(torch.cat(mixed)))
            z = layer.norm2(x + layer.ffn(x))
        torch.testing.assert_close(found[row], z, rtol=1e-4, atol=1e-5)


def test_it_learns_the_teachers_logits_and_leaves_the_language_model_as_it_is() -> None:
    teacher = make()
    model, batch = taught(teacher=teacher, **HEADS), make_requests(32)
    codes = model.tokens.codes(batch.target)
    with torch.no_grad():
        history = model.encode(batch)
        own = model.decoder.teacher_forced(history, codes)
        soft = teacher.decoder.teacher_forced(teacher.encode(batch), codes)
        losses = [
            distillation_loss(own[i], soft[i], codes[:, i], 0.7, 1.0) for i in range(4)
        ]
    loss = model(batch)["loss"]
    torch.testing.assert_close(loss, torch.stack(losses).sum(), rtol=1e-4, atol=1e-4)
    model.train()
    before = {
        name: value.clone() for name, value in model.backbone.state_dict().items()
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in model.decoder.parameters()}
    optimizer = torch.optim.AdamW(trained, 3e-3)
    for _ in range(25):
        optimizer.zero_grad()
        model(batch)["loss"].backward()
        assert all(p.grad is not None for p in trained)
        optimizer.step()
    assert model.eval()(batch)["loss"] < 0.8 * loss
    assert all(
        torch.equal(value, before[name])
        for name, value in model.backbone.state_dict().items()
    )


@pytest.mark.parametrize("name", ["lc_rec_sid_mlp", "sid_mlp"])
def test_a_training_with_and_without_the_teachers_tables(
    name: str, small: tuple[str, str], tmp_path: Path
) -> None:
    """A teacher trained a little, a student of each kind, its losses from the tables
    those of the teacher itself.
    """
    config = FitConfig(
        lr=5e-3, batch_size=32, max_epochs=1, patience=0, log_every_steps=5, seed=1
    )
    teacher = build_training(TINY, config, Inputs(*small))
    checkpoint.save(tmp_path / "teacher", teacher.model, teacher.checkpoint(epoch=1))
    sizes = (
        HEADS
        if name == "lc_rec_sid_mlp"
        else {"attention_heads": 2, "attention_width": 12, "ffn_width": 16}
    )
    model = {
        "name": name,
        "teacher": str(tmp_path / "teacher"),
        "dropout": 0.0,
        **sizes,
    }
    plain = build_training(model, config, Inputs(*small))
    kept = build_training(
        {**model, "teacher_cache": str(tmp_path / "cache")}, config, Inputs(*small)
    )
    assert any("encoder states" in note for note in kept.messages)
    batch = plain.train.dataset.collate(np.arange(16))
    for setup in (plain, kept):
        setup.model.eval()
    torch.testing.assert_close(
        kept.model(batch)["loss"], plain.model(batch)["loss"], rtol=2e-3, atol=2e-3
    )
    events = list(fit(kept.model, kept.train, kept.validate, config, means=kept.means))
    losses = [event.loss for event in events]
    assert losses[-2] < losses[0]
    checkpoint.save(tmp_path / "student", kept.model, kept.checkpoint(epoch=1))
    loaded: Any = load_model(tmp_path / "student", kept.catalogue)[0]
    batch = kept.val.collate(np.arange(20))
    batch = replace(batch, request=torch.full((20,), 10**9))  # of no table
    trained: Any = kept.model
    items, scores = trained.eval().recommend(batch, 10)
    again, scores_again = loaded.recommend(batch, 10)
    assert again.tolist() == items.tolist()
    assert torch.equal(scores_again, scores)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_nezha_are_those_of_the_prompts_end_and_the_placeholders(
    kind: str,
) -> None:
    """Of the library's pass over one row without padding."""
    teacher = of_kind(kind)
    model, batch = taught("lc_rec_nezha", teacher), make_requests(5)
    history = model.encode(batch)
    assert history.states.shape == (5, 5, 16)
    for row in range(5):
        tokens = torch.tensor(plain_tokens(teacher, history_of(batch, row)))
        embedded = torch.cat(
            [teacher.backbone.embed(tokens), model.backbone.extra.weight]
        )
        lm: Any = teacher.backbone.lm
        states = lm.base_model(
            inputs_embeds=embedded[None], use_cache=False
        ).last_hidden_state[0]
        torch.testing.assert_close(
            history.states[row], states[-5:], rtol=1e-4, atol=1e-4
        )
