"""Text encoders: models of `sentence-transformers`, and TF-IDF.

    encoder.encode(["red lamp"])                            # (1, width)
    encoder.encode(["red lamp"], ["a lamp of red glass"])   # a pair as one input
    encoder.save("folder")
    encoder = load_saved("folder")                          # without pickle

jobs.tokenize and jobs.encode encode texts with them, and served models encode new
texts.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Self, TypeVar

import numpy as np
import pyarrow as pa
from cachetools import LRUCache
from numpy.typing import NDArray

from core.errors import UserError
from core.tables import LARGEST_NUMBER
from models.text.pretrained import (
    load_pretrained,
    locate_encoder,
    pretrained_source,
)

Floats = NDArray[np.float32]

# key of a cached vector: a text, or a pair of texts that is encoded together
Text = TypeVar("Text", bound=Hashable)

MAX_CACHED_TEXTS = 1 << 16
"""Maximum number of cached vectors of a served model: 100 MB at a width of 384."""

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


def text_columns(columns: Iterable[str], template: str = "") -> dict[str, str]:
    """Choose the columns of items that make up their text.

    Args:
        columns: Names of all columns, such as `text_title` and `cat_brand`.
        template: Format string whose fields name the columns, such as "{title}"; empty
            to use all text columns.

    Returns:
        Column of each field, by the name without its prefix.
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
    """A model of `sentence-transformers`, on a GPU if PyTorch sees one."""

    def __init__(
        self,
        name: str,
        pooling: str,
        max_tokens: int,
        batch_size: int,
    ) -> None:
        """Load the encoder in float32.

        Args:
            name: Folder, hub name or `minilm`.
            pooling: "folder" for the modules of a sentence-transformers folder, or the
                mean over tokens in other folders; "cls" for the state of the first
                token or "mean" over tokens, scaled to length 1.
            max_tokens: Longer texts are truncated.
            batch_size: Texts per forward pass.
        """
        import torch
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import (
            Normalize,
            Pooling,
        )

        self.name, self.pooling, self.batch_size = name, pooling, batch_size
        with pretrained_source(name) as source:
            location = source.pop("pretrained_model_name_or_path")
            model: Any = SentenceTransformer(
                location, model_kwargs={"dtype": torch.float32}, **source
            )
            if pooling != "folder":
                width = model[0].get_embedding_dimension()
                modules = [model[0], Pooling(width, pooling), Normalize()]
                model = SentenceTransformer(modules=modules)
            self.tokenizer = prepare_tokenizer(name, model)
            model.max_seq_length = min(max_tokens, count_positions(model))
        self.model = model

    @property
    def max_tokens(self) -> int:
        """Number of tokens after which texts are truncated."""
        return int(self.model.max_seq_length)

    def encode(
        self,
        texts: list[str],
        seconds: list[str] | None = None,
    ) -> Floats:
        """Return the embeddings (texts, width) of texts or pairs of texts.

        Args:
            texts: Texts.
            seconds: Second texts. Each pair is one input, and the longer text of a pair
                is truncated first.
        """
        inputs = texts if seconds is None else list(zip(texts, seconds, strict=True))
        vectors = self.model.encode(
            inputs, batch_size=self.batch_size, show_progress_bar=False
        )
        vectors = vectors.astype(np.float32, copy=False)
        is_valid = np.abs(vectors) <= LARGEST_NUMBER
        if not is_valid.all():
            raise UserError(
                f"the encoder {self.name} returns {(~is_valid).sum():,} numbers that "
                f"are not finite or over {LARGEST_NUMBER:g}"
            )
        return vectors

    def save(self, folder: str | Path) -> None:
        """Save the weights, the tokenizer and the settings to a folder."""
        self.model.save(str(Path(folder) / MODEL), create_model_card=False)
        settings = {
            "pooling": "folder",  # which the model now is
            "max_tokens": self.max_tokens,
            "batch_size": self.batch_size,
        }
        (Path(folder) / SETTINGS).write_text(json.dumps(settings))


def prepare_tokenizer(name: str, model: Any) -> Any:
    """Return the tokenizer of a model, which pads on the right with some token."""
    tokenizer = model.tokenizer
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(f"the encoder {name} has no tokenizer")
    num_embeddings = model[0].auto_model.get_input_embeddings().num_embeddings
    if max(tokenizer.get_vocab().values()) >= num_embeddings:
        raise UserError(
            f"the encoder {name} has {num_embeddings} token embeddings, its tokenizer "
            f"has tokens without one"
        )
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise UserError(f"the encoder {name} has neither a pad token nor an end token")
    return tokenizer


def count_positions(model: Any) -> int:
    """Return the longest input of a model in tokens.

    RoBERTa's positions begin after the index of its padding.
    """
    longest = int(model.max_seq_length)
    embeddings = getattr(model[0].auto_model, "embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    if positions is None:
        return longest
    padding = -1 if positions.padding_idx is None else positions.padding_idx
    return min(longest, positions.num_embeddings - padding - 1)


def check_encoder(name: str, *options: Any) -> None:
    """Load an encoder and encode a batch, so that its faults end a job at once.

    Args:
        name: Folder, hub name or `minilm`.
        options: Further arguments of `TextEncoder`.
    """
    encoder = TextEncoder(name, *options)
    modules = Path(locate_encoder(name), "modules.json")
    weights = name
    if modules.is_file():
        weights = str(modules.parent / json.loads(modules.read_text())[0]["path"])
    # the library fills missing weights at random, this refuses them
    load_pretrained(weights, type(encoder.model[0].auto_model))
    try:
        encoder.encode(["a", "a long text " * encoder.max_tokens])
    except (RuntimeError, IndexError, ValueError, OverflowError) as error:
        raise UserError(f"the encoder {name} cannot encode a text ({error})") from error


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
    ) -> Floats:
        """Return the embeddings (texts, width) float32 of texts or pairs of texts.

        Args:
            texts: Texts.
            seconds: Second texts of the pairs, which are appended to the first texts.
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
