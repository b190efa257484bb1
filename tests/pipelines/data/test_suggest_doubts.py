"""Doubts in a suggested mapping, and files beside the log."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from pipelines.data.reading.log import parse_log
from pipelines.data.suggestion.suggest import Suggestion, suggest

CASES = Path(__file__).parents[3] / "../shared/cases"
ROWS = 1500
RANDOM = random.Random(5)
USERS = [RANDOM.randrange(100) for _ in range(ROWS)]
ITEMS = [RANDOM.randrange(60) for _ in range(ROWS)]
PLACES = [1000 + item for item in ITEMS]
VARIANTS = [2 * item + row % 2 for row, item in enumerate(ITEMS)]
SECONDS = [1_650_000_000 + 97 * row for row in range(ROWS)]
ISO = [f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}" for at in SECONDS]
LATITUDES = [40 + item / 1009 for item in ITEMS]
LONGITUDES = [-74 + item / 1013 for item in ITEMS]


def csv(*columns: Sequence[object], names: str = "", by: str = ",") -> str:
    """Return CSV of the columns, without a header if `names` is empty."""
    rows = [by.join(map(str, row)) for row in zip(*columns, strict=True)]
    return "\n".join([*([names] if names else []), *rows]) + "\n"


def parquet(**columns: Any) -> bytes:
    pl.DataFrame(columns).write_parquet(file := io.BytesIO())
    return file.getvalue()


SALES = csv(USERS, PLACES, SECONDS, names="customer,article,at")


def catalogue(write: Callable[[int], object], every: int = 1) -> str:
    """Return an item file of every `every`-th item, with ids as `write` has them."""
    rows = [f"{write(1000 + item)},thing {item}" for item in range(0, 60, every)]
    return "\n".join(["article,title", *rows]) + "\n"


def suggest_for(folder: Path, files: dict[str, str | bytes]) -> tuple[Suggestion, Any]:
    """Return the suggestion for a folder of these files, and its mapping."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    suggestion = suggest(str(folder))
    assert "Not right yet" not in suggestion.text
    return suggestion, yaml.safe_load(suggestion.text)


def doubtful_keys(suggestion: Suggestion) -> list[str]:
    return [line.split(":")[0].strip() for line in suggestion.doubts]


JSON = [
    json.dumps({"user": user, "lng": lng, "lat": lat, "venue": place, "ts": at})
    for user, lng, lat, place, at in zip(
        USERS, LONGITUDES, LATITUDES, PLACES, SECONDS, strict=True
    )
]
SIGNED = [f"{'+-'[item % 2]}{item % 9}.{item % 80 + 10}" for item in ITEMS]
MEASURES: dict[str, tuple[dict[str, str | bytes], str, str, list[str]]] = {
    "tabs, longitude before latitude": (
        {"log.csv": csv(USERS, ISO, LONGITUDES, LATITUDES, PLACES, by="\t")},
        "c1",
        "c5",
        ["user", "item"],
    ),
    "coordinates first": (
        {"log.csv": csv(LONGITUDES, LATITUDES, USERS, PLACES, SECONDS)},
        "c3",
        "c4",
        ["user", "item"],
    ),
    "numbers of JSON": ({"log.jsonl": "\n".join(JSON)}, "user", "venue", []),
    "floats of Parquet": (
        {"log.parquet": parquet(who=USERS, gx=LONGITUDES, spot=PLACES, at=SECONDS)},
        "who",
        "spot",
        ["user", "item"],
    ),
    "float ids of Parquet": (
        {
            "log.parquet": parquet(
                user_id=[float(user) for user in USERS],
                x=LONGITUDES,
                item_id=[float(place) for place in PLACES],
                at=SECONDS,
            )
        },
        "user_id",
        "item_id",
        [],
    ),
    "prices with a sign": (
        {"log.csv": csv(USERS, SIGNED, PLACES, SECONDS, names="user,d,thing,at")},
        "user",
        "thing",
        ["item"],
    ),
    "whole numbers with a sign": (
        {
            "log.csv": csv(
                USERS,
                [item - 30 for item in ITEMS],
                PLACES,
                ISO,
                names="user,d,k_id,at",
            )
        },
        "user",
        "k_id",
        [],
    ),
    "ratings with decimals": (
        {"log.csv": csv(USERS, [i % 10 / 2 for i in ITEMS], PLACES, SECONDS)},
        "c1",
        "c3",
        ["user", "item"],
    ),
    "scores with exponents": (
        {
            "log.csv": csv(
                [f"{item / 7 * 1e-5:.3e}" for item in ITEMS], USERS, PLACES, SECONDS
            )
        },
        "c2",
        "c3",
        ["user", "item"],
    ),
    "both coordinates in one text": (
        {
            "log.csv": csv(
                USERS,
                [
                    f'"{lat:.5f}, {lon:.5f}"'
                    for lat, lon in zip(LATITUDES, LONGITUDES, strict=True)
                ],
                PLACES,
                SECONDS,
                names="user,g,place_id,at",
            )
        },
        "user",
        "place_id",
        [],
    ),
    "amounts with a currency": (
        {
            "log.csv": csv(
                USERS,
                [f"${item / 7:.2f}" for item in ITEMS],
                PLACES,
                ISO,
                names="user,m,spot_id,at",
            )
        },
        "user",
        "spot_id",
        [],
    ),
}


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_is_never_an_id(tmp_path: Path, name: str) -> None:
    files, user, item, doubtful = MEASURES[name]
    suggestion, mapping = suggest_for(tmp_path, files)
    assert (mapping["user"], mapping["item"]) == (user, item)
    assert doubtful_keys(suggestion) == doubtful


