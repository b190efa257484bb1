"""Logs in the layouts of H&M, MovieLens-1M and MIND become tables by a mapping."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from jobs import audit, cli, prepare
from models.storage.tables import (
    UserError,
    add_seal,
    check_seal,
    read_manifest,
    read_table,
)
from pipelines.data.audit.rules import audit as check
from pipelines.training import run as training
from tests.fixtures.log_layouts import MAKERS

SOURCES = Path("jobs/configs/sources")


def made(
    source: Path | str, raw: Path | str, output: Path | str, **options: Any
) -> dict[str, Any]:
    """Run jobs.prepare by its command line and return its statistics."""
    words = [
        word for name, value in options.items() for word in (f"--{name}", str(value))
    ]
    line = [
        "--source",
        str(source),
        "--input",
        str(raw),
        "--output",
        str(output),
        *words,
    ]
    statistics: dict[str, Any] = prepare.run(cli.config_from_words(prepare, line))
    return statistics


def tables_of(name: str, folder: Path, **options: Any) -> tuple[dict[str, Any], str]:
    """Prepare and audit a log in this process; return statistics and tables."""
    folder.mkdir(exist_ok=True)
    raw, output = MAKERS[name](folder / "raw"), str(folder / "tables")
    statistics = made(SOURCES / f"{name}.yaml", raw, output, **options)
    audit.run(audit.Config(tables=output))
    return statistics, output


def frame(tables: str, name: str) -> pl.DataFrame:
    made = pl.from_arrow(read_table(f"{tables}/{name}", name))
    assert isinstance(made, pl.DataFrame)
    return made


def test_hm(tmp_path: Path) -> None:
    statistics, tables = tables_of("hm", tmp_path)
    events, items = frame(tables, "events"), frame(tables, "items")
    log = pl.read_csv(tmp_path / "raw/transactions_train.csv", infer_schema=False)
    assert events.height == log.height  # repetitions are purchases
    assert sorted(events["item_id"]) == sorted(log["article_id"])
    assert events["cat_age"].n_unique() > 10
    assert sorted(items["item_id"]) == sorted(
        pl.read_csv(tmp_path / "raw/articles.csv", infer_schema=False)["article_id"]
    )
    assert items["text_description"].null_count() == 1
    assert statistics["raw"]["rejects"] == 0
    info = read_manifest(f"{tables}/items").info
    assert info["items_without_behaviours"] == 20
    assert info["items_without_metadata"] == 0


def test_hm_with_ids_that_lost_their_zeros(tmp_path: Path) -> None:
    raw = MAKERS["hm"](tmp_path / "raw")
    log = pl.read_csv(raw / "transactions_train.csv")  # as numbers
    log.write_csv(raw / "transactions_train.csv")
    assert log["article_id"].dtype == pl.Int64
    source = str(SOURCES / "hm.yaml")
    made(source, raw, tmp_path / "tables")
    assert (
        read_manifest(str(tmp_path / "tables/items")).info["matched"]["ids_matched"]
        == 30
    )


def test_movielens_1m(tmp_path: Path) -> None:
    statistics, tables = tables_of("movielens_1m", tmp_path)
    events, items = frame(tables, "events"), frame(tables, "items")
    lines = (tmp_path / "raw/ratings.dat").read_text().splitlines()
    rows = {tuple(line.split("::")) for line in lines}
    made = events.select(
        "user_id",
        "item_id",
        pl.col("label_rating").cast(pl.Int32),
        pl.col("timestamp_ms") // 1000,
    )
    assert {tuple(map(str, row)) for row in made.rows()} == rows
    assert events["label_liked"].to_list() == (events["label_rating"] >= 4).to_list()
    assert set(events["cat_gender"]) == {"F", "M"}
    told = {row["item_id"]: row for row in items.to_dicts()}
    assert told["7"]["text_title"] == "Les Misérables: Part 7 (1957)"
    assert (told["7"]["cat_year"], told["40"]["cat_year"]) == ("1957", None)
    assert told["40"]["text_title"] == 'Untitled "No Year"'
    assert statistics["raw"]["rejects"] == 0


def test_mind(tmp_path: Path) -> None:
    statistics, tables = tables_of("mind", tmp_path)
    events, items = frame(tables, "events"), frame(tables, "items")
    clicked, past = 0, {}
    for path in (tmp_path / "raw").glob("*/behaviors.tsv"):
        for line in path.read_text().splitlines():
            _, user, _, history, shown = line.split("\t")
            clicked += shown.count("-1")
            past[user] = history.split()
    earlier = events.filter(pl.col("request_id") == "")
    assert events["label_click"].sum() == clicked + earlier.height
    for user, known in past.items():  # each once, in their order, before the log
        of_user = events.filter(pl.col("user_id") == user)["item_id"].to_list()
        assert of_user[: len(known)] == known
    assert earlier.height == sum(map(len, past.values()))
    assert items.height == 60
    assert statistics["raw"]["rejects"] == 0
    assert items["text_title"].to_list()[0] == 'The "story of 0'
    sequences = frame(tables, "sequences")
    assert sequences["item_index"].list.len().sum() == statistics["interactions"]


@pytest.mark.parametrize(("core", "core_window"), [(12, "all"), (12, "train")])
def test_all_items_of_the_item_files_are_kept_whatever_the_core(
    tmp_path: Path, core: int, core_window: str
) -> None:
    statistics, tables = tables_of("hm", tmp_path, core=core, core_window=core_window)
    assert statistics["items"] == 50
    assert statistics["users"] <= 60
    lengths = frame(tables, "sequences")["item_index"].list.len()
    assert lengths.min() >= (core if core_window == "all" else 1)


def test_without_keep_the_catalogue_holds_what_was_bought(tmp_path: Path) -> None:
    raw = MAKERS["hm"](tmp_path / "raw")
    source = tmp_path / "hm.yaml"
    source.write_text((SOURCES / "hm.yaml").read_text().replace("  keep: all\n", ""))
    statistics = made(source, raw, tmp_path / "tables")
    assert statistics["items"] == 30
    assert (
        "items_without_behaviours"
        not in read_manifest(str(tmp_path / "tables/items")).info
    )


def test_the_audit_finds_an_item_too_many_among_those_without_behaviours(
    tmp_path: Path,
) -> None:
    _, tables = tables_of("hm", tmp_path)
    path = Path(tables) / "items" / "manifest.json"
    content = check_seal(path.read_text())
    content["info"]["items_without_behaviours"] = 19
    path.write_text(add_seal(content))
    found = {rule.name: rule.examples for rule in check(tables) if rule.violations}
    assert found["catalogue"] == [
        "20 items of the catalogue have no behaviour, the manifest says 19"
    ]


def test_hm_to_recommendations_by_its_mapping_alone(
    tmp_path: Path,
    ray_local: None,
    new_store: Callable[[Path], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here_alone = partial(
        training.run_training,
        trial=training.TrialContext(on_checkpoint=lambda about: None),
    )
    monkeypatch.setattr(training, "run_training", here_alone)  # here
    raw, runs = MAKERS["hm"](tmp_path / "raw"), tmp_path / "runs"
    new_store(runs)

    def job(line: str) -> str:
        name, *words = shlex.split(line)
        module = importlib.import_module(name)
        module.run(cli.config_from_words(module, words))
        return capsys.readouterr().out

    tables, sids, out = (str(tmp_path / name) for name in ("tables", "sids", "out"))
    job(f"jobs.prepare --source {SOURCES}/hm.yaml --input {raw} --output {tables}")
    job(f"jobs.audit --tables {tables}")
    encoded = "--tokenizer rqkmeans --encoder tfidf --rqkmeans.codebook_size 8"
    job(f"jobs.tokenize --tables {tables} {encoded} --output {sids}")
    assert read_manifest(f"{sids}/sids").rows == 50  # those that nobody has bought too
    small = "--fit.max_epochs 1 --model.num_encoder_layers 1 --model.num_decoder_layers 1 --ray.threads 1"
    model = f"--config jobs/configs/tiger_small.yaml {small} --log_model false"
    said = job(
        f"jobs.train {model} --tables {tables} --sids {sids} --storage {runs} --name tiger"
    )
    unread = "numbers price; categories channel, age, club, news"
    assert (
        f"note: 'tiger' reads items and their order, of these tables not the {unread}"
        in said
    )
    evaluate = f"jobs.evaluate --checkpoint {runs}/tiger --sids {sids}"
    job(f"{evaluate} --tables {tables} --batch_inference {out} --k 50 --beam 50")
    made = read_table(out, "recommendations").to_pylist()
    unsold = {f"{108775015 + 7 * number:010d}" for number in range(30, 50)}
    assert len(made) == 60
    assert all(unsold <= set(row["item_id"]) for row in made)

    # a later log of the same catalogue
    fresh, later = fresh_hm(tmp_path), str(tmp_path / "later")
    job(
        f"jobs.prepare --source {SOURCES}/hm.yaml --input {fresh} --output {later} --catalogue {tables} --core 0"
    )
    job(f"{evaluate} --tables {later} --batch_inference {tmp_path}/out2 --k 5")
    again = read_table(f"{tmp_path}/out2", "recommendations").to_pylist()
    assert [row["user_id"] for row in again] == ["newcomer", "regular"]
    said = job(f"{evaluate} --tables {later} --split test")
    assert "note: " in said
    assert "is another log than that of the training" in said
    (found,) = (runs / "tiger/best").glob("evaluation-test-fresh-*.json")
    assert (
        json.loads(found.read_text())["hashes"]["sequences"]
        == read_manifest(f"{later}/sequences").hash
    )


def fresh_hm(folder: Path) -> Path:
    """Write two later customers of `hm`, with a new item and an unknown item."""
    fresh = folder / "fresh"
    fresh.mkdir()
    rows = [
        ("2019-04-01", "newcomer", "0108775015"),
        ("2019-04-02", "newcomer", f"{108775015 + 7 * 40:010d}"),
        ("2019-04-02", "newcomer", "0999999999"),
        ("2019-04-01", "regular", "0108775022"),
        ("2019-04-05", "regular", "0108775029"),
    ]
    lines = [f"{day},{customer},{article},0.01,1\n" for day, customer, article in rows]
    (fresh / "transactions_train.csv").write_text(
        "t_dat,customer_id,article_id,price,sales_channel_id\n" + "".join(lines)
    )
    ids = [(1, name) for name in ("newcomer", "regular")]
    rest = "".join(f"{name},{fn},ACTIVE,NONE,{20 + fn}\n" for fn, name in ids)
    (fresh / "customers.csv").write_text(
        "customer_id,FN,club_member_status,fashion_news_frequency,age\n" + rest
    )
    return fresh


def test_a_fresh_log_has_the_catalogue_of_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, tables = tables_of("hm", tmp_path)
    fresh, later = fresh_hm(tmp_path), str(tmp_path / "later")  # without articles.csv
    again = partial(made, SOURCES / "hm.yaml", fresh)
    statistics = again(later, catalogue=tables, core=0)
    assert (
        "80.0% of the behaviours are on them, 1 other items dropped"
        in capsys.readouterr().out
    )
    audit.run(audit.Config(tables=later))
    assert read_manifest(f"{later}/items").hash == read_manifest(f"{tables}/items").hash
    assert statistics["requests"] == {"train": 0, "val": 0, "test": 4}
    names = frame(later, "items")["item_id"].to_list()
    bought = {
        row["user_id"]: [names[n] for n in row["item_index"]]
        for row in frame(later, "sequences").to_dicts()
    }
    assert bought == {
        "newcomer": ["0108775015", f"{108775015 + 7 * 40:010d}"],
        "regular": ["0108775022", "0108775029"],
    }
    assert again(later, catalogue=tables, core=0) == statistics
    assert "items: up to date" in capsys.readouterr().out

    with pytest.raises(
        UserError,
        match=r"no user has 5 behaviours on the catalogue of .*; use --core 0",
    ):
        again(tmp_path / "other", catalogue=tables, core=5)
    with pytest.raises(
        UserError,
        match=r"80.0% of the behaviours are on items .* it does not have '0999999999'",
    ):
        again(tmp_path / "strict", catalogue=tables, core=0, min_matched=0.9)
    for file in fresh.glob("transactions*.csv"):
        file.write_text(re.sub(r",0(\d{9}),", r",x\1,", file.read_text()))
    with pytest.raises(
        UserError,
        match=r"0.0% of the behaviours .* does not have 'x[^;]*; convert the ids of both",
    ):
        again(tmp_path / "other", catalogue=tables, core=0, min_matched=0)
    with pytest.raises(
        UserError, match=r"--catalogue is .*nowhere, which does not exist"
    ):
        again(tmp_path / "other", catalogue=tmp_path / "nowhere", core=0)


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("name", ["hm", "mind"])
def test_ray_makes_the_same_tables(tmp_path: Path, name: str) -> None:
    _, tables = tables_of(name, tmp_path)
    spread, source = str(tmp_path / "spread"), str(SOURCES / f"{name}.yaml")
    made(source, tmp_path / "raw", spread, partitions=3)
    audit.run(audit.Config(tables=spread))
    assert (
        read_manifest(f"{spread}/items").hash == read_manifest(f"{tables}/items").hash
    )
    assert read_manifest(f"{spread}/items").info == read_manifest(
        f"{tables}/items"
    ).info | {
        "split_made_from": read_manifest(f"{spread}/items").info["split_made_from"]
    }
    assert (
        frame(spread, "events")
        .sort(pl.all())
        .equals(frame(tables, "events").sort(pl.all()))
    )
    assert (
        frame(spread, "sequences")
        .sort("user_id")
        .equals(frame(tables, "sequences").sort("user_id"))
    )
