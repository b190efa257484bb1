"""Causal language models from `transformers`, pretrained or with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from core.errors import UserError, one_line
from models.text import pretrained

SUPPORTED_TYPES = (
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
"""Model types whose attention depends on positions alone and which scale neither
embeddings nor logits. Decoding shares one prefix among beams and adds codes to the
vocabulary, which gives the same results as separate sequences only for these types."""

LANGUAGE_MODEL = "language model"


def pretrained_config(name: str) -> dict[str, Any]:
    """Return the config of a pretrained language model, without default settings."""
    return pretrained.pretrained_config(name, LANGUAGE_MODEL)


def llama_config(
    words: int, width: int, layers: int, heads: int, ffn: int, dropout: float
) -> dict[str, Any]:
    """Return the config of a LLaMA model.

    Args:
        words: Size of the vocabulary.
        width: Width of the hidden states.
        layers: Number of layers.
        heads: Number of attention heads.
        ffn: Inner width of the feed-forward layers.
        dropout: Dropout probability of the attention weights.
    """
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


def build_model(config: dict[str, Any], longest: int) -> nn.Module:
    """Build a causal language model with random weights.

    Args:
        config: Config of the model for `transformers`, with its `model_type`.
        longest: Number of tokens that the model must be able to read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if config.get("model_type") not in SUPPORTED_TYPES:
        raise UserError(
            f"the language model has the type '{config.get('model_type')}', which is "
            f"not supported; give a model.lm of one of the types "
            f"{', '.join(SUPPORTED_TYPES)}"
        )
    try:
        full_config = AutoConfig.for_model(**config)
        model = AutoModelForCausalLM.from_config(full_config)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"cannot build the language model {config.get('model_type')} "
            f"({one_line(error)})"
        ) from error
    values = full_config.to_dict()
    for limit in ("max_position_embeddings", "n_positions", "sliding_window"):
        if values.get(limit) and values[limit] < longest:
            raise UserError(
                f"prompts with responses have up to {longest} tokens, but the language "
                f"model has {limit} {values[limit]}"
            )
    return model


def has_tied_embeddings(lm: Any) -> bool:
    """Return whether the output layer shares the weights of the word embeddings."""
    return bool(lm.get_output_embeddings().weight is lm.get_input_embeddings().weight)


def add_lora(lm: nn.Module, rank: int) -> None:
    """Freeze the language model and add trained low-rank products (Hu et al., 2021).

    Args:
        lm: Language model, changed in place.
        rank: Rank of the products.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            f"lora_rank {rank} needs the optional package peft; run pip install peft, "
            f"or set model.lora_rank 0"
        ) from error
    lm.requires_grad_(False)
    inject_adapter_in_model(
        LoraConfig(
            r=rank,
            lora_alpha=32,
            lora_dropout=0.05,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        lm,
    )


def load_pretrained(lm: nn.Module, name: str) -> None:
    """Copy pretrained weights into a language model.

    Weights of low-rank products are not changed.

    Args:
        lm: Language model, changed in place.
        name: Folder or hub name of the pretrained model.
    """
    from transformers import AutoModelForCausalLM

    source = pretrained.load_pretrained(name, AutoModelForCausalLM, LANGUAGE_MODEL)
    weights = {
        key.replace(".base_layer", ""): value
        for key, value in lm.state_dict().items()
        if "lora_" not in key
    }
    pretrained_weights = source.state_dict()
    if weights.keys() != pretrained_weights.keys():
        raise UserError(
            f"{name} has other weights than a causal language model with its config"
        )
    with torch.no_grad():
        for key, value in weights.items():
            value.copy_(pretrained_weights[key])