@pytest.mark.parametrize(
    ("content", "user", "item", "time", "doubtful"),
    [
        (
            csv(
                [user % 2 for user in USERS],
                [1_000_014_000 + user for user in USERS],
                PLACES,
                [at * 1000 for at in SECONDS],
                names="network,userId,itemId,showTime",
            ),
            "userId",
            "itemId",
            {"column": "showTime", "unit": "ms"},
            [],
        ),
        (
            csv(
                [1_500_000_000 + 1000 * user for user in USERS],
                PLACES,
                SECONDS,
                names="member_no,product,ts",
            ),
            "member_no",
            "product",
            {"column": "ts", "unit": "s"},
            [],
        ),
        (
            csv(
                USERS,
                [20190101 + item % 28 for item in ITEMS],
                SECONDS,
                names="user_id,product_id,ts",
            ),
            "user_id",
            "product_id",
            {"column": "ts", "unit": "s"},
            [],
        ),
        (
            csv(
                USERS,
                [1_200_000_000_000_000_000 + 12_345_677 * i for i in ITEMS],
                SECONDS,
                names="user,tweet_id,ts",
            ),
            "user",
            "tweet_id",
            {"column": "ts", "unit": "s"},
            [],
        ),
        (
            csv([1_500_000_000 + 1000 * user for user in USERS], PLACES, SECONDS),
            "c1",
            "c2",
            {"column": "c3", "unit": "s"},
            ["user", "item", "time"],
        ),
    ],
)
def test_ids_that_look_like_times_are_ids(
    tmp_path: Path,
    content: str,
    user: str,
    item: str,
    time: dict[str, str],
    doubtful: list[str],
) -> None:
    suggestion, mapping = suggest_for(tmp_path, {"log.csv": content})
    assert (mapping["user"], mapping["item"], mapping["time"]) == (user, item, time)
    assert doubtful_keys(suggestion) == doubtful


