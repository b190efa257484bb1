"""Instruction prompts of LC-Rec, and the tokenizers that encode them.

Each task of LC-Rec (Zheng et al., 2024) is an instruction and a response. The published
prompts have many wordings per task, which the paper does not print in full; here each
task has one wording of our own.

Without a pretrained language model, the vocabulary consists of the instructions' words
and the most frequent words of the items' titles. The same tables give the same
vocabulary, so it is not stored.

Shapes: `N` items, `M` tokens of the longest title.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from models.retrieval.data import Catalogue
from models.storage.tables import UserError, join, read_manifest, read_table
from models.text.text_encoder import load_tokenizer

TASKS = ("next", "next_title", "title_to_item", "item_to_title")
"""Sequential item prediction; asymmetric item prediction, whose response is the title;
and the two directions of the explicit index-language alignment (Sec. 3.3 of LC-Rec).
The tasks on intentions and preferences are left out: they need texts that another
language model wrote."""

FORM = "### Instruction: {} ### Response:"
"""Template around every instruction."""

SEPARATOR = ","
"""Text between two items of a history."""

INSTRUCTIONS = {
    "next": "The user took these items, one after the other: {} . Which item comes next?",
    "next_title": "The user took these items, one after the other: {} . What is the title of the item that comes next?",
    "title_to_item": "Which item has this title: {} ?",
    "item_to_title": "What is the title of this item: {} ?",
}
"""Instruction of each task; the braces stand for items' codes or a title."""

WORD = re.compile(r"\w+|[^\w\s]")


class Words:
    """A tokenizer of whole words in lower case: 0 is any other word, 1 begins a prompt, 2 ends a title.

    Every tokenizer has `size`, the tokens of its vocabulary; `begin`, the tokens at the
    beginning of a prompt; `end`, the token at the end of a title; and `encode(text)`.
    """

    def __init__(self, titles: Iterable[str], max_words: int) -> None:
        """Take the words of the instructions, then the `max_words` most frequent others of `titles`."""
        fixed: dict[str, int] = {}
        for text in (*INSTRUCTIONS.values(), FORM, SEPARATOR):
            fixed |= dict.fromkeys(split_words(text), 0)
        counts: Counter[str] = Counter()
        for title in titles:
            counts.update(word for word in split_words(title) if word not in fixed)
        chosen = sorted(counts, key=lambda word: (-counts[word], word))[:max_words]
        self.number = {word: 3 + i for i, word in enumerate([*fixed, *chosen])}
        self.size, self.begin, self.end = 3 + len(self.number), [1], 2

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [self.number.get(word, 0) for word in split_words(text)]


class Pretrained:
    """The tokenizer of a pretrained language model."""

    def __init__(self, name: str, size: int) -> None:
        """Load the tokenizer `name`; `size` is the number of rows of the model's embedding."""
        self.tokenizer, _ = load_tokenizer(name, 1)
        self.size = size
        self.begin = (
            [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        )
        if self.tokenizer.eos_token_id is None:
            raise UserError(
                f"the tokenizer of {name} has no end token, which titles end with; give another model.lm"
            )
        self.end = self.tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        return [
            int(token)
            for token in self.tokenizer.encode(text, add_special_tokens=False)
        ]


Tokenizer = Words | Pretrained


def split_words(text: str) -> list[str]:
    """Return the words and signs of a text in lower case."""
    return WORD.findall(text.lower().replace("{}", " "))


def encode_prompt(tokenizer: Tokenizer, task: str) -> dict[str, list[int]]:
    """Return the tokens `before` and `after` the task's input, and `between` two items of a history."""
    before, after = FORM.format(INSTRUCTIONS[task]).split("{}")
    return {
        "before": [*tokenizer.begin, *tokenizer.encode(before)],
        "between": tokenizer.encode(SEPARATOR),
        "after": tokenizer.encode(after),
    }


def read_titles(catalogue: Catalogue, column: str) -> list[str] | None:
    """Return the text `column` of each item, empty if missing; None if no item has the
    column.
    """
    uri, name = join(catalogue.tables, "items"), f"text_{column}"
    if not catalogue.tables:
        return None
    schema = read_manifest(uri, "items").schema
    if name not in [column["name"] for column in schema]:
        return None
    table = read_table(uri, "items", ["item_index", name]).sort_by("item_index")
    return [text or "" for text in table[name].to_pylist()]


def encode_titles(
    tokenizer: Tokenizer, titles: Sequence[str], max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the first `max_tokens` tokens (N, M) of each title, padded with 0, and their number (N,)."""
    rows = [tokenizer.encode(title)[:max_tokens] for title in titles]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row, dtype=torch.long)
    return tokens, lengths
