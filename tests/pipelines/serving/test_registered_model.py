"""The best checkpoint as a registered model: with its hashes, and the same ranking in a
fresh process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch

from jobs.compare import Config, run
from models.build import load_model
from models.retrieval.data import Catalogue, HistoryBatch
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit import FitConfig
from pipelines import tracking
from pipelines.serving import package
from pipelines.serving.registered_model import register
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training

TIGER = {
    "name": "tiger",
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "beam": 24,
}

FRESH = """
import json, sys
import mlflow, pandas
uri, model = sys.argv[1:]
mlflow.set_tracking_uri(uri)
loaded = mlflow.pyfunc.load_model(model)
ranked = loaded.predict(pandas.DataFrame({"history": json.loads(sys.stdin.read())}), params={"k": 5})
print(json.dumps(ranked["item_id"].tolist()))
"""


def train_nothing(
    folder: Path, name: str, parent: str | None, seed: int, ndcg: float
) -> tracking.RunRef:
    """An untrained TIGER as jobs.train leaves a trained one, the trial of a sweep where
    there is a parent.
    """
    tables, sids = str(folder / "small/tables"), str(folder / "small/sids")
    setup = build_training(
        TIGER, FitConfig(batch_size=8, seed=seed), Inputs(tables, sids)
    )
    model = setup.model.config_to_dict(setup.config)
    config = {"model": model, "fit": {"seed": seed}, "tables": tables, "sids": sids}
    uri, hashes = f"sqlite:///{folder}/mlflow.db", setup.catalogue.hashes
    opened = tracking.open_run(
        uri,
        "retrieval/small",
        name,
        str(folder),
        config=config,
        hashes=hashes,
        parent=parent,
        tags={"sweep.trial": name},
    )
    checkpoint.save(
        folder / name,
        setup.model,
        setup.checkpoint(epoch=1, step=4, tracking=opened.to_dict()),
    )
    logger = tracking.Logger(opened)
    logger.log({"best/ndcg@10": ndcg}, 4)
    logger.tag(checkpoint=str(folder / name))
    logger.end()
    return opened


@pytest.fixture(scope="module")
def folder(
    new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A sweep of two trials, of which the second is the better one."""
    folder = tmp_path_factory.mktemp("registered")
    write_tables(folder / "small")
    tags = {
        tracking.KIND_TAG: "sweep",
        "sweep.axes": '["fit.seed"]',
        "sweep.metric": "val/ndcg@10",
    }
    uri = new_store(folder)
    sweep = tracking.open_run(
        uri, "retrieval/small", "seeds", str(folder), config={}, hashes={}, tags=tags
    )
    for seed, ndcg in ((1, 0.2), (2, 0.3)):
        train_nothing(folder, f"tiger-{seed}", sweep.run_id, seed, ndcg)
    tracking.Logger(sweep).end()
    return folder


