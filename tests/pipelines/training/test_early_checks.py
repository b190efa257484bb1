"""What a training is refused for before Ray is started: nothing here starts one, and nothing is written."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from search_tables import write_search
from training_tables import write_tables

from models.fit import FitConfig
from models.inputs import Inputs
from models.tables import UserError
from pipelines.training.run import train
from pipelines.training.settings import RayOptions

SASREC = {"name": "sasrec", "dim": 8, "num_layers": 1, "max_history": 12}
TIGER = {"name": "tiger", "d_model": 8, "d_ff": 8, "num_heads": 1, "d_kv": 4}
FIT = FitConfig(batch_size=16)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_tables(tmp_path_factory.mktemp("early"))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("fit.metric is 'ndgc@10'.* the nearest is 'ndcg@10'; known are recall@1, ", {"metric": "ndgc@10"}),
        ("fit.eval_options has 'beem', which is no option of 'tiger'.* the nearest is 'beam'",
         {"model": TIGER, "eval_options": {"beem": 3}}),
        ("fit.eval_options has 'beam', which is no option of 'sasrec'.* takes unseen", {"eval_options": {"beam": 3}}),
        ("fit.batch_size 16 does not divide by 3 workers", {"ray_options": RayOptions(num_workers=3)}),
        ("the model 'tiger' needs semantic IDs; give --sids", {"model": TIGER, "sids": None}),
        ("the teacher .*/nowhere is neither a checkpoint nor a finished run",
         {"model": {"name": "sid_mlp", "teacher": "/nowhere"}}),
        ("/nowhere/sequences is not a table", {"tables": "/nowhere"}),
        ("no tracking URI", {"storage": "s3://bucket/runs"}),
    ],
)  # fmt: skip
def test_what_is_known_before_ray_is_said_before_ray(
    made: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, changes: dict[str, Any]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    started: list[str] = []
    fit = {key: changes.pop(key) for key in ("metric", "eval_options") if key in changes}
    inputs = Inputs(changes.pop("tables", made[0]), changes.pop("sids", made[1]))
    arguments: dict[str, Any] = {
        "model": SASREC, "fit": replace(FIT, **fit), "ray_options": RayOptions(), "inputs": inputs,
        "storage": str(tmp_path / "runs"), "name": "early", "start": lambda: started.append("Ray"),
    }  # fmt: skip
    with pytest.raises(UserError, match=message):
        train(**{**arguments, **changes})
    assert not started
    assert not (tmp_path / "runs").exists()


def test_a_search_metric_is_known_by_its_labels(tmp_path: Path) -> None:
    tables, text = write_search(tmp_path)
    with pytest.raises(UserError, match=re.escape("fit.metric is 'ndcg@10'")) as caught:
        train(
            model={"name": "base"}, fit=FIT, ray_options=RayOptions(), inputs=Inputs(tables, text=text),
            storage=str(tmp_path / "runs"), name="early", start=lambda: pytest.fail("Ray was started"),
        )  # fmt: skip
    assert "known are gauc, " in str(caught.value)
