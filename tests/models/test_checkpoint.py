"""Checkpoints: what was saved comes back, and what does not belong together is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_tables import write_tables

from models import checkpoint, registry
from models.fit import FitConfig
from models.retrieval.data import Catalogue
from models.setup import set_up
from models.tables import UserError
from models.train import main

SASREC = {"name": "sasrec", "dim": 16, "num_layers": 1, "max_history": 12}
TIGER = {"name": "tiger", "d_model": 16, "d_ff": 32, "num_heads": 2, "d_kv": 8, "num_encoder_layers": 1,
         "num_decoder_layers": 1, "beam": 24}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("checkpoint")
    tables, sids = write_tables(folder / "small")
    other, other_sids = write_tables(folder / "other", items=20)
    for name, model in {"sasrec": SASREC, "tiger": TIGER}.items():
        setup = set_up(model, FitConfig(batch_size=8), tables, sids)
        checkpoint.save(folder / name, setup.model, setup.checkpoint(epoch=3), {"cursor": {"epoch": 3}})
    return {
        "tables": tables, "sids": sids, "other": other, "other_sids": other_sids,
        "sasrec": str(folder / "sasrec"), "tiger": str(folder / "tiger"),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["sasrec", "tiger"])
def test_a_loaded_model_ranks_as_the_saved_one(saved: dict[str, str], name: str) -> None:
    catalogue = Catalogue.load(saved["tables"], saved["sids"])
    model, about = checkpoint.load(saved[name], catalogue)
    again, _ = checkpoint.load(saved[name], catalogue, name=name)
    assert about.epoch == 3
    assert set(about.hashes) == ({"sequences", "items", "sids", "trie"} if name == "tiger" else {"sequences", "items"})
    batch = {"history": torch.tensor([[1, 2, 3]]), "history_length": torch.tensor([3]), "user": torch.tensor([7])}
    for ours, theirs in zip(model.recommend(batch, 10), again.recommend(batch, 10), strict=True):
        assert torch.equal(ours, theirs)
    assert checkpoint.load_state(saved[name]) == {"cursor": {"epoch": 3}}


def test_another_model_is_refused(saved: dict[str, str]) -> None:
    catalogue = Catalogue.load(saved["tables"], saved["sids"])
    with pytest.raises(UserError, match="is a checkpoint of the model 'sasrec', not of 'tiger'"):
        checkpoint.load(saved["sasrec"], catalogue, name="tiger")
    wider = registry.build(registry.config_from_dict({**SASREC, "dim": 32}), catalogue)
    with pytest.raises(UserError, match=r"does not fit the model.*size mismatch"):
        checkpoint.load_weights(wider, saved["sasrec"])


def test_other_tables_are_refused(saved: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"belongs to another table 'items'.*evaluate on the tables"):
        checkpoint.load(saved["sasrec"], Catalogue.load(saved["other"]))
    with pytest.raises(UserError, match="table 'sids' that is not given"):
        checkpoint.load(saved["tiger"], Catalogue.load(saved["tables"]))
    with pytest.raises(UserError, match="were made from other items"):
        Catalogue.load(saved["tables"], saved["other_sids"])


def test_a_trie_of_other_sids_is_refused(saved: dict[str, str], tmp_path: Path) -> None:
    catalogue = Catalogue.load(saved["tables"], saved["sids"])
    catalogue.hashes["trie"] = "0" * 64
    with pytest.raises(UserError, match=r"belongs to another table 'trie'.*give the --sids"):
        checkpoint.load(saved["tiger"], catalogue)


def copied(saved: dict[str, str], folder: Path) -> Path:
    for file in Path(saved["sasrec"]).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_damage_is_named(saved: dict[str, str], tmp_path: Path) -> None:
    catalogue = Catalogue.load(saved["tables"])
    with pytest.raises(UserError, match=r"not a checkpoint: it holds no config\.json"):
        checkpoint.read(tmp_path)
    broken = copied(saved, tmp_path)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-50])
    with pytest.raises(UserError, match=r"model\.safetensors has \d+ bytes, config\.json says \d+: truncated"):
        checkpoint.load(broken, catalogue)
    content = json.loads((broken / "config.json").read_text())
    content["files"]["model.safetensors"] -= 50  # the listing agrees, the file is still cut off
    (broken / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="not a whole safetensors file"):
        checkpoint.load(broken, catalogue)
    (broken / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        checkpoint.load(broken, catalogue)
    (broken / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        checkpoint.load(broken, catalogue)


def test_a_checkpoint_without_state_cannot_be_resumed(saved: dict[str, str], tmp_path: Path) -> None:
    broken = copied(saved, tmp_path)
    (broken / "state.pt").unlink()
    with pytest.raises(UserError, match=r"holds no state\.pt"):
        checkpoint.load_state(broken)


def test_saving_again_replaces_and_leaves_nothing_beside(saved: dict[str, str], tmp_path: Path) -> None:
    setup = set_up(SASREC, FitConfig(batch_size=8), saved["tables"])
    for epoch in (1, 2):
        checkpoint.save(tmp_path / "best", setup.model, setup.checkpoint(epoch=epoch))
    assert checkpoint.read(tmp_path / "best").epoch == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["best"]


def test_training_with_pytorch_alone_goes_on_where_it_was(
    saved: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = tmp_path / "sasrec.yaml"
    config.write_text(json.dumps({"model": SASREC, "fit": {"batch_size": 8, "max_epochs": 3}}))
    arguments = ["--config", str(config), "--tables", saved["tables"], "--output", str(tmp_path / "run")]
    main(arguments)
    assert "epoch   3/3" in capsys.readouterr().out
    main(arguments)
    again = capsys.readouterr().out
    assert "continuing from" in again
    assert "epoch" not in again
    assert checkpoint.read(tmp_path / "run/best").metrics["ndcg@10"] > 0.3  # random order: about 0.19
    config.write_text(json.dumps({"model": SASREC, "fit": {"batch_size": 8, "max_epochs": 4}}))
    with pytest.raises(SystemExit, match=r"run was begun with fit.max_epochs 3, not 4; give another --output"):
        main(arguments)
    config.write_text(json.dumps({"model": TIGER}))
    with pytest.raises(SystemExit, match="needs semantic IDs"):
        main(arguments)
