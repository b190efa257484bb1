"""Published semantic IDs: all layouts, with and without gzip, and invalid files."""

from __future__ import annotations

import gzip
import json

import pytest

from core.errors import UserError
from models.retrieval.tokenizers.published import (
    catalogue_codes,
    parse_published,
    read_published,
)

CODES = {"a": [1, 2, 3], "b": [0, 255, 7]}
TOKENS = {"a": ["<a_1>", "<b_2>", "<c_3>"], "b": ["<a_0>", "<b_255>", "<c_7>"]}
LAYOUTS = {
    "sids.csv": b"item_id,c1,c2,c3\na,1,2,3\nb,0,255,7\n",
    "numbers.index.json": json.dumps(CODES).encode(),
    "tokens.index.json": json.dumps(TOKENS).encode(),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("zipped", [False, True])
def test_every_layout_reads_to_the_same_codes(tmp_path, name, zipped):
    path, content = tmp_path / name, LAYOUTS[name]
    if zipped:
        path, content = tmp_path / f"{name}.gz", gzip.compress(content)
    path.write_bytes(content)

    sids, digest = read_published(str(path))

    assert sids == CODES
    assert len(digest) == 64


def test_codes_are_in_the_order_of_the_catalogue_without_other_items():
    assert catalogue_codes(CODES, ["b"], "f").tolist() == [[0, 255, 7]]
    assert catalogue_codes(CODES, ["b", "a"], "f").tolist() == [[0, 255, 7], [1, 2, 3]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.csv", b"item_id,c1\na,1\na ,2\n"),
        ("x.csv", b"item_id,c1,c2\na,1,2\nb,1\n"),
        ("x.csv", b"item_id,c1\na,-1\n"),
        ("x.csv", b"item_id,c1\na,65536\n"),
        ("x.csv", b"item_id,c1\n"),
        ("x.json", b'{"a": [1], "a": [2]}'),
        ("x.json", b'{"a": 3}'),
        ("x.json", b'{"a": [1.5]}'),
        ("x.json", b"[1, 2]"),
        ("x.json", b'{"a": [1]'),
        ("x.json.gz", b"\x1f\x8bdamaged"),
        ("x.tsv", b""),
    ],
)
def test_malformed_files_are_rejected_with_their_name(name, content):
    with pytest.raises(UserError, match=name):
        parse_published(content, name)