@pytest.mark.long
def test_the_best_of_a_sweep_ranks_alike_in_a_fresh_process(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    uri = f"sqlite:///{folder}/mlflow.db"
    run(Config(sweep="seeds", tracking_uri=uri, register="small"))
    assert (
        "version 1 of small is the best checkpoint of tiger-2"
        in capsys.readouterr().out
    )
    (version,) = tracking.connect(uri).search_model_versions("name = 'small'")
    about = checkpoint.read(folder / "tiger-2")
    assert version.tags[tracking.WEIGHTS_TAG] == checkpoint.weights_hash(
        str(folder / "tiger-2")
    )
    assert {
        name: version.tags[f"table.{name}"] for name in about.hashes
    } == about.hashes
    assert {"table.trie", "table.sids", "table.items"} <= version.tags.keys()
    assert version.description == "tiger-2: val/ndcg@10 0.3000"

    model, _ = load_model(
        folder / "tiger-2",
        Catalogue.load(f"{folder}/small/tables", f"{folder}/small/sids"),
    )
    history = torch.tensor([[1, 8, -1], [5, 4, 23]])
    users = torch.zeros(2, dtype=torch.int64)
    items, _ = model.recommend(
        HistoryBatch(
            history=history,
            history_length=torch.tensor([2, 3]),
            user=users,
        ),
        5,
    )  # type: ignore[operator]
    names = [
        [f"item-{item:03d}" for item in row if item >= 0] for row in history.tolist()
    ]
    fresh = subprocess.run(
        [sys.executable, "-c", FRESH, uri, "models:/small/1"],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert fresh.returncode == 0, fresh.stderr
    assert json.loads(fresh.stdout.splitlines()[-1]) == [
        [f"item-{i:03d}" for i in row] for row in items.tolist()
    ]


def test_a_checkpoint_is_registered_once(folder: Path) -> None:
    uri = f"sqlite:///{folder}/mlflow.db"
    (found,) = tracking.connect(uri).search_runs(
        ["1"], "attributes.run_name = 'tiger-1'"
    )
    ref = tracking.RunRef(uri, "retrieval/small", found.info.run_id)
    first = register(ref, "other")
    assert register(ref, "other").version == first.version
    assert len(tracking.connect(uri).search_model_versions("name = 'other'")) == 1


def test_unknown_items_are_counted_and_integers_are_ids(folder: Path) -> None:
    uri = f"sqlite:///{folder}/mlflow.db"
    (found,) = tracking.connect(uri).search_runs(
        ["1"], "attributes.run_name = 'tiger-1'"
    )
    register(tracking.RunRef(uri, "retrieval/small", found.info.run_id), "counted")
    with package.use_store(uri):
        model = mlflow.pyfunc.load_model("models:/counted/1")
    assert model.metadata.signature.outputs.input_names() == [
        "item_id",
        "score",
        "unknown_items",
        "note",
    ]

    def ask(*histories: list[Any]) -> pd.DataFrame:
        return model.predict(
            pd.DataFrame({"history": list(histories)}), params={"k": 3}
        )

    with pytest.warns(
        UserWarning,
        match="a history has no item of the catalogue, so its ranking is empty",
    ) as said:
        answer, _ = (
            ask(["item-001", "new"], ["new", "newer"], [], ["item-001"]),
            ask(["new"]),
        )
    assert (
        sum(warning.category is UserWarning for warning in said) == 1
    )  # not for each request
    assert answer["unknown_items"].tolist() == [1, 2, 0, 0]
    assert [len(items) for items in answer["item_id"]] == [3, 0, 0, 3]
    assert answer["item_id"][0] == answer["item_id"][3]
    inner = model.unwrap_python_model()
    index = inner.ranker.requests.index
    index["17"] = index["item-001"]  # a catalogue whose ids are digits
    for ids in ([17], [np.int64(17)], ["17"]):
        assert ask(ids)["item_id"][0] == answer["item_id"][3]
    for k in (0, -1):
        with pytest.raises(UserError, match=f"k is {k}; give the number"):
            model.predict(pd.DataFrame({"history": [["item-001"]]}), params={"k": k})
    for wrong in (17.0, None, True, ["17"]):
        with pytest.raises(
            UserError, match=re.escape(f"history has {wrong!r}; an item id is a string")
        ):
            ask(["item-001", wrong])
    for wrong in (None, "item-001"):
        with pytest.raises(
            UserError, match=f"history is {wrong!r}; give a list of item ids"
        ):
            inner.predict(None, pd.DataFrame({"history": [wrong]}))
    with pytest.raises(UserError, match="history is None; give a list of item ids"):
        ask(["item-001"], None)


def test_a_call_keeps_to_allowed_items_and_leaves_out_known_ones(folder: Path) -> None:
    """Against the whole ranking; a set is worked out once."""
    uri = f"sqlite:///{folder}/mlflow.db"
    (found,) = tracking.connect(uri).search_runs(
        ["1"], "attributes.run_name = 'tiger-1'"
    )
    register(tracking.RunRef(uri, "retrieval/small", found.info.run_id), "allowed")
    with package.use_store(uri):
        model = mlflow.pyfunc.load_model("models:/allowed/1")
    histories = [[f"item-{i:03d}" for i in row] for row in ([3], [1, 2, 3] * 9, [5])]
    frame = pd.DataFrame({"history": histories})

    def ask(**params: Any) -> list[list[str]]:
        return model.predict(frame, params={"k": 24, **params})["item_id"].tolist()

    every = ask()
    inner = model.unwrap_python_model()
    for some in (
        ["item-003"],
        ["item-001", "item-005", "item-009", "no such item"],
        every[0],
    ):
        for unseen in (False, True):
            expected = [
                [
                    item
                    for item in ranked
                    if item in some and not (unseen and item in history)
                ]
                for ranked, history in zip(every, histories, strict=True)
            ]
            assert ask(allowed=some, unseen=unseen) == expected
    assert ask() == every
    assert len(inner.ranker.allowed_sets) == 3
    for wrong, words in (
        ([], "allowed has 0 ids"),
        *(
            ([none], "allowed has 1 ids, and none of an item of the catalogue")
            for none in ("new", "")
        ),
    ):
        with pytest.raises(UserError, match=words):
            ask(allowed=wrong)


def test_what_cannot_be_registered_is_refused(folder: Path) -> None:
    uri = f"sqlite:///{folder}/mlflow.db"
    opened = tracking.open_run(
        uri,
        "retrieval/small",
        "started",
        str(folder),
        config={"model": {"name": "tiger"}},
        hashes={},
    )
    with pytest.raises(
        UserError, match=r"the run 'started' .* has no checkpoint to register"
    ):
        register(opened, "small")
    encoder = tracking.open_run(
        uri,
        "retrieval/small",
        "encoder",
        str(folder),
        config={"model": {"name": "sid_mlp_pp_encoder"}},
        hashes={},
    )
    tracking.Logger(encoder).tag(checkpoint="/somewhere")
    with pytest.raises(
        UserError, match="'sid_mlp_pp_encoder' is not served: it ranks nothing"
    ):
        register(encoder, "small")