@pytest.mark.parametrize(
    ("files", "key", "doubt"),
    [
        (
            {"log.csv": csv(USERS, PLACES, SECONDS, names="user,spot,at")},
            "item",
            "no name says item; is it?",
        ),
        (
            {
                "a.csv": csv(
                    USERS, VARIANTS, PLACES, ISO, names="user_id,sku,product_id,at"
                )
            },
            "item",
            "or item: sku?",
        ),
        (
            {"a.csv": csv(USERS, VARIANTS, PLACES, ISO, names="user,customer,item,at")},
            "user",
            "or user: customer?",
        ),
        (
            {
                "log.csv": csv(
                    USERS,
                    PLACES,
                    ISO,
                    [ISO[-1 - row] for row in range(ROWS)],
                    names="user,item,created_at,viewed_at",
                )
            },
            "time",
            "or viewed_at?",
        ),
        (
            {"log.csv": csv(USERS, PLACES, names="user,item")},
            "time",
            "no column looks like times",
        ),
        ({"sales.csv": SALES, "orders.csv": SALES}, "files", "and sales.csv too?"),
        (
            {
                "views.csv": csv(USERS, PLACES, ISO, names="user,item,at"),
                "buys.csv": csv(USERS, PLACES, ISO, ITEMS, names="user,item,at,price"),
            },
            "files",
            "or views.csv?",
        ),
        (
            {
                "sales.csv": SALES,
                "articles.csv": catalogue(str),
                "products.csv": catalogue(str),
            },
            "files",
            "or products.csv?",
        ),
        (
            {
                "sales.csv": SALES,
                "articles_v1.csv": catalogue(str),
                "articles_v2.csv": catalogue(str),
            },
            "files",
            "2 files have the same items?",
        ),
        (
            {"sales.csv": SALES, "articles.csv": catalogue(lambda item: f"x{item}")},
            "item",
            "articles.csv has none of these ids, but x1000",
        ),
        (
            {"sales.csv": SALES, "articles.csv": catalogue(str, every=3)},
            "files",
            "it has only 20 of 60 items; is it?",
        ),
        (
            {
                "ratings.csv": csv(
                    USERS,
                    [f"B{place}{row % 3}" for row, place in enumerate(PLACES)],
                    [f"B{place}" for place in PLACES],
                    ISO,
                    names="user_id,asin,parent_asin,timestamp",
                ),
                "meta.csv": catalogue(lambda item: f"B{item}").replace(
                    "article", "parent_asin"
                ),
            },
            "item",
            "or item: asin?",
        ),
        (
            {
                "log.csv": csv(USERS, ITEMS, SECONDS),
                "movies.csv": "movieId,title\n"
                + "".join(f"{item},film {item}\n" for item in range(1000)),
            },
            "user",
            "or user: c2?",
        ),
    ],
)
def test_a_line_with_a_rival_names_it(
    tmp_path: Path, files: dict[str, str | bytes], key: str, doubt: str
) -> None:
    suggestion, _ = suggest_for(tmp_path, files)
    lines = [line for line in suggestion.doubts if line.strip().startswith(f"{key}:")]
    assert any(doubt in line for line in lines), suggestion.text


@pytest.mark.parametrize(
    ("names", "user", "item", "doubtful"),
    [
        ("review_id,user_id,business_id,date", "user_id", "business_id", []),
        ("customer_id,order_id,product_type_id,date", "customer_id", None, ["item"]),
        ("user_feature_0,x,item_id,date", None, "item_id", ["user"]),
        ("user_agent,x,item_id,date", None, "item_id", ["user"]),
        ("cust_id,n,prod_id,date", "cust_id", "prod_id", []),
    ],
)
def test_an_attribute_of_users_or_items_is_not_their_id(
    tmp_path: Path, names: str, user: str | None, item: str | None, doubtful: list[str]
) -> None:
    first, second = (
        (range(ROWS), USERS) if names.startswith("review") else (USERS, range(ROWS))
    )
    log = csv(first, second, PLACES, ISO, names=names)
    suggestion, mapping = suggest_for(tmp_path, {"log.csv": log})
    assert user in (None, mapping["user"])
    assert item in (None, mapping["item"])
    assert doubtful_keys(suggestion) == doubtful


OFFERS = "its name says who offers items; is it the user?"


@pytest.mark.parametrize(
    ("names", "user", "item", "doubts"),
    [
        ("buyer_id,seller_id,product_id", "buyer_id", "product_id", []),
        ("viewer_id,channel_id,video_id", "viewer_id", "video_id", []),
        ("voter_id,author_id,post_id", "voter_id", "post_id", []),
        ("commenter,channel_id,video_id", "commenter", "video_id", []),
        ("liker_id,creator_id,song_id", "liker_id", "song_id", []),
        (
            "user_id,store_id,purchased_product_id",
            "user_id",
            "purchased_product_id",
            [],
        ),
        ("customer,store_id,viewed_item", "customer", "viewed_item", []),
        ("buyer_id,play_id,thing_id", "buyer_id", "thing_id", ["or item: play_id?"]),
        ("purchase_key,seller_id,product_id", None, None, ["or user: purchase_key?"]),
        ("like_id,channel_id,video_id", None, "video_id", ["or user: like_id?"]),
        ("seller_id,reader_id,article_id", "reader_id", None, ["or user: seller_id?"]),
        ("seller_id,price,product_id", "seller_id", "product_id", [OFFERS]),
        ("device_id,likes,product_id", "device_id", "product_id", []),
        ("user_id,followers_count,product_id", "user_id", "product_id", []),
        ("user_id,viewers,product_id", "user_id", "product_id", []),
        ("user_id,product_rating,spot_id", "user_id", "spot_id", []),
    ],
)
def test_who_acts_is_the_user_and_not_an_outcome(
    tmp_path: Path, names: str, user: str | None, item: str | None, doubts: list[str]
) -> None:
    others = [row * 7 % 50 for row in range(ROWS)]
    log = csv(USERS, others, PLACES, SECONDS, names=f"{names},at")
    suggestion, mapping = suggest_for(tmp_path, {"log.csv": log})
    assert user in (None, mapping["user"])
    assert item in (None, mapping["item"])
    assert len(suggestion.doubts) == len(doubts), suggestion.text
    for line, doubt in zip(suggestion.doubts, doubts, strict=True):
        assert doubt in line


