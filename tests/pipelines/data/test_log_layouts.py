"""Logs in the layouts of H&M, MovieLens-1M and MIND become tables by their mappings
alone, without code.
"""

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
from pipelines.training import run as training
from tests.fixtures.audited_tables import find_violations
from tests.fixtures.log_layouts import LOG_WRITERS

SOURCES = Path("jobs/configs/sources")


def prepare_tables(
    source: Path | str, raw: Path | str, output: Path | str, **options: Any
) -> dict[str, Any]:
    """Run jobs.prepare by its command line and return its statistics."""
    words = ["--source", str(source), "--input", str(raw), "--output", str(output)]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    statistics: dict[str, Any] = prepare.run(cli.config_from_words(prepare, words))
    return statistics


def prepare_layout(
    name: str, folder: Path, **options: Any
) -> tuple[dict[str, Any], str]:
    """Write a log of a layout, prepare and audit it; return statistics and tables."""
    folder.mkdir(exist_ok=True)
    raw, output = LOG_WRITERS[name](folder / "raw"), str(folder / "tables")
    statistics = prepare_tables(SOURCES / f"{name}.yaml", raw, output, **options)
    audit.run(audit.Config(tables=output))
    return statistics, output


def read_frame(tables: str, name: str) -> pl.DataFrame:
    """Return the rows of a table."""
    frame = pl.from_arrow(read_table(f"{tables}/{name}", name))
    assert isinstance(frame, pl.DataFrame)
    return frame


def test_hm_has_an_event_per_purchase_and_all_articles(tmp_path: Path) -> None:
    statistics, tables = prepare_layout("hm", tmp_path)

    events, items = read_frame(tables, "events"), read_frame(tables, "items")
    log = pl.read_csv(tmp_path / "raw/transactions_train.csv", infer_schema=False)
    articles = pl.read_csv(tmp_path / "raw/articles.csv", infer_schema=False)
    assert statistics["raw"]["rejects"] == 0
    assert events.height == log.height  # equal rows are purchases of several pieces
    assert sorted(events["item_id"]) == sorted(log["article_id"])
    assert events["cat_age"].n_unique() > 10
    assert sorted(items["item_id"]) == sorted(articles["article_id"])
    assert items["text_description"].null_count() == 1
    info = read_manifest(f"{tables}/items").info
    assert info["items_without_behaviours"] == 20
    assert info["items_without_metadata"] == 0


def test_hm_ids_without_leading_zeros_match_the_articles(tmp_path: Path) -> None:
    raw = LOG_WRITERS["hm"](tmp_path / "raw")
    log_of_numbers = pl.read_csv(raw / "transactions_train.csv")
    log_of_numbers.write_csv(raw / "transactions_train.csv")
    assert log_of_numbers["article_id"].dtype == pl.Int64

    prepare_tables(SOURCES / "hm.yaml", raw, tmp_path / "tables")

    info = read_manifest(str(tmp_path / "tables/items")).info
    assert info["matched"]["ids_matched"] == 30


def test_movielens_1m_has_an_event_per_rating_and_movies_with_years(
    tmp_path: Path,
) -> None:
    statistics, tables = prepare_layout("movielens_1m", tmp_path)

    events, items = read_frame(tables, "events"), read_frame(tables, "items")
    lines = (tmp_path / "raw/ratings.dat").read_text().splitlines()
    ratings = events.select(
        "user_id",
        "item_id",
        pl.col("label_rating").cast(pl.Int32),
        pl.col("timestamp_ms") // 1000,
    )
    assert statistics["raw"]["rejects"] == 0
    assert {"::".join(map(str, row)) for row in ratings.rows()} == set(lines)
    assert events["label_liked"].to_list() == (events["label_rating"] >= 4).to_list()
    assert set(events["cat_gender"]) == {"F", "M"}
    movies = {row["item_id"]: row for row in items.to_dicts()}
    assert movies["7"]["text_title"] == "Les Misérables: Part 7 (1957)"
    assert movies["7"]["cat_year"] == "1957"
    assert movies["40"]["text_title"] == 'Untitled "No Year"'
    assert movies["40"]["cat_year"] is None


def test_mind_has_the_clicks_and_the_histories_before_the_log(tmp_path: Path) -> None:
    statistics, tables = prepare_layout("mind", tmp_path)

    num_clicks = 0
    histories: dict[str, list[str]] = {}
    for path in (tmp_path / "raw").glob("*/behaviors.tsv"):
        for line in path.read_text().splitlines():
            _, user, _, clicked_before, shown = line.split("\t")
            num_clicks += shown.count("-1")
            histories[user] = clicked_before.split()
    events, items = read_frame(tables, "events"), read_frame(tables, "items")
    earlier = events.filter(pl.col("request_id") == "")
    assert statistics["raw"]["rejects"] == 0
    assert earlier.height == sum(map(len, histories.values()))
    assert events["label_click"].sum() == num_clicks + earlier.height
    for user, history in histories.items():  # the same in each row of the user
        events_of_user = events.filter(pl.col("user_id") == user)
        assert events_of_user["item_id"].to_list()[: len(history)] == history
    assert items.height == 60
    assert items["text_title"][0] == 'The "story of 0'
    sequences = read_frame(tables, "sequences")
    assert sequences["item_index"].list.len().sum() == statistics["interactions"]


