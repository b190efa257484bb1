"""A first mapping of a folder without one: what it guesses makes tables, and what it cannot guess it says."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from own_layouts import MAKERS
from pipelines.data.sources import load_source
from pipelines.data.sources.mapping import Mapping
from pipelines.data.sources.suggest import suggest

from jobs import audit, prepare
from models.tables import UserError, read_manifest


def guessed(folder: Path) -> dict[str, Any]:
    text = suggest(str(folder))
    assert "Not right yet" not in text, text
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_guessed_of_a_real_layout_makes_tables(tmp_path: Path, name: str) -> None:
    raw = MAKERS[name](tmp_path / "raw")
    source = tmp_path / "guessed.yaml"
    prepare.run_suggestion(prepare.Suggestion(suggest=str(raw), output=str(source)))
    tables = str(tmp_path / "tables")
    statistics = prepare.run(prepare.Config(source=str(source), input=str(raw), output=tables))
    audit.run(audit.Config(tables=tables))
    assert statistics["raw"]["rejects"] == 0
    items = read_manifest(f"{tables}/items").info
    assert items["matched"]["ids_matched"] == items["matched"]["ids"]
    assert items["texts"]
    assert statistics["clock"]
    with pytest.raises(UserError, match="exists; name another file"):
        prepare.run_suggestion(prepare.Suggestion(suggest=str(raw), output=str(source)))


def test_a_log_of_a_shop_with_semicolons_and_another_encoding(tmp_path: Path) -> None:
    lines = ["Kunde-ID;CustomerId;ProductId;Bought at;is_gift;price"]
    lines += [f"x{n};c{n % 7};{n % 11:05d};{1 + n % 28:02d}.03.2023 1{n % 10}:30;{n % 2};{n}.5" for n in range(60)]
    (tmp_path / "käufe.csv").write_bytes("\n".join(lines).encode("cp1252"))
    products = ["ProductId;Name;Group"] + [f"{n};Käse Nr. {n};{'ab'[n % 2]}" for n in range(11)]
    (tmp_path / "produkte.csv").write_bytes("\n".join(products).encode("cp1252"))
    made = guessed(tmp_path)
    assert made["delimiter"] == ";"
    assert (made["user"], made["item"]) == ("CustomerId", "ProductId")
    assert made["time"] == {"column": "Bought at", "format": "%d.%m.%Y %H:%M"}
    assert made["labels"] == {"is_gift": {"column": "is_gift"}}
    assert made["numbers"] == {"price": "price"}
    assert made["items"]["encoding"] == "cp1252"
    assert made["transforms"] == {"ProductId": {"pad": 5}}  # the item file lost the zeros
    assert made["items"]["transforms"] == {"ProductId": {"pad": 5}}
    assert made["items"]["texts"]["Name"] == "Name"


def test_decimal_commas_of_a_german_shop_become_numbers(tmp_path: Path) -> None:
    raw, source, tables = tmp_path / "raw", tmp_path / "guessed.yaml", tmp_path / "tables"
    raw.mkdir()
    lines = [f"K{n % 9};A{n // 3 % 14};{1 + n % 28:02d}.03.2023;{n % 4},{n % 10}0;{n % 5},5" for n in range(252)]
    (raw / "verkauf.csv").write_text("Kunde;Artikel;Datum;Rabatt;Score\n" + "\n".join(lines))
    products = [f"A{n};Tee Nr. {n};1.{n:03d},95;{n}.5" for n in range(14)]
    (raw / "artikel.csv").write_text("Artikel;Name;Preis;Gewicht\n" + "\n".join(products))
    prepare.run_suggestion(prepare.Suggestion(suggest=str(raw), output=str(source)))
    text = source.read_text()
    made = yaml.safe_load(text)
    assert made["transforms"] == {"Rabatt": {"decimal": ","}, "Score": {"decimal": ","}}
    assert made["labels"] == {"Score": {"column": "Score", "type": "float32"}}
    assert made["items"]["transforms"] == {"Preis": {"decimal": ","}}
    assert "# the mark before its decimals: 0,00 | 1,10 | 2,20" in text
    prepare.run(prepare.Config(source=str(source), input=str(raw), output=str(tables)))
    events = pl.read_parquet(f"{tables}/events/*.parquet")
    assert sorted(events["num_Rabatt"].to_list()) == pytest.approx(sorted(n % 4 + n % 10 / 10 for n in range(252)))
    items = pl.read_parquet(f"{tables}/items/*.parquet").sort("item_id")
    assert dict(zip(items["item_id"], items["num_Preis"], strict=True)) == pytest.approx(
        {f"A{n}": 1000.95 + n for n in range(14)}
    )


def test_an_export_of_a_spreadsheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A byte order mark, empty columns and a row of nothing at the end, a word among numbers, shortened ids, names in
    another language: the file of articles tells which column is the item."""
    sold = [
        f"K-{n % 13};{n % 37 + 5};{1 + n % 28:02d}.12.2025 {n % 24:02d}:05;{n % 3 % 2 + 1};{n % 50},{n % 10}0;;"
        for n in range(300)
    ]
    sold[40] = "K-1;7;24.12.2025 13:05;1;auf Anfrage;;"
    content = "\r\n".join(["Käufer;Artikelnummer;Zeitpunkt;Menge;Betrag;;", *sold, ";;;;;;", ""])
    (tmp_path / "Verkäufe 2025.csv").write_bytes(content.encode("utf-8-sig"))
    articles = [f"{n + 5:05d};Öl Nr. {n};{'ab'[n % 2]};1.2{n:02d},50;;" for n in range(37)]
    (tmp_path / "Artikel.csv").write_bytes(
        "\r\n".join(["Artikelnummer;Übersicht;Gruppe;Preis (€);;", *articles]).encode("cp1252")
    )
    text = suggest(str(tmp_path))
    made = yaml.safe_load(text)
    assert (made["user"], made["item"]) == ("Käufer", "Artikelnummer")
    assert made["time"] == {"column": "Zeitpunkt", "format": "%d.%m.%Y %H:%M"}
    assert list(made["numbers"].values()) == ["Menge", "Betrag"]
    assert made["transforms"] == {"Betrag": {"decimal": ","}, "Artikelnummer": {"pad": 5}}
    assert made["items"]["texts"] == {"Ubersicht": "Übersicht", "Gruppe": "Gruppe"}
    assert made["items"]["numbers"] == {"Preis": "Preis (€)"}
    (tmp_path / "guessed.yaml").write_text(text)
    prepare.run(
        prepare.Config(source=str(tmp_path / "guessed.yaml"), input=str(tmp_path), output="unused", dry_run=True)
    )
    said = capsys.readouterr().out
    assert "events: Verkäufe 2025.csv, the only file: 301 rows read, 2 rejected" in said
    assert "Betrag: no number with decimal ','; such as Verkäufe 2025.csv line 42: " in said
    assert "Preis (€)      float   1200.5 | 1201.5 | 1202.5" in said
    assert "float   0 | 1.1 | 2.2" in said