def test_an_item_clicked_of_a_list_is_an_outcome(tmp_path: Path) -> None:
    lists = [f"{place} {place + 1} {place + 2}" for place in PLACES]
    log = csv(USERS, lists, PLACES, SECONDS, names="user,shown_items,clicked_item,at")
    _, mapping = suggest_for(tmp_path, {"log.csv": log})
    assert "clicked_item" in mapping["labels"]


def rows_of(names: str, word: str) -> str:
    """Return a file of 60 rows with ids that count up."""
    return names + "\n" + "".join(f"{n},{word} number {n}\n" for n in range(60))


@pytest.mark.parametrize(
    ("column", "named", "rival", "doubted"),
    [
        ("item_id", ("books.csv", "item_id,title"), ("games.csv", "item_id,title"), 1),
        ("item_id", ("games.csv", "item_id,title"), ("books.csv", "item_id,title"), 1),
        ("article", ("articles.csv", "id,title"), ("stores.csv", "id,name"), 1),
        ("thing", ("books.csv", "id,title"), ("lists.csv", "id,title"), 1),
        ("thing", ("books.csv", "book_id,title"), ("games.csv", "id,title"), 1),
        ("item_id", ("items.csv", "item_id,title"), ("shops.csv", "shop_id,name"), 0),
        ("item", ("items.csv", "id,title"), ("shops.csv", "store_id,name"), 0),
        ("item", ("items.csv", "id,title"), ("people.csv", "user_id,name"), 0),
    ],
)
def test_a_file_of_another_name_with_the_same_ids_is_a_rival(
    tmp_path: Path,
    column: str,
    named: tuple[str, str],
    rival: tuple[str, str],
    doubted: bool,
) -> None:
    shops = [row * 7 % 50 for row in range(ROWS)]
    names = f"user_id,{column},timestamp,store_id"
    files: dict[str, str | bytes] = {
        "log.csv": csv(USERS, ITEMS, SECONDS, shops, names=names),
        named[0]: rows_of(named[1], "lamp"),
        rival[0]: rows_of(rival[1], "shop"),
    }
    suggestion, _ = suggest_for(tmp_path, files)
    lines = [line for line in suggestion.doubts if line.startswith("  files: ")]
    assert len(lines) == doubted, suggestion.text
    assert all(name in line for line in lines for name in (named[0], rival[0]))


def test_two_columns_of_an_item_file_that_match_are_named(tmp_path: Path) -> None:
    rows = "".join(f"{1000 + n},{1059 - n},thing {n}\n" for n in range(60))
    files = {"sales.csv": SALES, "articles.csv": f"id,sort,title\n{rows}"}
    suggestion, mapping = suggest_for(tmp_path, files)
    assert mapping["items"]["item"] == "id"
    (line,) = suggestion.doubts
    assert line.endswith("; or sort?")


def test_a_file_of_items_tells_users_from_items(tmp_path: Path) -> None:
    places = [70_000 + 977 * item for item in ITEMS]
    venues = "".join(f"{70_000 + 977 * item}\tVenue {item}\n" for item in range(60))
    suggestion, mapping = suggest_for(
        tmp_path,
        {
            "log.csv": csv(USERS, ISO, LATITUDES, LONGITUDES, places, by="\t"),
            "venues.csv": venues,
        },
    )
    assert (mapping["user"], mapping["item"]) == ("c1", "c5")
    assert mapping["items"]["files"] == "venues.csv"
    assert suggestion.doubts == []


