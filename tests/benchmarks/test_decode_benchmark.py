"""Test the decode benchmark: its random catalogue, its rows, and real histories."""

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


def test_the_random_catalogue_and_histories_resemble_the_papers():
    codes = decode.random_codes(25_000, torch.Generator().manual_seed(0))
    trie = Trie(codes, (256, 256, 256, 256))
    assert trie.num_items == 25_000
    assert trie.branching() == pytest.approx(decode.MEAN_BRANCHING, rel=0.05)

    generator = torch.Generator().manual_seed(0)
    histories = decode.random_histories(1024, 25_000, generator)
    lengths = [len(history) for history in histories]
    assert sum(lengths) / 1024 == pytest.approx(9, abs=0.8)
    assert lengths == sorted(lengths)


@pytest.mark.long
def test_rows_are_written_as_complete_json_lines(tmp_path):
    variants = ["hf", "sid_mlp_fast"]  # each has a process, to measure its memory
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

    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == written
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
        # Timed separately from the whole call, so on busy cores it may take longer.
        assert row["encode_s"] > 0
        assert row["decode_s"] < row["max_s"]
        assert row["params"]["beam"] == 4
        assert row["runs"] == 2
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["items_per_s"] == pytest.approx(
            row["params"]["batch"] / row["median_s"], rel=0.01
        )
        assert row["peak_memory_mb"] >= 0


def test_trained_models_are_timed_on_their_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(
        decode, "in_fresh_process", lambda function, *arguments: function(*arguments)
    )
    tables, sids = write_tables(tmp_path, users=40)
    tiger = {
        "name": "tiger",
        "d_model": 16,
        "d_ff": 16,
        "num_heads": 1,
        "d_kv": 8,
        "num_encoder_layers": 1,
    }
    gdn = {
        "name": "gdn",
        "teacher": str(tmp_path / "tiger"),
        "num_layers": 1,
        "head_width": 8,
    }
    paths = []
    for model in (tiger, gdn):
        setup = build_training(model, FitConfig(batch_size=8), Inputs(tables, sids))
        path = tmp_path / model["name"]
        checkpoint.save(path, setup.model, setup.checkpoint(epoch=1))
        paths.append(str(path))
    options = {
        "runs": 1,
        "threads": 1,
        "batches": (2,),
        "beams": (3,),
        "slow": (2, 3),
        "sids": sids,
    }

    rows = list(decode.decode(**options, histories=tables, checkpoints=paths))

    assert [row["variant"] for row in rows] == [
        "hf_nocache",
        "hf",
        "tiger_shared_kv",
        "tiger_allowed",
        "gdn",
    ]
    checkpoints = dict(zip(("tiger", "gdn"), paths, strict=True))
    assert rows[0]["params"]["checkpoints"] == checkpoints
    with pytest.raises(UserError, match="give --histories TABLES and --sids SIDS"):
        list(decode.decode(**options, checkpoints=paths))
    with pytest.raises(UserError, match="both of the model 'tiger'"):
        list(decode.decode(**options, histories=tables, checkpoints=[paths[0]] * 2))


def test_real_histories_are_those_of_test_requests(tmp_path):
    tables, _ = write_tables(tmp_path, users=40)
    examples = RetrievalDataset.load(f"{tables}/sequences", "test", max_history=4)

    histories = decode.real_histories(100, tables, longest=4)

    lengths = [len(history) for history in histories]
    assert lengths == sorted(examples.lengths.tolist())
    rows = examples.collate(np.arange(len(examples))).history.tolist()
    unpadded = [[item for item in row if item != PAD] for row in rows]
    assert sorted(histories) == sorted(unpadded)
    assert len(decode.real_histories(5, tables, longest=4)) == 5


def test_the_plain_path_is_padded_and_returns_the_results_of_the_fast_one():
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
            fast_items, fast_scores = decode.make_call(f"{kind}_fast", model, 10)(batch)
            torch.testing.assert_close(fast_scores, scores, rtol=1e-4, atol=1e-4)
            assert fast_items.tolist() == items.tolist()


@pytest.mark.long
def test_a_process_does_not_inherit_the_peak_memory_of_its_parent():
    small_peak = harness.in_fresh_process(resident_peak_mb)
    large_array = np.ones(2**27)  # 1 GiB
    assert resident_peak_mb() > 1000

    peak = harness.in_fresh_process(resident_peak_mb)

    assert peak == pytest.approx(small_peak, abs=100)
    assert large_array.sum() == 2**27  # the array is still allocated