@pytest.mark.parametrize(
    ("written", "made", "price", "decimal"),
    [
        ("12/{day}/2025 1:05 PM", {"format": "%m/%d/%Y %I:%M %p"}, "$1,2{n:02d}.50", "."),
        ("{day:02d}.12.25 13:05", {"format": "%d.%m.%y %H:%M"}, "{n},50 €", ","),
        ("{day:02d}/12/2025 13:05", {"format": "%d/%m/%Y %H:%M"}, "EUR 1.2{n:02d},00", ","),
    ],
)
def test_times_and_prices_as_programs_of_the_world_write_them(
    tmp_path: Path, written: str, made: dict[str, str], price: str, decimal: str
) -> None:
    rows = [f"c{n % 9};i{n % 14};{written.format(day=n % 28 + 1)};{price.format(n=n % 90 + 10)}\n" for n in range(200)]
    (tmp_path / "orders.csv").write_text("Customer;Item;Date;Price\n" + "".join(rows))
    content = guessed(tmp_path)
    assert content["time"] == {"column": "Date", **made}
    assert content["numbers"] == {"Price": "Price"}
    assert content["transforms"]["Price"]["decimal"] == decimal
    content.pop("prepare"), content.pop("layout")
    (block,) = Mapping(**content).read_events(str(tmp_path), "orders.csv")
    assert block.events.num_rows == 200
    more = 0 if "€" in price else 1200
    cents = 0.5 if "50" in price else 0
    assert block.events["num_Price"].to_pylist() == [more + n % 90 + 10 + cents for n in range(200)]