@pytest.mark.parametrize(("core_window", "min_length"), [("all", 12), ("train", 1)])
def test_all_items_of_the_item_files_are_in_the_catalogue_with_any_core(
    tmp_path: Path, core_window: str, min_length: int
) -> None:
    statistics, tables = prepare_layout(
        "hm", tmp_path, core=12, core_window=core_window
    )

    assert statistics["items"] == 50
    assert statistics["users"] <= 60
    lengths = read_frame(tables, "sequences")["item_index"].list.len()
    assert lengths.min() >= min_length


def test_without_keep_all_the_catalogue_has_the_purchased_items_alone(
    tmp_path: Path,
) -> None:
    raw = LOG_WRITERS["hm"](tmp_path / "raw")
    source = tmp_path / "hm.yaml"
    source.write_text((SOURCES / "hm.yaml").read_text().replace("  keep: all\n", ""))

    statistics = prepare_tables(source, raw, tmp_path / "tables")

    assert statistics["items"] == 30
    info = read_manifest(str(tmp_path / "tables/items")).info
    assert "items_without_behaviours" not in info


def test_the_audit_finds_a_wrong_number_of_items_without_behaviours(
    tmp_path: Path,
) -> None:
    _, tables = prepare_layout("hm", tmp_path)
    path = Path(tables) / "items" / "manifest.json"
    content = check_seal(path.read_text())
    content["info"]["items_without_behaviours"] = 19
    path.write_text(add_seal(content))

    assert find_violations(tables)["catalogue"] == [
        "20 items of the catalogue have no behaviour, the manifest says 19"
    ]


FIRST_ARTICLE = 108775015
"""The articles of `write_hm` have every seventh number from this one on."""


