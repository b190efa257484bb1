"""A look inside of checkpoints: what is written and printed, and who is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import checkpoint
from models.fit import FitConfig
from models.inputs import Inputs
from models.setup import set_up
from models.tables import UserError
from papers.diagnose import Config, profile, run, shares
from tests.training_tables import write_tables

TIGER = {
    "name": "tiger",
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 2,
    "num_decoder_layers": 1,
    "beam": 4,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("diagnose")
    tables, sids = write_tables(folder, users=12)
    found = {"tables": tables, "sids": sids}
    models: dict[str, dict[str, Any]] = {
        "tiger": TIGER,
        "nezha": {"name": "nezha", "teacher": str(folder / "tiger"), "beam": 4},
        "sasrec": {"dim": 16},
    }
    for name, model in models.items():
        setup = set_up(
            {"name": name, **model}, FitConfig(batch_size=8), Inputs(tables, sids)
        )
        checkpoint.save(folder / name, setup.model, setup.checkpoint())
        found[name] = str(folder / name)
    return found


def test_attention_and_lost_codes_are_written(
    made: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    where = {"tables": made["tables"], "sids": made["sids"], "device": "cpu"}
    run(Config(made["tiger"], output=str(tmp_path / "a"), batch_size=5, **where))
    found = json.loads((tmp_path / "a/diagnostics.json").read_text())
    assert (found["requests"], found["beam"], found["split"]) == (12, 4, "test")
    attention = found["attention"]
    assert all(
        len(attention[key]) == 2 for key in ("first", "last", "top_between")
    )  # by layer
    assert len(found["lost_without_trie"]) == 3
    assert (tmp_path / "a/attention.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "tiger on 12 requests of test" in printed
    assert "attention to the first 3 positions by layer" in printed
    again = run(
        Config(made["tiger"], output=str(tmp_path / "b"), batch_size=12, **where)
    )
    assert again["attention"]["first"] == pytest.approx(
        attention["first"], rel=1e-5
    )  # whatever the batches
    capsys.readouterr()
    nezha = run(
        Config(made["nezha"], output=str(tmp_path / "c"), split="val", beam=3, **where)
    )
    assert "attention" not in nezha
    assert not (tmp_path / "c/attention.png").exists()
    assert nezha["beam"] == 3
    assert (
        "valid codes lost without the trie, by digit, of 3 beams"
        in capsys.readouterr().out
    )


def test_shares_and_profiles_of_requests_of_any_length() -> None:
    long, short = np.full((1, 10), 0.1), np.array([[0.7, 0.1, 0.1, 0.1]])
    found = shares([long, short])
    assert found["first"] == [pytest.approx((0.3 + 0.9) / 2)]
    assert found["last"] == [pytest.approx((0.3 + 0.3) / 2)]
    assert found["uniform"] == pytest.approx((0.3 + 0.75) / 2)
    assert found["top_between"] == [0.0]
    middle = np.array([[0.0, 0.0, 0.1, 0.1, 0.6, 0.1, 0.1, 0.0]])
    assert shares([middle, long])["top_between"] == [0.5]
    np.testing.assert_allclose(
        profile([long, short], 1)[:, 0], [1.9, 0.7, 0.7, 0.7, *[1] * 6]
    )
    np.testing.assert_allclose(
        profile([long, short], -1)[:, 0], [0.7, 0.7, 0.7, 1.9, *[1] * 6]
    )


def test_who_cannot_be_looked_into(made: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="decode semantic IDs, and 'sasrec' does not"):
        run(Config(made["sasrec"], made["tables"], output=str(tmp_path), device="cpu"))