def test_a_file_of_users_or_of_items_in_another_language(tmp_path: Path) -> None:
    """Whom the first column of ids is of, a file that describes it does not change; names stand above ids."""
    rows = "".join(f"K{n % 13};W{n * 7 % 31};{n % 28 + 1:02d}.11.2025\n" for n in range(400))
    (tmp_path / "kauf.csv").write_text("Kunde;Ware;Tag\n" + rows)
    (tmp_path / "kunden.csv").write_text("Kunde;Ort\n" + "".join(f"K{n};{'ab'[n % 2]}\n" for n in range(13)))
    made = guessed(tmp_path)
    assert (made["user"], made["item"], made["users"]["user"]) == ("Kunde", "Ware", "Kunde")
    (tmp_path / "waren.csv").write_text("Ware;Titel\n" + "".join(f"W{n};Ding Nr. {n}\n" for n in range(31)))
    made = guessed(tmp_path)
    assert (made["user"], made["item"], made["users"]["user"]) == ("Kunde", "Ware", "Kunde")
    assert (made["items"]["item"], made["items"]["texts"]) == ("Ware", {"Titel": "Titel"})


@pytest.mark.parametrize(("above", "names"), [("sep=;\n", 2), ("Sales report;;;\n;;;\n", 3)])
def test_lines_above_the_names_are_said(tmp_path: Path, above: str, names: int) -> None:
    rows = "".join(f"c{n % 9};i{n % 14};{n % 28 + 1:02d}.12.2025;{n % 24:02d}:30\n" for n in range(200))
    (tmp_path / "orders.csv").write_text(f"{above}Customer;Item;Date;Time\n{rows}")
    text = suggest(str(tmp_path))
    assert f"# orders.csv: its names are in line {names}; delete the lines above them" in text
    (tmp_path / "orders.csv").write_text(f"Customer;Item;Date;Time\n{rows}")
    assert guessed(tmp_path)["user"] == "Customer"
    text = suggest(str(tmp_path))
    assert "its names are" not in text
    assert "# Time is a time of day (00:30 | 01:30 | 02:30): join it with the date" in text


