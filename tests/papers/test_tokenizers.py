"""Tokenizers side by side, from the manifests of their SIDs."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from models.tables import UserError, commit, write_part
from models.uri import check_writable
from papers.tokenizers import Config, run
from pipelines.data.schemas import items_schema
from pipelines.data.sids.tokenize import TokenizerConfig, tokenize


def test_tokenizers_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folders = []
    for name, codes in {"one": [[0, 0], [0, 0], [1, 0], [1, 1]], "two": [[0, 0], [0, 1], [1, 0], [1, 1]]}.items():
        items = tmp_path / name / "items"
        check_writable(str(items))
        schema = items_schema()
        columns = pa.table({"item_index": pa.array(range(4), pa.int32()), "item_id": list("abcd")}, schema=schema)
        commit(str(items), "items", schema, [write_part(str(items), columns)], config={}, inputs={})
        index = tmp_path / name / "index.json"
        index.write_text(
            json.dumps({item: [f"<a_{a}>", f"<b_{b}>"] for item, (a, b) in zip("abcd", codes, strict=True)})
        )
        folders.append(str(tmp_path / name / "sids"))
        tokenize(str(items), folders[-1], TokenizerConfig("published", published=str(index)), say=lambda _: None)
    run(Config(folders))
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    one, two = ([cell.strip() for cell in line if cell] for line in lines[3:5])
    assert one[:4] == [folders[0], "published", "4", "2 / 1.5 / 1.33"]  # with the conflict code
    assert one[4:7] == ["2 / 2", "100% / 100%", "1.00 / 0.81"]
    assert one[7:] == ["3", "0.5000", "2"]
    assert two[3] == "2 / 2"
    assert two[7:] == ["4", "0.0000", "1"]
    with pytest.raises(UserError, match=r"which holds no table sids; give a folder that jobs\.tokenize made"):
        run(Config([str(tmp_path)]))
