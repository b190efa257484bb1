"""Causal language models of `transformers`: a pretrained one by its name or folder, or one of random weights."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from models.storage.tables import UserError
from models.text.text_encoder import loading

KINDS = (
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
)
"""Kinds of language models that go by positions, not by where keys stand, and that scale no embeddings or logits: they
read codes beside their words, and beams beside each other, as a plain one does."""

LEFT_OUT = ("architectures", "dtype", "transformers_version", "_name_or_path")


def pretrained_config(name: str) -> dict[str, Any]:
    """What makes a model like the pretrained one again: its kind, and what differs from its defaults."""
    from transformers import AutoConfig

    with loading(name) as source:
        found = AutoConfig.from_pretrained(**source)
    return {
        key: value for key, value in found.to_diff_dict().items() if key not in LEFT_OUT
    }


def small_config(
    words: int, width: int, layers: int, heads: int, ffn: int, dropout: float
) -> dict[str, Any]:
    """Of a LLaMA of these sizes."""
    return {
        "model_type": "llama",
        "vocab_size": words,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": ffn,
        "attention_dropout": dropout,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def make(config: dict[str, Any], longest: int) -> nn.Module:
    """A causal language model with random weights; UserError where it cannot read `longest` tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if config.get("model_type") not in KINDS:
        raise UserError(
            f"the language model is of the kind '{config.get('model_type')}', which may read codes otherwise; give "
            f"another model.lm, of {', '.join(KINDS)}"
        )
    try:
        found = AutoConfig.for_model(**config)
        model = AutoModelForCausalLM.from_config(found)
    except (ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"cannot make the language model {config.get('model_type')} ({first}); check lm_model"
        ) from error
    whole = found.to_dict()
    for limit in ("max_position_embeddings", "n_positions", "sliding_window"):
        if whole.get(limit) and whole[limit] < longest:
            raise UserError(
                f"prompts and responses go up to {longest} tokens, the language model has {limit} {whole[limit]}; give "
                f"a smaller model.max_history or another model.lm"
            )
    return model


def tied(lm: Any) -> bool:
    """Whether the words' embeddings are their output layer."""
    return bool(lm.get_output_embeddings().weight is lm.get_input_embeddings().weight)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of all language models within `model`: what FSDP2 cuts one by one."""
    from transformers import PreTrainedModel

    models = [
        module for module in model.modules() if isinstance(module, PreTrainedModel)
    ]
    names = {name for lm in models for name in lm._no_split_modules or ()}
    return [
        module
        for lm in models[:1]
        for module in lm.modules()
        if type(module).__name__ in names
    ]


def add_lora(lm: nn.Module, rank: int, alpha: float, dropout: float) -> None:
    """Freezes the language model and gives its linear layers trained products of low rank (Hu et al., 2021)."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            f"lora_rank {rank} needs the optional package peft; run pip install peft, or set model.lora_rank 0"
        ) from error
    lm.requires_grad_(False)
    inject_adapter_in_model(
        LoraConfig(
            r=rank,
            lora_alpha=cast(Any, alpha),
            lora_dropout=dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        lm,
    )


def load_pretrained(lm: nn.Module, name: str) -> None:
    """Fills `lm` with the pretrained weights of `name`, its low-rank products aside."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with loading(name) as source:
        found = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    own = {
        key.replace(".base_layer", ""): value
        for key, value in lm.state_dict().items()
        if "lora_" not in key
    }
    given = found.state_dict()
    if own.keys() != given.keys():
        raise UserError(
            f"{name} has not the weights of the model that was made from its config; give a causal model"
        )
    with torch.no_grad():
        for key, value in own.items():
            value.copy_(given[key])
