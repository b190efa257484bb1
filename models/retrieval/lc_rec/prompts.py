"""Instruction prompts of LC-Rec, and the tokenizers that encode them.

Each task of LC-Rec (Zheng et al., 2024) is an instruction and a response. The paper has
many wordings per task, which are not published in full; here each task has one wording
of our own.

Without a pretrained language model, the vocabulary consists of the instructions' words
and the most frequent words of the items' titles. It is not stored, as it is a function
of the tables.

Shapes: `N` items, `M` tokens of the longest title.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from core.errors import UserError
from models.retrieval.data import Catalogue
from models.text.language_model import LANGUAGE_MODEL
from models.text.pretrained import pretrained_source

Task = Literal["next", "next_title", "title_to_item", "item_to_title"]

TASKS: tuple[Task, ...] = get_args(Task)
"""Sequential item prediction; asymmetric item prediction, whose response is the title;
and the two directions of the explicit index-language alignment (Sec. 3.3 of LC-Rec).
The tasks on intentions and preferences are not implemented, as they need texts written
by another language model."""

TEMPLATE = "### Instruction: {} ### Response:"
"""Template around every instruction."""

SEPARATOR = ","
"""Text between two items of a history."""

INSTRUCTIONS = {
    "next": (
        "The user took these items, one after the other: {} . Which item comes next?"
    ),
    "next_title": (
        "The user took these items, one after the other: {} . "
        "What is the title of the item that comes next?"
    ),
    "title_to_item": "Which item has this title: {} ?",
    "item_to_title": "What is the title of this item: {} ?",
}
"""Instruction of each task, with braces for the codes of items or a title."""

WORD = re.compile(r"\w+|[^\w\s]")
"""A word or a sign."""

MAX_TITLE_TOKENS = 32
"""Most tokens of a title."""

UNKNOWN = 0
"""Token of `Words` for all words outside of the vocabulary."""

BEGIN = 1
"""Token of `Words` at the beginning of a prompt."""

END = 2
"""Token of `Words` at the end of a title."""


class Words:
    """A tokenizer of whole words in lower case.

    Every tokenizer has `size`, the number of tokens; `begin`, the tokens at the
    beginning of a prompt; `end`, the token at the end of a title; and `encode(text)`.
    """

    def __init__(self, titles: Iterable[str], max_words: int) -> None:
        """Assign numbers to words of the instructions and to frequent words of titles.

        Args:
            titles: Titles of all items.
            max_words: Most words to add from titles.
        """
        instruction_words: dict[str, None] = {}  # in order of appearance
        for text in (*INSTRUCTIONS.values(), TEMPLATE, SEPARATOR):
            instruction_words |= dict.fromkeys(split_words(text))
        counts: Counter[str] = Counter()
        for title in titles:
            words = split_words(title)
            counts.update(word for word in words if word not in instruction_words)
        by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
        words = [*instruction_words, *by_frequency[:max_words]]
        self.number = {word: 3 + i for i, word in enumerate(words)}
        self.size = 3 + len(self.number)
        self.begin, self.end = [BEGIN], END

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, `UNKNOWN` for words not in the vocabulary."""
        return [self.number.get(word, UNKNOWN) for word in split_words(text)]


class Pretrained:
    """The tokenizer of a pretrained language model."""

    def __init__(self, name: str) -> None:
        """Load the tokenizer.

        Args:
            name: Hugging Face name or folder of the language model.
        """
        from transformers import AutoTokenizer

        with pretrained_source(name, LANGUAGE_MODEL) as source:
            self.tokenizer = AutoTokenizer.from_pretrained(**source)
        begin = self.tokenizer.bos_token_id
        self.begin = [] if begin is None else [begin]
        if self.tokenizer.eos_token_id is None:
            raise UserError(
                f"the tokenizer of {name} has no end token, which titles need"
            )
        self.end = self.tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return [int(token) for token in tokens]


Tokenizer = Words | Pretrained


def split_words(text: str) -> list[str]:
    """Return the words and signs of a text in lower case."""
    return WORD.findall(text.lower().replace("{}", " "))


def encode_prompt(tokenizer: Tokenizer, task: str) -> dict[str, list[int]]:
    """Return the tokens `before` and `after` a task's input and `between` items."""
    before, after = TEMPLATE.format(INSTRUCTIONS[task]).split("{}")
    return {
        "before": [*tokenizer.begin, *tokenizer.encode(before)],
        "between": tokenizer.encode(SEPARATOR),
        "after": tokenizer.encode(after),
    }


def read_titles(catalogue: Catalogue, column: str) -> list[str] | None:
    """Return the title of each item, empty if missing.

    Args:
        catalogue: Catalogue with the items' titles.
        column: Text column with the titles, as named in the source file.

    Returns:
        Titles by item_index, or None if the items have no such column.
    """
    items = catalogue.versions.get("items")
    if items is None or column not in items.info.texts:
        return None
    name = f"text_{column}"
    table = items.read(["item_index", name]).sort_by("item_index")
    return [text or "" for text in table[name].to_pylist()]


def encode_titles(tokenizer: Tokenizer, titles: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Encode titles, cut them to `MAX_TITLE_TOKENS` and append the end token.

    Returns:
        Tokens (N, M + 1), padded with 0, and the number of tokens of each title (N,).
    """
    rows = [tokenizer.encode(title)[:MAX_TITLE_TOKENS] for title in titles]
    tokens = [torch.tensor([*row, tokenizer.end]) for row in rows]
    padded = pad_sequence(tokens, batch_first=True)
    return padded, torch.tensor([len(row) for row in rows])
