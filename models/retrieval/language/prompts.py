"""What a language model reads and writes as a recommender: instruction prompts, and the words that they are made of.

Each task of LC-Rec (Zheng et al., 2024) is an instruction and a response. The published prompts have many wordings per
task, by text that the paper does not print whole; here each task has one, in our words.

Where no pretrained language model is given, a small vocabulary is made of the instructions' words and of the most
frequent ones of the items' titles: the same tables give the same vocabulary, so no file of it is needed.

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
"""Sequential item prediction; asymmetric item prediction, whose response is the title; and the two directions of the
explicit index-language alignment (Sec. 3.3 of LC-Rec). Those from intentions and preferences need texts that another
language model wrote, which a log has not."""

FORM = "### Instruction: {} ### Response:"
"""Around every instruction."""

SEPARATOR = ","
"""Between the items of a history."""

INSTRUCTIONS = {
    "next": "The user took these items, one after the other: {} . Which item comes next?",
    "next_title": "The user took these items, one after the other: {} . What is the title of the item that comes next?",
    "title_to_item": "Which item has this title: {} ?",
    "item_to_title": "What is the title of this item: {} ?",
}
"""By task; the braces stand for what the task gives: items' codes or a title."""

WORD = re.compile(r"\w+|[^\w\s]")


class Words:
    """A vocabulary of whole words in lower case: 0 is any other word, 1 begins a prompt and 2 ends a title.

    Of every tokenizer: `size`, tokens of the vocabulary; `begin`, what a prompt begins with, a token or nothing; `end`,
    what a title ends with; `encode(text)`, tokens of the text alone."""

    def __init__(self, titles: Iterable[str], most: int) -> None:
        """The words of the instructions, then the `most` most frequent others of `titles`; ties in their order."""
        fixed = {
            word: 0
            for text in (*INSTRUCTIONS.values(), FORM, SEPARATOR)
            for word in split(text)
        }
        counts = Counter(
            word for title in titles for word in split(title) if word not in fixed
        )
        chosen = sorted(counts, key=lambda word: (-counts[word], word))[:most]
        self.number = {word: 3 + i for i, word in enumerate([*fixed, *chosen])}
        self.size, self.begin, self.end = 3 + len(self.number), [1], 2

    def encode(self, text: str) -> list[int]:
        return [self.number.get(word, 0) for word in split(text)]


class Pretrained:
    """The tokenizer of a pretrained language model."""

    def __init__(self, name: str, size: int) -> None:
        """`size` are the rows of the model's embedding."""
        self.own, _ = load_tokenizer(name, 1)
        self.size = size
        self.begin = [] if self.own.bos_token_id is None else [self.own.bos_token_id]
        if self.own.eos_token_id is None:
            raise UserError(
                f"the tokenizer of {name} has no end token, which titles end with; give another model.lm"
            )
        self.end = self.own.eos_token_id

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self.own.encode(text, add_special_tokens=False)]


Tokenizer = Words | Pretrained


def split(text: str) -> list[str]:
    """Words and signs in lower case."""
    return WORD.findall(text.lower().replace("{}", " "))


def prompt(tokenizer: Tokenizer, task: str) -> dict[str, list[int]]:
    """Tokens `before` and `after` what the task gives, and `between` two items of a history."""
    before, after = FORM.format(INSTRUCTIONS[task]).split("{}")
    return {
        "before": [*tokenizer.begin, *tokenizer.encode(before)],
        "between": tokenizer.encode(SEPARATOR),
        "after": tokenizer.encode(after),
    }


def titles_of(catalogue: Catalogue, column: str) -> list[str] | None:
    """Of each item the text `column` of the items table, "" where it has none; None where the log has no such text."""
    uri, name = join(catalogue.tables, "items"), f"text_{column}"
    if not catalogue.tables or name not in [
        each["name"] for each in read_manifest(uri, "items").schema
    ]:
        return None
    table = read_table(uri, "items", ["item_index", name]).sort_by("item_index")
    return [text or "" for text in table[name].to_pylist()]


def encoded_titles(
    tokenizer: Tokenizer, titles: Sequence[str], most: int
) -> tuple[Tensor, Tensor]:
    """((N, M) tokens of the titles' first `most`, 0 after them; (N,) their numbers)."""
    rows = [tokenizer.encode(title)[:most] for title in titles]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row, dtype=torch.long)
    return tokens, lengths