@pytest.mark.parametrize(
    ("log", "file", "log_sql", "file_sql"),
    [
        (
            lambda i: f"SKU-{i}",
            lambda i: f"sku-{i}",
            "lower(article)",
            "lower(article)",
        ),
        (str, lambda i: f"{i:08}", "lpad(article, 8, '0')", "article"),
        (lambda i: f"{i:08}", str, "article", "lpad(article, 8, '0')"),
    ],
)
def test_ids_that_are_written_differently_are_made_alike(
    tmp_path: Path,
    log: Callable[[int], str],
    file: Callable[[int], str],
    log_sql: str,
    file_sql: str,
) -> None:
    sales = csv(USERS, list(map(log, PLACES)), ISO, names="customer,article,at")
    suggestion, mapping = suggest_for(
        tmp_path, {"sales.csv": sales, "articles.csv": catalogue(file)}
    )
    assert (mapping["item"], mapping["items"]["item"]) == (log_sql, file_sql)
    assert suggestion.doubts == []


def test_a_file_of_some_users_lowers_min_matched(tmp_path: Path) -> None:
    customers = "".join(f"{user},{user % 7 + 20}\n" for user in range(0, 100, 3))
    files = {"sales.csv": SALES, "customers.csv": f"customer,age\n{customers}"}
    suggestion, mapping = suggest_for(tmp_path, {**files, "coupons.txt": "a b\nc d\n"})
    assert 0.1 < mapping["prepare"]["min_matched"] < 0.2
    assert "34 of the first 100 users have a row in customers.csv" in suggestion.text
    assert "# No key reads coupons.txt." in suggestion.text
    assert suggestion.doubts == []


@pytest.mark.parametrize(
    ("name", "following"),
    [
        ("sales-1.csv", "sales-2.csv"),
        ("sales_2024-01-05.csv", "sales_2024-01-06.csv"),
        ("sales20240105.csv", "sales20240106.csv"),
        ("part-00000.csv", "part-00001.csv"),
        ("log.3.csv.gz", "log.4.csv.gz"),
        ("2024-01-05/events.csv", "2024-01-06/events.csv"),
        ("dt=2024-01-05/events.csv", "dt=2024-01-06/events.csv"),
        (
            "part-00000-3f2c8a1e-1b2c-4d5e-8f90-abcdefabcdef-c000.csv",
            "part-00000-aa2c8a1e-1b2c-4d5e-8f90-abcdefabcdee-c000.csv",
        ),
    ],
)
def test_the_pattern_of_one_file_matches_that_of_the_next_day(
    tmp_path: Path, name: str, following: str
) -> None:
    content = SALES.encode()
    content = gzip.compress(content) if name.endswith(".gz") else content
    _, mapping = suggest_for(tmp_path, {name: content, "items-2.txt": "no log"})
    assert fnmatchcase(name, mapping["files"])
    assert fnmatchcase(following, mapping["files"])
    assert not fnmatchcase("items-2.txt", mapping["files"])


def test_files_in_the_folder_and_below_it_are_one_log(tmp_path: Path) -> None:
    _, mapping = suggest_for(tmp_path, {"day-1.csv": SALES, "old/day-0.csv": SALES})
    mapping.pop("prepare")
    assert len(parse_log(mapping).event_files(str(tmp_path))) == 2


def test_what_is_computed_before_the_event_is_no_label(tmp_path: Path) -> None:
    names = "user,item,timestamp,propensity_score,predicted_click,relevance_score,score"
    decimals = [item / 61 for item in ITEMS]
    log = csv(USERS, PLACES, ISO, decimals, decimals, decimals, ITEMS, names=names)
    suggestion, mapping = suggest_for(tmp_path, {"log.csv": log})
    assert list(mapping["labels"]) == ["score"]
    numbers = "# numbers: [propensity_score, predicted_click, relevance_score]"
    assert numbers in suggestion.text


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("case", "user", "item", "doubtful"),
    [
        ("d4_suggest_coordinate_as_item/log", "c1", "c5", ["user", "item"]),
        ("d4_suggest_one_file_daily/raw", "customer", "article", []),
        ("d4_min_matched_quickstart/shop", "customer", "article", []),
        ("d4_suggest_numeric_user", "userId", "itemId", ["user"]),
    ],
)
def test_cases_of_strangers_are_told_or_doubted(
    case: str, user: str, item: str, doubtful: list[str]
) -> None:
    suggestion = suggest(str(CASES / case))
    mapping = yaml.safe_load(suggestion.text)
    assert (mapping["user"], mapping["item"]) == (user, item)
    assert doubtful_keys(suggestion) == doubtful
