"""The decode benchmark has a catalogue like the paper's, and complete rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks import decode, harness
from models.dataset.encoding import PAD
from models.retrieval.data import RetrievalDataset
from models.retrieval.search.trie import Trie
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit import FitConfig
from models.training.memory import resident_peak_mb
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training


def test_the_catalogue_branches_like_the_papers():
    codes = decode.random_codes(25_000, torch.Generator().manual_seed(0))
    trie = Trie(codes, (256, 256, 256, 256))
    assert trie.num_items == 25_000
    assert trie.branching() == pytest.approx(decode.MEAN_BRANCHING, rel=0.05)
    lengths = [
        len(h)
        for h in decode.random_histories(1024, 25_000, torch.Generator().manual_seed(0))
    ]
    assert sum(lengths) / 1024 == pytest.approx(9, abs=0.8)
    assert lengths == sorted(lengths)


@pytest.mark.long
def test_rows_are_json_lines_with_all_that_is_promised(tmp_path):
    variants = ["hf", "sid_mlp_fast"]  # a process for the memory of each
    rows = decode.decode(
        runs=2,
        threads=1,
        items=500,
        variants=variants,
        batches=(1, 2),
        beams=(4,),
        slow=(2, 4),
    )
    with (tmp_path / "rows.jsonl").open("w") as file:
        written = harness.write_rows(rows, file, {"commit": "abc"})
    assert [
        json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()
    ] == written
    assert [(row["variant"], row["params"]["batch"]) for row in written] == [
        ("hf", 2),
        ("sid_mlp_fast", 2),
        ("sid_mlp_fast", 1),
    ]
    for row in written:
        assert set(row) == {
            "benchmark",
            "variant",
            "params",
            "runs",
            "median_s",
            "min_s",
            "max_s",
            "items_per_s",
            "peak_memory_mb",
            "encode_s",
            "decode_s",
            "commit",
        }
        assert (
            row["encode_s"] > 0
        )  # timed beside the whole call, so that on busy cores it may even take longer
        assert row["decode_s"] < row["max_s"]
        assert row["params"]["beam"] == 4
        assert row["runs"] == 2
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["items_per_s"] == pytest.approx(
            row["params"]["batch"] / row["median_s"], rel=0.01
        )
        assert row["peak_memory_mb"] >= 0


def test_trained_models_are_timed_on_their_own_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(
        decode, "in_fresh_process", lambda function, *given: function(*given)
    )  # in this process
    tables, sids = write_tables(tmp_path, users=40)
    tiger = {
        "name": "tiger",
        "d_model": 16,
        "d_ff": 16,
        "num_heads": 1,
        "d_kv": 8,
        "num_encoder_layers": 1,
    }
    saved = []
    for model in (
        tiger,
        {
            "name": "gdn",
            "teacher": str(tmp_path / "tiger"),
            "num_layers": 1,
            "head_width": 8,
        },
    ):
        setup = build_training(model, FitConfig(batch_size=8), Inputs(tables, sids))
        checkpoint.save(
            tmp_path / model["name"], setup.model, setup.checkpoint(epoch=1)
        )
        saved.append(str(tmp_path / model["name"]))
    given = {
        "runs": 1,
        "threads": 1,
        "batches": (2,),
        "beams": (3,),
        "slow": (2, 3),
        "sids": sids,
    }
    rows = list(decode.decode(**given, histories=tables, checkpoints=saved))
    assert [row["variant"] for row in rows] == [
        "hf_nocache",
        "hf",
        "tiger_shared_kv",
        "tiger_allowed",
        "gdn",
    ]
    assert rows[0]["params"]["checkpoints"] == dict(
        zip(("tiger", "gdn"), saved, strict=True)
    )
    with pytest.raises(UserError, match="give --histories TABLES and --sids SIDS"):
        list(decode.decode(**given, checkpoints=saved))
    with pytest.raises(UserError, match="both of the model 'tiger'"):
        list(decode.decode(**given, histories=tables, checkpoints=[saved[0]] * 2))


def test_real_histories_are_those_of_test_requests(tmp_path):
    tables, _ = write_tables(tmp_path, users=40)
    every = RetrievalDataset.load(f"{tables}/sequences", "test", max_history=4)
    found = decode.real_histories(100, tables, longest=4)
    assert (
        sorted(map(len, found))
        == sorted(every.lengths.tolist())
        == [len(history) for history in found]
    )
    rows = every.collate(np.arange(len(every))).history.tolist()
    assert sorted(found) == sorted(
        [item for item in row if item != PAD] for row in rows
    )
    assert len(decode.real_histories(5, tables, longest=4)) == 5


def test_plain_is_padded_to_the_longest_and_gives_what_fast_gives():
    source = decode.Source(items=400, seed=0)
    for kind in ("sid_mlp", "sid_mlp_pp"):
        model = decode.load_model(source, kind)
        plain, fast = (
            decode.cut_batches(source, f"{kind}_{path}", 4, runs=3)
            for path in ("plain", "fast")
        )
        assert all(batch.history.shape == (4, 20) for batch in plain)
        for padded, batch in zip(plain, fast, strict=True):
            assert batch.history.shape[1] == batch.history_length.max()
            items, scores = decode.make_call(f"{kind}_plain", model, 10)(padded)
            found, fast_scores = decode.make_call(f"{kind}_fast", model, 10)(batch)
            torch.testing.assert_close(fast_scores, scores, rtol=1e-4, atol=1e-4)
            assert found.tolist() == items.tolist()


@pytest.mark.long
def test_a_process_does_not_inherit_the_peak_of_the_one_that_started_it():
    before = harness.in_fresh_process(resident_peak_mb)
    held = np.ones(2**27)  # 1 GiB
    assert resident_peak_mb() > 1000
    assert harness.in_fresh_process(resident_peak_mb) == pytest.approx(before, abs=100)
    assert held.sum() == 2**27