def test_one_list_of_objects_is_said(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text('[\n {"user": 1, "item": 2}\n]')
    with pytest.raises(UserError, match="one list, not an object a line"):
        suggest(str(tmp_path))


def test_the_index_of_a_data_frame_is_no_column(tmp_path: Path) -> None:
    pl.DataFrame({"": range(40), "user_id": [f"u{n % 5}" for n in range(40)], "item_id": [n % 7 for n in range(40)],
                  "ts": [1_600_000_000 + n for n in range(40)]}).write_csv(tmp_path / "log.csv")  # fmt: skip
    made = guessed(tmp_path)
    assert (made["user"], made["item"], made["time"]["column"]) == ("user_id", "item_id", "ts")
    assert "header" not in made


def test_integers_that_count_are_numbers_and_codes_are_categories(tmp_path: Path) -> None:
    """By their names, or as most are small and few are large; a code is as likely large as small."""
    bought = [1, 1, 2, 1, 1, 12, 1, 2, 1, 3, 1, 24]
    lines = [
        f"u{n % 7},i{n % 11},{1_600_000_000 + n},{n % 4},{bought[n % 12]},{n % 9},{n % 6 + 1},{n % 10},{n % 2}"
        for n in range(240)
    ]
    names = "user_id,item_id,ts,orderQty,pcs,channel,store_no,priceCents,gift"
    (tmp_path / "sales.csv").write_text("\n".join([names, *lines]))
    items = [f"i{n},thing {n},{n % 3},{n % 3 + 1},{n % 2 * 50}" for n in range(11)]
    (tmp_path / "items.csv").write_text("\n".join(["item_id,title,colour,weight,shelf", *items]))
    text = suggest(str(tmp_path))
    made = yaml.safe_load(text)
    assert list(made["numbers"]) == ["orderQty", "pcs", "priceCents"]
    assert list(made["categories"]) == ["channel", "store_no"]
    assert list(made["labels"]) == ["gift"]
    assert list(made["items"]["numbers"]) == ["weight"]
    assert list(made["items"]["attributes"]) == ["colour", "shelf"]
    assert "# pcs looks like a quantity: 1 | 2 | 12; if its values are codes: categories" in text


def test_parts_of_parquet_with_lists(tmp_path: Path) -> None:
    for part in range(2):
        rows = [
            {"userId": n % 5, "shown_items": [n % 3, n % 7 + 3], "clicked": [n % 3], "searchTerm": f"red {n % 4} shoes",
             "ts": 1_600_000_000_000 + 1000 * n, "search_id": f"s{part}{n}"}
            for n in range(40)
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"part-{part}.parquet")
    made = guessed(tmp_path)
    assert made["files"] == "part-*.parquet"
    assert (made["user"], made["item"], made["request"]) == ("userId", "shown_items", "search_id")
    assert made["explode"] == {"columns": ["shown_items"]}
    assert made["labels"] == {"clicked": {"member_of": "clicked"}}
    assert made["time"] == {"column": "ts", "unit": "ms"}
    assert made["query"] == "searchTerm"


def test_json_lines_with_item_metadata(tmp_path: Path) -> None:
    log = pl.DataFrame({"reviewerID": [f"A{n % 9}" for n in range(50)], "asin": [f"B{n % 13}" for n in range(50)],
                        "overall": [float(n % 5 + 1) for n in range(50)],
                        "unixReviewTime": [1_400_000_000 + 86_400 * n for n in range(50)]})  # fmt: skip
    log.write_ndjson(tmp_path / "reviews.jsonl")
    meta = [
        {"asin": f"B{n}", "title": f"Thing {n}", "categories": ["Toys", f"kind {n % 2}"], "price": n + 0.5}
        for n in range(13)
    ]
    pl.DataFrame(meta).write_ndjson(tmp_path / "meta.jsonl")
    made = guessed(tmp_path)
    assert (made["user"], made["item"]) == ("reviewerID", "asin")
    assert made["time"] == {"column": "unixReviewTime", "unit": "s"}
    assert made["labels"] == {"overall": {"column": "overall", "type": "float32"}}
    assert made["items"]["texts"] == {"title": "title", "categories": "categories"}
    assert made["items"]["lists"] == ["categories"]
    assert made["items"]["numbers"] == {"price": "price"}


def test_searches_with_lists_written_as_text(tmp_path: Path) -> None:
    lines = ["user_id,search_id,time_ms,query,shown_item_ids,clicked_item_ids"]
    lines += [f"u{n % 6},s{n},{1_600_000_000_000 + n},red {n % 5},i{n % 9} i{n % 4 + 10},i{n % 9}" for n in range(60)]
    (tmp_path / "searches.csv").write_text("\n".join(lines))
    made = guessed(tmp_path)
    assert (made["request"], made["query"]) == ("search_id", "query")
    assert made["explode"] == {"columns": ["shown_item_ids"], "separator": " "}
    assert made["labels"] == {"clicked_item_ids": {"member_of": "clicked_item_ids"}}
    assert made["prepare"]["behaviour"] == "clicked_item_ids"


def test_the_file_of_items_is_the_one_whose_names_say_so(tmp_path: Path) -> None:
    log = "".join(f"u{n % 8},{n % 40},{n // 8}\n" for n in range(160))
    (tmp_path / "interactions.csv").write_text("user_id,item_id,order\n" + log)
    (tmp_path / "items.csv").write_text(
        "item_id,text,brand_id\n" + "".join(f"{n},thing {n},{n}\n" for n in range(20, 60))
    )
    (tmp_path / "codes.csv").write_text("item_id,c1,c2\n" + "".join(f"{n},{n % 4},{n % 3}\n" for n in range(40)))
    made = guessed(tmp_path)
    assert made["time"] == {"column": "order", "unit": "order"}
    assert (made["items"]["files"], made["items"]["item"]) == ("items.csv", "item_id")
    assert made["items"]["texts"] == {"text": "text"}
    assert made["items"]["attributes"] == {"brand_id": "brand_id"}  # an id is no number


def test_the_layout_of_lc_rec_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "Games.inter.json").write_text('{"u": ["a", "b"]}')
    assert yaml.safe_load(suggest(str(tmp_path))) == {"layout": "lcrec"}


def test_a_log_without_times_is_in_the_order_of_its_lines(tmp_path: Path) -> None:
    (tmp_path / "plays.csv").write_text("user_id,track\n" + "".join(f"{n % 4},t{n % 6}\n" for n in range(30)))
    made = guessed(tmp_path)
    assert made["time"] == {"unit": "order"}
    assert made["prepare"]["split"] == {"kind": "leave_last_out"}


def test_a_folder_that_is_no_log_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no file"):
        suggest(str(tmp_path))
    (tmp_path / "readme.md").write_text("hello")
    with pytest.raises(UserError, match=r"no file that can be read as a log: readme.md"):
        suggest(str(tmp_path))
    (tmp_path / "weather.csv").write_text("station,temperature\nOslo,3.5\nRoma,20.25\n")
    with pytest.raises(
        UserError, match=r"weather.csv has no two columns .*; it has station, temperature: copy the nearest"
    ):
        suggest(str(tmp_path))


