"""Items of a served request that are not in the catalogue, told by their content: attributes, and the text encoded.

    new = NewItems(catalogue, columns_of(items, text), load_saved("encoder"))
    new.read([{"item_id": "p1", "title": "Beagle asleep", "author": "a3"}])     # new_numbers, new_categories, new_text

What is not given counts as unknown, and so does a category that the catalogue does not have.

Shapes: `n` items, `W` width of text.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from models.actions.batch import ActionsCatalogue
from models.config import hint
from models.item_ids import item_id
from models.latest import TEXTS, Latest
from models.own_features import CATEGORY, NUMBER
from models.tables import Manifest, UserError
from models.text_encoder import Floats, TextEncoder, TfidfEncoder, text_columns, texts_of

Post = dict[str, Any]
"""What is said of an item: its `item_id`, and by name what the columns of the catalogue's items hold."""


def template_of(text: Manifest | None) -> str:
    """How the text of items was made of their columns."""
    return str(text.config.get("template", "")) if text else ""


def columns_of(items: Manifest, text: Manifest | None) -> list[str]:
    """Columns of the items that models read: attributes, and of a model with `text` what that is made of."""
    there = [column["name"] for column in items.schema]
    read = [name for name in there if name.startswith((NUMBER, CATEGORY))]
    return list(dict.fromkeys([*read, *(text_columns(there, template_of(text)).values() if text else ())]))


def name_of(column: str) -> str:
    """What a request calls it: `title` of `text_title`."""
    return column.partition("_")[2]


class NewItems:
    """See the module."""

    def __init__(
        self, catalogue: ActionsCatalogue, columns: Sequence[str], encoder: TextEncoder | TfidfEncoder | None = None,
        template: str = "", most: int = TEXTS,
    ) -> None:  # fmt: skip
        """`columns` as of `columns_of`; `encoder` and `template`, of a model that reads text, as for the catalogue."""
        self.attributes, self.columns, self.encoder, self.template = catalogue.attributes, columns, encoder, template
        self.width = catalogue.text.shape[1] if catalogue.text.numel() else 0
        self.names = list(dict.fromkeys(map(name_of, columns)))
        self.kept: Latest[Floats] = Latest(most)

    def named(self, posts: Sequence[Post]) -> dict[str, Post]:
        """The posts by their id; UserError for one without, twice, or with what the model does not read."""
        found: dict[str, Post] = {}
        for post in posts:
            if not (item := (post or {}).get("item_id")):
                raise UserError("new_items has an item without item_id; give each the id that candidates call it by")
            item = item_id("new_items", item)
            if item in found:
                raise UserError(f"new_items has '{item}' twice; give each item once")
            for name in post:
                if name not in ("item_id", *self.names):
                    raise UserError(
                        f"new_items has '{name}' of '{item}', which the model does not read; "
                        f"{hint(name, self.names, 'it reads nothing of items but their ids')}"
                    )
            found[item] = post
        return found

    def read(self, posts: Sequence[Post]) -> dict[str, Tensor]:
        """new_numbers, new_categories and new_text (n, ...) as of `models/actions/batch.py`."""
        columns = {"item_id": pa.array([item_id("new_items", post["item_id"]) for post in posts])}
        for column in self.columns:
            kind, name = (pa.float32() if column.startswith(NUMBER) else pa.string()), name_of(column)
            try:
                columns[column] = pa.array([post.get(name) for post in posts], kind, from_pandas=True)
            except pa.ArrowException as error:
                what = "numbers" if column.startswith(NUMBER) else "texts"
                raise UserError(
                    f"'{name}' of new_items is of {what} ({str(error).splitlines()[0]}); give {what}"
                ) from error
            if column.startswith(NUMBER) and pc.any(pc.is_inf(columns[column])).as_py():
                raise UserError(f"'{name}' of new_items has an infinite number; leave out what is not known")
        table = pa.table(columns)
        numbers, categories = self.attributes.read(table)
        text = self.vectors(texts_of(table, self.template)[0]) if self.width else np.zeros((len(posts), 0), np.float32)
        return {"new_numbers": numbers, "new_categories": categories, "new_text": torch.from_numpy(text)}

    def vectors(self, texts: list[str]) -> Floats:
        """(n, W) of the texts, each encoded once; zeros, with a warning, where there is no encoder."""
        if self.encoder is None:
            warnings.warn(
                f"the model comes without its text encoder; {len(texts)} new items count as without text", stacklevel=2
            )
            return np.zeros((len(texts), self.width), np.float32)
        encoder = self.encoder
        found = self.kept.of(texts, lambda missing: dict(zip(missing, encoder.encode(missing), strict=True)))
        return np.stack(found).astype(np.float32)
