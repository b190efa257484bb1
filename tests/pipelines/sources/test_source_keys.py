"""The page about own logs names every key of mapping files, and its examples are mappings."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from pipelines.data.sources.load import load_source
from pipelines.data.sources.readers import present_hint, require_columns
from pipelines.data.sources.transforms import read_transforms

from models.tables import UserError
from tests.source_keys import BEGIN, SECTIONS, described, page, rows

PAGE = Path("docs/own_log.md")


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "write it anew: python -m tests.source_keys docs/own_log.md"
    assert page(text.replace("| `files` |", "| `fils` |")) == text


def test_every_key_says_what_it_is() -> None:
    keys = [key for key, _, _ in rows()]
    assert {"delimiter", "header", "format", "explode.separator", "items.keep", "users.encoding"} <= set(keys)
    assert len(keys) == len(set(keys))
    for key, text, _ in rows():
        assert len(text) > 15, key
    for kind in SECTIONS.values():
        assert is_dataclass(kind)
        assert set(described(kind)) >= {field.name for field in fields(kind) if field.name != "own"}


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="has no lines"):
        page(f"{BEGIN} and no more")


def test_the_examples_of_the_page_are_mappings(tmp_path: Path) -> None:
    examples = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    for number, example in enumerate(examples):
        if "item" in example:
            path = tmp_path / f"{number}.yaml"
            path.write_text(yaml.safe_dump(example if "layout" in example else {**BASE, **example}))
            load_source(str(path))
        else:
            read_transforms(example["transforms"])
    for name in re.findall(r"`(\w+\.yaml)`", PAGE.read_text()):
        assert name == "shop.yaml" or Path("jobs/configs/sources", name).exists()


BASE = {"layout": "mapping", "files": "log.tsv", "user": "user", "time": {"unit": "order"}}


def test_an_error_about_a_column_lists_those_that_are_there() -> None:
    with pytest.raises(
        UserError, match=r"log.csv has no column 'itm'; the nearest is 'item' of user, item, t; correct"
    ):
        require_columns("log.csv", ["itm"], ["user", "item", "t"])
    many = present_hint("c7", [f"c{n}" for n in range(50)])
    assert many.startswith("the nearest is 'c7' of c7, c47,")
    assert many.endswith(" and 10 more")
    assert present_hint("a", []) == "it has none"
