"""Items of served requests that are not in the catalogue, read by their content.

Shapes: `n` new items, `W` width of text.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from models.actions.catalogue import ActionsCatalogue
from models.custom_features import CATEGORY, NUMBER
from models.requests import custom_schema
from models.text.text_encoder import (
    TextCache,
    TextEncoder,
    TfidfEncoder,
    format_item_texts,
    text_columns,
)


def field_name(column: str) -> str:
    """Return the name of an item's column in requests: `title` for `text_title`."""
    return column.partition("_")[2]


class NewItems:
    """Reader of the attributes and texts of new items."""

    encoder: TextEncoder | TfidfEncoder | None = None
    """Encoder of the catalogue's text."""

    def __init__(self, catalogue: ActionsCatalogue) -> None:
        """Take scales, categories and the template of texts from the catalogue."""
        text = catalogue.versions.get("text_items")
        self.template = str(text.config.get("template", "")) if text else ""
        names = [column["name"] for column in catalogue.versions["items"].schema]
        columns = [name for name in names if name.startswith((NUMBER, CATEGORY))]
        if text:
            columns += text_columns(names, self.template).values()
        self.columns = list(dict.fromkeys(columns))
        """Columns of items that the model reads: attributes and parts of the text."""
        self.attributes = catalogue.attributes
        self.width = catalogue.text.shape[1] if catalogue.text.numel() else 0
        self.cache: TextCache[str] = TextCache()

    def read(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields `new_*` of `ActionsBatch`, each a tensor (n, ...)."""
        content = [
            {column: item.get(field_name(column)) for column in self.columns}
            for item in items
        ]
        table = pa.Table.from_pylist(content, custom_schema(self.columns))
        numbers, categories = self.attributes.read(table)
        text = np.zeros((len(items), self.width), np.float32)
        if self.width and self.encoder:
            texts = format_item_texts(table, self.template)[0]
            text = self.cache.encode(texts, self.encoder.encode).astype(np.float32)
        elif self.width:
            warnings.warn(
                f"the model was saved without its text encoder; {len(items)} new items "
                "are scored without their text",
                stacklevel=2,
            )
        return {
            "new_numbers": numbers,
            "new_categories": categories,
            "new_text": torch.from_numpy(text),
        }