def test_hm_leads_to_recommendations_by_its_mapping_alone(
    tmp_path: Path,
    ray_local: None,
    new_store: Callable[[Path], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_in_process = partial(
        training.run_training,
        trial=training.TrialContext(on_checkpoint=lambda about: None),
    )
    monkeypatch.setattr(training, "run_training", train_in_process)
    raw, runs = LOG_WRITERS["hm"](tmp_path / "raw"), tmp_path / "runs"
    new_store(runs)

    def run_job(line: str) -> str:
        """Run a job in this process and return what it prints."""
        name, *words = shlex.split(line)
        module = importlib.import_module(name)
        module.run(cli.config_from_words(module, words))
        return capsys.readouterr().out

    # From the log to semantic ids, also of the articles that nobody has bought.
    tables, sids, out = (str(tmp_path / name) for name in ("tables", "sids", "out"))
    run_job(f"jobs.prepare --source {SOURCES}/hm.yaml --input {raw} --output {tables}")
    run_job(f"jobs.audit --tables {tables}")
    tokenizer = "--tokenizer rqkmeans --encoder tfidf --rqkmeans.codebook_size 8"
    run_job(f"jobs.tokenize --tables {tables} {tokenizer} --output {sids}")
    assert read_manifest(f"{sids}/sids").rows == 50

    # Training names the columns that the model does not read.
    small = "--fit.max_epochs 1 --model.num_encoder_layers 1 --model.num_decoder_layers 1 --ray.threads 1"
    model = f"--config jobs/configs/tiger_small.yaml {small} --log_model false"
    inputs = f"--tables {tables} --sids {sids}"
    printed = run_job(f"jobs.train {model} {inputs} --storage {runs} --name tiger")
    not_read = "numbers price; categories channel, age, club, news"
    note = (
        f"note: 'tiger' reads items and their order, of these tables not the {not_read}"
    )
    assert note in printed

    # Articles that nobody has bought are recommended too.
    evaluate = f"jobs.evaluate --checkpoint {runs}/tiger --sids {sids}"
    run_job(f"{evaluate} --tables {tables} --batch_inference {out} --k 50 --beam 50")
    recommendations = read_table(out, "recommendations").to_pylist()
    unsold = {f"{FIRST_ARTICLE + 7 * number:010d}" for number in range(30, 50)}
    assert len(recommendations) == 60
    assert all(unsold <= set(row["item_id"]) for row in recommendations)

    # A later log on the same catalogue is served and evaluated.
    later_raw, later = write_later_hm(tmp_path), str(tmp_path / "later")
    run_job(
        f"jobs.prepare --source {SOURCES}/hm.yaml --input {later_raw} --output {later} --catalogue {tables} --core 0"
    )
    run_job(f"{evaluate} --tables {later} --batch_inference {tmp_path}/out2 --k 5")
    later_rows = read_table(f"{tmp_path}/out2", "recommendations").to_pylist()
    assert [row["user_id"] for row in later_rows] == ["newcomer", "regular"]
    printed = run_job(f"{evaluate} --tables {later} --split test")
    assert "note: " in printed
    assert "is another log than that of the training" in printed
    (evaluation,) = (runs / "tiger/best").glob("evaluation-test-fresh-*.json")
    hashes = json.loads(evaluation.read_text())["hashes"]
    assert hashes["sequences"] == read_manifest(f"{later}/sequences").hash


def write_later_hm(folder: Path) -> Path:
    """Write a later log of two customers to the folder `later_raw`, without articles.

    One customer buys an article that nobody bought before, and one that the catalogue
    does not have.
    """
    raw = folder / "later_raw"
    raw.mkdir()
    unsold = f"{FIRST_ARTICLE + 7 * 40:010d}"
    lines = [
        "t_dat,customer_id,article_id,price,sales_channel_id",
        "2019-04-01,newcomer,0108775015,0.01,1",
        f"2019-04-02,newcomer,{unsold},0.01,1",
        "2019-04-02,newcomer,0999999999,0.01,1",
        "2019-04-01,regular,0108775022,0.01,1",
        "2019-04-05,regular,0108775029,0.01,1",
    ]
    (raw / "transactions_train.csv").write_text("\n".join(lines) + "\n")
    lines = [
        "customer_id,FN,club_member_status,fashion_news_frequency,age",
        "newcomer,1,ACTIVE,NONE,21",
        "regular,1,ACTIVE,NONE,21",
    ]
    (raw / "customers.csv").write_text("\n".join(lines) + "\n")
    return raw


def test_a_later_log_keeps_the_catalogue_of_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, tables = prepare_layout("hm", tmp_path)
    raw, later = write_later_hm(tmp_path), str(tmp_path / "later")
    options = {"catalogue": tables, "core": 0}

    statistics = prepare_tables(SOURCES / "hm.yaml", raw, later, **options)

    printed = capsys.readouterr().out
    assert "80.0% of the behaviours are on them, 1 other items dropped" in printed
    audit.run(audit.Config(tables=later))
    assert read_manifest(f"{later}/items").hash == read_manifest(f"{tables}/items").hash
    assert statistics["requests"] == {"train": 0, "val": 0, "test": 4}
    ids = read_frame(later, "items")["item_id"].to_list()
    items_of_users = {
        row["user_id"]: [ids[item] for item in row["item_index"]]
        for row in read_frame(later, "sequences").to_dicts()
    }
    assert items_of_users == {
        "newcomer": ["0108775015", f"{FIRST_ARTICLE + 7 * 40:010d}"],
        "regular": ["0108775022", "0108775029"],
    }

    again = prepare_tables(SOURCES / "hm.yaml", raw, later, **options)
    assert again == statistics
    assert "items: up to date" in capsys.readouterr().out


def test_a_later_log_that_does_not_fit_the_catalogue_is_refused(
    tmp_path: Path,
) -> None:
    _, tables = prepare_layout("hm", tmp_path)
    raw = write_later_hm(tmp_path)
    prepare_later = partial(prepare_tables, SOURCES / "hm.yaml", raw)

    error = r"no user has 5 behaviours on the catalogue of .*; use --core 0"
    with pytest.raises(UserError, match=error):
        prepare_later(tmp_path / "core", catalogue=tables, core=5)

    error = r"80.0% of the behaviours are on items .* it does not have '0999999999'"
    with pytest.raises(UserError, match=error):
        prepare_later(tmp_path / "few", catalogue=tables, core=0, min_matched=0.9)

    log = raw / "transactions_train.csv"
    log.write_text(re.sub(r",0(\d{9}),", r",x\1,", log.read_text()))
    error = r"0.0% of the behaviours .* does not have 'x[^;]*; convert the ids of both"
    with pytest.raises(UserError, match=error):
        prepare_later(tmp_path / "none", catalogue=tables, core=0, min_matched=0)

    error = r"--catalogue is .*nowhere, which does not exist"
    with pytest.raises(UserError, match=error):
        prepare_later(tmp_path / "other", catalogue=tmp_path / "nowhere", core=0)


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("name", ["hm", "mind"])
def test_ray_and_the_driver_alone_prepare_the_same_tables(
    tmp_path: Path, name: str
) -> None:
    _, alone = prepare_layout(name, tmp_path)
    by_ray, source = str(tmp_path / "by_ray"), SOURCES / f"{name}.yaml"

    prepare_tables(source, tmp_path / "raw", by_ray, partitions=3)

    audit.run(audit.Config(tables=by_ray))
    items_alone = read_manifest(f"{alone}/items")
    items_by_ray = read_manifest(f"{by_ray}/items")
    assert items_by_ray.hash == items_alone.hash
    for items in (items_alone, items_by_ray):
        items.info.pop(
            "split_made_from", None
        )  # hashes of the events, whose parts differ
    assert items_by_ray.info == items_alone.info
    for table, order in (("events", pl.all()), ("sequences", pl.col("user_id"))):
        rows_alone = read_frame(alone, table).sort(order)
        assert read_frame(by_ray, table).sort(order).equals(rows_alone)
