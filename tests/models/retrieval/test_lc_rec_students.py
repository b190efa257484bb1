"""Students of LC-Rec: SID-MLP on an early layer, and NEZHA on placeholders.

SID-MLP reads the keys and values that an early layer of the language model has of the
history. NEZHA reads the states of placeholders behind the prompt.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.fixtures.small_lc_rec import (
    KINDS,
    build_kind,
    build_lc_rec,
    run_library,
    select_history,
    write_out_prompt,
)
from tests.fixtures.small_retrieval import build_taught, make_requests

HEADS: dict[str, Any] = {
    "width": 12,
    "attention_heads": 2,
    "ffn_width": 16,
    "head_width": 20,
}


def build_student(
    name: str = "lc_rec_sid_mlp", teacher: Any = None, **options: Any
) -> Any:
    """Return a student of `teacher`, by default of `build_lc_rec()`."""
    teacher = teacher or build_lc_rec()
    teacher_model = asdict(teacher.config)
    return build_taught(name, 2, teacher, teacher_model=teacher_model, **options)


def record_outputs(modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Return a dictionary that receives the output of each module's latest call."""
    outputs: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            outputs[name] = output

        return hook

    for name, module in modules.items():
        module.register_forward_hook(record(name))
    return outputs


@torch.no_grad()
@pytest.mark.parametrize(("layer", "read"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_keys_and_values_are_those_of_the_layer_at_the_historys_tokens(layer, read):
    """Hooks record the projections of the layer, one row at a time.

    Layer 0 stands for a quarter of the 3 layers, the first.
    """
    model, batch = build_student(layer=layer, **HEADS), make_requests(5)
    lm: Any = model.backbone.lm
    attention = lm.model.layers[read].self_attn
    history = model.encode(batch)
    columns, is_code = model.backbone.locate_history(history)
    keys_and_values = model.decoder.readout.keys_and_values(history)[:, columns]
    outputs = record_outputs(
        {"k": attention.k_proj, "v": attention.v_proj, "states": lm.model.norm}
    )

    for row in range(5):
        prompt = write_out_prompt(model.teacher, select_history(batch, row))
        tokens = torch.tensor([prompt])
        model.backbone.run(model.backbone.embed(tokens))
        keys = outputs["k"].unflatten(-1, (2, -1)).transpose(1, 2)
        cos, sin = lm.model.rotary_emb(keys, torch.arange(tokens.shape[1])[None])
        _, rotated = apply_rotary_pos_emb(keys, keys, cos, sin)
        rotated = rotated.transpose(1, 2).flatten(2)
        positions = (tokens[0] >= model.backbone.vocabulary).nonzero()[:, 0]
        expected = torch.cat([rotated, outputs["v"]], -1)[0, positions]
        torch.testing.assert_close(
            keys_and_values[row, is_code[row]], expected, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            history.query[row], outputs["states"][0, -1], rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_each_readout_layer_attends_with_the_output_of_the_one_before(layers):
    model, batch = build_student(readout_layers=layers, **HEADS), make_requests(4)
    history = model.encode(batch)
    columns, is_code = model.backbone.locate_history(history)
    keys_and_values = model.decoder.readout.keys_and_values(history)[:, columns]
    readout = model.decoder.readout
    assert len(readout.layers) == layers

    context = model.decoder.context(history)

    for row in range(4):
        keys, values = keys_and_values[row, is_code[row]].split(readout.width, -1)
        z = readout.query(history.query[row])
        for layer in readout.layers:
            queries, layer_keys, layer_values = (
                layer.q(z),
                layer.k(keys),
                layer.v(values),
            )
            heads = []
            for part in (slice(0, 6), slice(6, 12)):
                q, k, v = queries[part], layer_keys[:, part], layer_values[:, part]
                heads.append((k @ q / 6**0.5).softmax(0) @ v)
            x = layer.norm1(z + layer.o(torch.cat(heads)))
            z = layer.norm2(x + layer.ffn(x))
        torch.testing.assert_close(context[row], z, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_nezha_are_those_of_the_prompts_end_and_the_placeholders(kind):
    """Compare with the library's pass over one row without padding."""
    teacher = build_kind(kind)
    model, batch = build_student("lc_rec_nezha", teacher), make_requests(5)

    history = model.encode(batch)

    assert history.states.shape == (5, 5, 16)
    for row in range(5):
        tokens = torch.tensor(write_out_prompt(teacher, select_history(batch, row)))
        prompt = teacher.backbone.embed(tokens)
        states = run_library(teacher, torch.cat([prompt, model.backbone.extra.weight]))
        torch.testing.assert_close(
            history.states[row], states[-5:], rtol=1e-4, atol=1e-4
        )