@pytest.mark.long
def test_the_command_answers_without_ray(tmp_path: Path) -> None:
    raw = MAKERS["mind"](tmp_path / "raw")
    code = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['--suggest', sys.argv[1]]\n"
        "try: runpy.run_module('jobs.prepare', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code and 'ray' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(raw)], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["history"]["column"] == "history"


@pytest.mark.parametrize(
    ("delimiter", "amounts", "expected"),
    [
        (";", ["3.518", "117", "1.234.000"], [3518, 117, 1234000]),
        (";", ["3.518 €", "117 €", "20 €"], [3518, 117, 20]),
        (";", ["3.518", "117", "0.250"], None),
        (";", ["3.51", "117", "2"], None),
        (",", ["3.518", "117", "2"], None),
        ("\t", ["$5,261", "$154", "$10,461"], [5261, 154, 10461]),
        ("\t", ["-5,261", "154", "1,234,000"], [-5261, 154, 1234000]),
        (";", ["¥5,261", "¥154", "¥0"], [5261, 154, 0]),
        (";", ["5,261", "0,154", "2"], None),
        (";", ["5,261", "1,154", "2"], None),
        ("\t", ["0,250", "5,261", "2"], None),
    ],
)
def test_marks_before_thousands_are_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], delimiter: str, amounts: list[str], expected: list[int] | None
) -> None:
    lines = [
        delimiter.join([f"u{n % 9}", f"i{n % 20}", f"2023-01-{n % 28 + 1:02d}T00:00:00", amounts[n % 3]])
        for n in range(300)
    ]
    (tmp_path / "log.csv").write_text("\n".join([delimiter.join(["user", "item", "time", "amount"]), *lines]))
    prepare.run_suggestion(prepare.Suggestion(suggest=str(tmp_path)))
    text, said = capsys.readouterr()
    mark = "commas" if "," in amounts[0] else "points"
    assert said == (f"warning: amount: {mark} before thousands? check it\n" if expected else "")
    (tmp_path / "made.yaml").write_text(text)
    source, _ = load_source(str(tmp_path / "made.yaml"))
    (block,) = source.read_events(str(tmp_path), "log.csv")
    assert block.rejects.num_rows == 0
    found = block.events["num_amount"].to_pylist()[:3]
    assert found == pytest.approx(expected or [float(amount.replace(",", ".")) for amount in amounts])


def test_files_of_one_log_stand_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns in another order, one compressed; values that span lines, which prepare refuses unless it is told."""
    rows = [(f"C{n % 9:03d}", f"P{n % 20:03d}", f"2023-01-{n % 28 + 1:02d}T00:00:00", "a\nb") for n in range(300)]

    def written(*order: int) -> str:
        names = ("user", "item", "time", "note")
        lines = [",".join(names[n] for n in order)]
        return "\n".join(lines + [",".join(f'"{row[n]}"' for n in order) for row in rows]) + "\n"

    (tmp_path / "log-1.csv").write_text(written(0, 1, 2, 3))
    (tmp_path / "log-2.csv.gz").write_bytes(gzip.compress(written(2, 0, 3, 1).encode()))
    prepare.run_suggestion(prepare.Suggestion(suggest=str(tmp_path)))
    text, said = capsys.readouterr()
    made = yaml.safe_load(text)
    assert (made["files"], made["quote"], said) == ("log-*.csv*", True, "")
    assert "not read: " not in text.replace("# not read: note", "")
    assert "Not right yet" not in text


def test_names_of_another_language_are_guessed_by_their_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users' ids come again and again, items' too; prices with a comma are neither, nor a list of ids."""
    rows = "".join(f"K{n % 7:03d};{n % 20};0{n % 9 + 1}.02.2025;{n % 13},{n % 10}0\n" for n in range(200))
    (tmp_path / "zakupy.csv").write_text("Klient;Towar;Datum;Preis\n" + rows)
    prepare.run_suggestion(prepare.Suggestion(suggest=str(tmp_path)))
    text, said = capsys.readouterr()
    assert said == "warning: user and item guessed by values alone, not by names; check these lines\n"
    made = yaml.safe_load(text)
    assert (made["user"], made["item"], made["time"]["column"]) == ("Klient", "Towar", "Datum")
    assert text.count("guessed by its values alone") == 2
    assert "explode" not in made


@pytest.mark.parametrize(
    ("user", "item"),
    [("Kundennr", "Artikelnr"), ("Käufer", "Produkt"), ("Mitgliedsnummer", "ProduktID"), ("Stammkunde", "artikel_nr")],
)
def test_german_names_tell_users_and_items(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], user: str, item: str
) -> None:
    """Before any values: the item stands first and the files of both share small ids, and each file is listed."""
    names = f"Belegnr;Sekunden;Artikelbezeichnung;{item};{user};Buchungszeit"
    rows = [f"{n:07d};{n % 50};Ding {n % 40};{n % 40:06d};{n % 30:05d};{n % 28 + 1:02d}.01.2024" for n in range(400)]
    (tmp_path / "umsatz.csv").write_text("\n".join([names, *rows]))
    people = [f"{n:05d};{['Genf', 'Bern'][n % 2]};{1960 + n % 40}" for n in range(30)]
    (tmp_path / "kunden.csv").write_text("\n".join([f"{user};Ort;Geburtsjahr", *people]))
    (tmp_path / "LIESMICH.txt").write_text("Export vom ERP\n")
    (tmp_path / "leer.csv").write_text("")
    (tmp_path / "tief.jsonl").write_text('{"artikel": {"nr": "1"}}\n')
    (tmp_path / "wetter.csv").write_text("Ort;Grad\n" + "".join(f"Ort{n};{n}.5\n" for n in range(9)))
    prepare.run_suggestion(prepare.Suggestion(suggest=str(tmp_path)))
    text, said = capsys.readouterr()
    made = yaml.safe_load(text)
    assert (made["user"], made["item"], made["users"]["user"], said) == (user, item, user, "")
    assert "items" not in made
    for line in (
        "umsatz.csv (events): ",
        "kunden.csv (users): ",
        "LIESMICH.txt (not read: no two columns)",
        "leer.csv (not read: empty)",
        "tief.jsonl (not read: no two columns)",
        "wetter.csv (not read: it describes no users or items of the events): ",
    ):
        assert f"# {line}" in text
    items = [f'{{"nr": "{n:06d}", "name": "Ding {n}", "preis": "{n},95"}}' for n in range(40)]
    (tmp_path / "produkte.jsonl").write_text("\n".join([*items[:20], '{"nr": "', *items[20:]]))  # a damaged line
    made = guessed(tmp_path)
    assert (made["items"]["files"], made["items"]["item"], made["users"]["files"]) == (
        "produkte.jsonl",
        "nr",
        "kunden.csv",
    )


def test_negative_quantities_are_said_to_be_returns(tmp_path: Path) -> None:
    """What the comment says, put into the mapping, makes histories without returns."""
    raw, source, tables = tmp_path / "raw", tmp_path / "guessed.yaml", tmp_path / "tables"
    raw.mkdir()
    rows = [f"K{n % 9};A{n // 3 % 14};{1 + n % 28:02d}.03.2023;{-1 if n % 10 == 0 else 1 + n % 3}" for n in range(252)]
    (raw / "verkauf.csv").write_text("Kunde;Artikel;Datum;Menge\n" + "\n".join(rows))
    text = suggest(str(raw))
    returns = (
        "# Menge: negative values look like returns; to leave them out:\n"
        '#   labels: {purchase: {column: Menge, true_when: "> 0"}}\n'
        "#   prepare: {behaviour: purchase}\n"
    )
    assert returns in text
    made = yaml.safe_load(text)
    for line in returns.splitlines()[1:]:
        for key, value in yaml.safe_load(line.removeprefix("#")).items():
            made[key] = made.get(key, {}) | value
    source.write_text(yaml.safe_dump(made))
    prepare.run(prepare.Config(source=str(source), input=str(raw), output=str(tables)))
    kept = pl.read_parquet(f"{tables}/sequences/*.parquet")["num_Menge"].explode()
    assert len(kept) == 252 - 26
    assert kept.min() > 0
    (raw / "verkauf.csv").write_text("Kunde;Artikel;Datum;Menge\n" + "\n".join(rows).replace(";-", ";"))
    assert "returns" not in suggest(str(raw))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("basket", [False, True])
def test_fields_of_objects_are_guessed(tmp_path: Path, kind: str, basket: bool) -> None:
    """As a web tracker writes them, one item or a list of them in each row."""
    raw = tmp_path / "raw"
    raw.mkdir()
    lines = [[{"sku": f"a{(n * 7 + k) % 40}", "price": k + 0.5, "name": f"N{n}"} for k in range(3)] for n in range(400)]
    rows = [
        {
            "ts": 1_700_000_000_000 + n * 60_000,
            "user": {"id": f"u{n % 50}", "geo": {"city": ["Oslo", "Lima"][n % 2]}},
            **({"items": lines[n]} if basket else {"item": lines[n][0]}),
        }
        for n in range(400)
    ]
    if kind == "jsonl":
        rows[3]["user"]["geo"] = []
        rows[4]["user"]["geo"] = "?"
        (raw / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), raw / "log.parquet")
    text, item = suggest(str(raw)), "items" if basket else "item"
    made = yaml.safe_load(text)
    assert (made["user"], made["item"], made["time"]) == ("user.id", f"{item}.sku", {"column": "ts", "unit": "ms"})
    assert made["numbers"] == {f"{item}_price": f"{item}.price"}
    assert made["categories"] == {"user_geo_city": "user.geo.city"}
    assert made.get("explode") == ({"columns": ["items.sku", "items.price"]} if basket else None)
    assert "labels" not in made
    assert f"# The first rows by this mapping: events: {400 * (3 if basket else 1):,} rows, 0 rejected." in text


@pytest.mark.parametrize("mark", ["/", "-"])
@pytest.mark.parametrize(
    ("ordered", "names"), [(True, "user,item,when"), (False, "user,item,when"), (False, "Kunde;Artikel;Datum")]
)
def test_dates_of_days_up_to_12_are_decided_where_the_log_tells_and_always_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mark: str, ordered: bool, names: str
) -> None:
    """Rows in order tell by one reading only; then names and semicolons; else the month is first, as before."""
    days = [(day, month) for month in range(1, 13) for day in range(1, 13)]
    days = days if ordered else [days[n * 35 % 144] for n in range(144)]
    rows = [f"u{n % 7},i{n % 20},{day:02d}{mark}{month:02d}{mark}2023" for n, (day, month) in enumerate(days)]
    lines = [names, *(row.replace(",", ";") if ";" in names else row for row in rows)]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    prepare.run_suggestion(prepare.Suggestion(suggest=str(tmp_path)))
    text, said = capsys.readouterr()
    first, second = ("d", "m") if ordered or ";" in names else ("m", "d")
    assert yaml.safe_load(text)["time"]["format"] == f"%{first}{mark}%{second}{mark}%Y"
    why = "by this the rows are in order" if ordered else "both can be"
    assert said == f"warning: time: day or month first? {why}, check it\n"
    (tmp_path / "log.csv").write_text("\n".join([*lines, lines[1].replace(lines[1][-10:], f"03{mark}13{mark}2023")]))
    prepare.run_suggestion(prepare.Suggestion(suggest=str(tmp_path)))
    text, said = capsys.readouterr()
    assert (yaml.safe_load(text)["time"]["format"], said) == (f"%m{mark}%d{mark}%Y", "")


@pytest.mark.parametrize(
    ("names", "taken", "said"),
    [
        ("birth_date,order_date", "order_date", ""),
        ("Geburtsdatum,Kaufdatum", "Kaufdatum", ""),
        ("delivery_date,order_date", "order_date", ""),
        ("updated_at,timestamp", "timestamp", ""),
        ("fecha_nacimiento,fecha", "fecha", ""),
        ("date_livraison,date_commande", "date_commande", ""),
        ("order_date,view_date", "order_date", "time: the time of the event? or view_date? check it"),
        ("birth_date,expires_at", "birth_date", "time: the time of the event? or expires_at? check it"),
    ],
)
def test_the_time_of_events_is_not_that_of_births_and_deliveries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str, taken: str, said: str
) -> None:
    rows = "".join(
        f"u{n % 7},i{n % 20},2023-01-{n % 28 + 1:02d} 10:30,2023-02-{n % 28 + 1:02d} 10:30\n" for n in range(90)
    )
    (tmp_path / "log.csv").write_text(f"user,item,{names}\n{rows}")
    prepare.run_suggestion(prepare.Suggestion(suggest=str(tmp_path)))
    text, warned = capsys.readouterr()
    assert "Not right yet" not in text
    assert yaml.safe_load(text)["time"] == {"column": taken, "format": "%Y-%m-%d %H:%M"}
    assert warned == (f"warning: {said}\n" if said else "")


def test_a_file_without_names_is_guessed_by_its_values_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"P{n % 20}\tC{n % 17}\t{n}.5\t{1_672_621_057_000 + n}\n" for n in range(90))
    (tmp_path / "log.tsv").write_text(rows)
    prepare.run_suggestion(prepare.Suggestion(suggest=str(tmp_path)))
    assert "warning: user and item guessed by values alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("usual", "rare", "amount"),
    [
        ("${n}.50", "-$12.50", None),
        ("${n}.50", "$-12.50", -12.5),
        ("${n}.50", "($12.50)", None),
        ("${n}.50", "R$1,100.50", 1100.5),
        ("{n},50 €", "1 100,50 €", 1100.5),
        ("{n},50 €", "1\u202f100,50\u00a0€", 1100.5),
        ("{n},50 €", "-12,50 €", -12.5),
        ("{n},50 €", "\u221212,50 €", None),
        ("{n},50 €", "12,50- €", None),
        ("{n},50 €", "0.999 €", None),
        ("CHF {n}.50", "CHF 1'100.50", 1100.5),
    ],
)
def test_a_rare_way_to_write_a_price_is_read_or_rejected_and_never_another_price(
    tmp_path: Path, usual: str, rare: str, amount: float | None
) -> None:
    rows = [f"c{n % 9};i{n % 14};2025-12-{n % 28 + 1:02d};{usual.format(n=n % 90 + 10)}" for n in range(200)]
    rows[150] = rows[150].rsplit(";", 1)[0] + f";{rare}"
    (tmp_path / "orders.csv").write_text("Customer;Item;Date;Price\n" + "\n".join(rows))
    content = guessed(tmp_path)
    content.pop("prepare"), content.pop("layout")
    (block,) = Mapping(**content).read_events(str(tmp_path), "orders.csv")
    expected = [n % 90 + 10.5 for n in range(200)]
    expected[150:151] = [] if amount is None else [amount]
    assert block.events["num_Price"].to_pylist() == expected


def test_files_of_events_that_are_not_read_are_named_as_such(tmp_path: Path) -> None:
    """A second file of events in other columns, and orders beside their lines, whose users stand in the first."""
    days = [f"2024-01-{n % 28 + 1:02d}T00:00:00" for n in range(200)]
    views, orders = tmp_path / "views", tmp_path / "orders"
    views.mkdir()
    orders.mkdir()
    (views / "views.csv").write_text(
        "user,item,when\n" + "".join(f"{n % 9},{n % 20},{d}\n" for n, d in enumerate(days))
    )
    (views / "buys.csv").write_text(
        "user,item,when,by\n" + "".join(f"{n % 9},{n % 20},{d},web\n" for n, d in enumerate(days[:60]))
    )
    assert "# buys.csv (not read: it has user and item too; if these are the same events, let 'files' match it)" in (
        suggest(str(views))
    )
    lines = "".join(f"{9000 + n // 2},{n % 20}\n" for n in range(200))
    (orders / "order_items.csv").write_text("order_id,product_id\n" + lines)
    (orders / "orders.csv").write_text(
        "order_id,customer_id,created_at\n" + "".join(f"{9000 + n},{n % 9},{d}\n" for n, d in enumerate(days[:100]))
    )
    assert (
        "# order_items.csv has no users: orders.csv has the customer_id of each order_id; join the two files first\n"
    ) in suggest(str(orders))


@pytest.mark.parametrize(
    ("write", "time"),
    [
        ("%Y-%m-%dT%H:%M:%S", {"unit": "iso"}),
        ("%m/%d/%Y %H:%M", {"format": "%m/%d/%Y %H:%M"}),
        ("%d/%m/%Y", {"format": "%d/%m/%Y"}),
        ("%Y%m%d", {"format": "%Y%m%d"}),
        ("%s", {"unit": "s"}),
    ],
)
@pytest.mark.parametrize("broken", ["soon", "-", "13/13/2024"])
def test_a_few_broken_times_do_not_hide_the_others(
    tmp_path: Path, write: str, time: dict[str, str], broken: str
) -> None:
    days = [datetime(2024, 1, 1, 8, tzinfo=UTC) + timedelta(days=n // 2) for n in range(400)]
    told = [str(int(day.timestamp())) if write == "%s" else day.strftime(write) for day in days]
    for n in (0, 7, 211):
        told[n] = broken
    (tmp_path / "log.csv").write_text(
        "user,item,bought_date\n" + "".join(f"u{n % 9},i{n % 20},{t}\n" for n, t in enumerate(told))
    )
    text = suggest(str(tmp_path))
    assert yaml.safe_load(text)["time"] == {"column": "bought_date", **time}
    assert "400 rows, 3 rejected" in text
