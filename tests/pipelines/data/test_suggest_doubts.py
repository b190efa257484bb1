"""A suggested mapping marks the choices that are in doubt and names their rivals. It
also reads the files of items and users beside the log.
"""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
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
ITEM_NUMBERS = [RANDOM.randrange(60) for _ in range(ROWS)]
ITEM_IDS = [1000 + item for item in ITEM_NUMBERS]
VARIANTS = [2 * item + row % 2 for row, item in enumerate(ITEM_NUMBERS)]
SECONDS = [1_650_000_000 + 97 * row for row in range(ROWS)]
ISO_TIMES = [f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}" for at in SECONDS]
LATITUDES = [40 + item / 1009 for item in ITEM_NUMBERS]
LONGITUDES = [-74 + item / 1013 for item in ITEM_NUMBERS]


def format_csv(
    *columns: Sequence[object], names: str = "", delimiter: str = ","
) -> str:
    """Return columns as CSV, without a header if `names` is empty."""
    lines = [delimiter.join(map(str, row)) for row in zip(*columns, strict=True)]
    if names:
        lines.insert(0, names)
    return "\n".join(lines) + "\n"


def format_parquet(**columns: Any) -> bytes:
    """Return columns as a Parquet file."""
    file = io.BytesIO()
    pl.DataFrame(columns).write_parquet(file)
    return file.getvalue()


SALES = format_csv(USERS, ITEM_IDS, SECONDS, names="customer,article,at")


def format_items(format_id: Callable[[int], object], stride: int = 1) -> str:
    """Return an item file of every `stride`-th item, with ids as `format_id` writes
    them.
    """
    rows = [f"{format_id(1000 + item)},thing {item}" for item in range(0, 60, stride)]
    return "\n".join(["article,title", *rows]) + "\n"


def suggest_for(
    folder: Path, files: Mapping[str, str | bytes]
) -> tuple[Suggestion, Any]:
    """Write files to a folder; return the suggestion for it, and its mapping."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    suggestion = suggest(str(folder))
    assert "Not right yet" not in suggestion.text
    return suggestion, yaml.safe_load(suggestion.text)


def list_doubtful_keys(suggestion: Suggestion) -> list[str]:
    """Return the keys of the mapping that are in doubt, in its order."""
    return [line.split(":")[0].strip() for line in suggestion.doubts]


JSON_LINES = [
    json.dumps({"user": user, "lng": lng, "lat": lat, "venue": venue, "ts": at})
    for user, lng, lat, venue, at in zip(
        USERS, LONGITUDES, LATITUDES, ITEM_IDS, SECONDS, strict=True
    )
]
SIGNED = [f"{'+-'[item % 2]}{item % 9}.{item % 80 + 10}" for item in ITEM_NUMBERS]
COORDINATES = [
    f'"{latitude:.5f}, {longitude:.5f}"'
    for latitude, longitude in zip(LATITUDES, LONGITUDES, strict=True)
]
# Files of a log, its columns of users and items, and the keys that are in doubt.
MEASURES: dict[str, tuple[dict[str, str | bytes], str, str, list[str]]] = {
    "tabs, longitude before latitude": (
        {
            "log.csv": format_csv(
                USERS, ISO_TIMES, LONGITUDES, LATITUDES, ITEM_IDS, delimiter="\t"
            )
        },
        "c1",
        "c5",
        ["user", "item"],
    ),
    "coordinates first": (
        {"log.csv": format_csv(LONGITUDES, LATITUDES, USERS, ITEM_IDS, SECONDS)},
        "c3",
        "c4",
        ["user", "item"],
    ),
    "numbers of JSON": ({"log.jsonl": "\n".join(JSON_LINES)}, "user", "venue", []),
    "floats of Parquet": (
        {
            "log.parquet": format_parquet(
                who=USERS, gx=LONGITUDES, spot=ITEM_IDS, at=SECONDS
            )
        },
        "who",
        "spot",
        ["user", "item"],
    ),
    "float ids of Parquet": (
        {
            "log.parquet": format_parquet(
                user_id=[float(user) for user in USERS],
                x=LONGITUDES,
                item_id=[float(item) for item in ITEM_IDS],
                at=SECONDS,
            )
        },
        "user_id",
        "item_id",
        [],
    ),
    "prices with a sign": (
        {
            "log.csv": format_csv(
                USERS, SIGNED, ITEM_IDS, SECONDS, names="user,d,thing,at"
            )
        },
        "user",
        "thing",
        ["item"],
    ),
    "whole numbers with a sign": (
        {
            "log.csv": format_csv(
                USERS,
                [item - 30 for item in ITEM_NUMBERS],
                ITEM_IDS,
                ISO_TIMES,
                names="user,d,k_id,at",
            )
        },
        "user",
        "k_id",
        [],
    ),
    "ratings with decimals": (
        {
            "log.csv": format_csv(
                USERS, [i % 10 / 2 for i in ITEM_NUMBERS], ITEM_IDS, SECONDS
            )
        },
        "c1",
        "c3",
        ["user", "item"],
    ),
    "scores with exponents": (
        {
            "log.csv": format_csv(
                [f"{item / 7 * 1e-5:.3e}" for item in ITEM_NUMBERS],
                USERS,
                ITEM_IDS,
                SECONDS,
            )
        },
        "c2",
        "c3",
        ["user", "item"],
    ),
    "both coordinates in one text": (
        {
            "log.csv": format_csv(
                USERS,
                COORDINATES,
                ITEM_IDS,
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
            "log.csv": format_csv(
                USERS,
                [f"${item / 7:.2f}" for item in ITEM_NUMBERS],
                ITEM_IDS,
                ISO_TIMES,
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
    files, user, item, doubtful_keys = MEASURES[name]

    suggestion, mapping = suggest_for(tmp_path, files)

    assert (mapping["user"], mapping["item"]) == (user, item)
    assert list_doubtful_keys(suggestion) == doubtful_keys


@pytest.mark.parametrize(
    ("content", "user", "item", "time", "doubtful_keys"),
    [
        (
            format_csv(
                [user % 2 for user in USERS],
                [1_000_014_000 + user for user in USERS],
                ITEM_IDS,
                [at * 1000 for at in SECONDS],
                names="network,userId,itemId,showTime",
            ),
            "userId",
            "itemId",
            {"column": "showTime", "unit": "ms"},
            [],
        ),
        (
            format_csv(
                [1_500_000_000 + 1000 * user for user in USERS],
                ITEM_IDS,
                SECONDS,
                names="member_no,product,ts",
            ),
            "member_no",
            "product",
            {"column": "ts", "unit": "s"},
            [],
        ),
        (
            format_csv(
                USERS,
                [20190101 + item % 28 for item in ITEM_NUMBERS],
                SECONDS,
                names="user_id,product_id,ts",
            ),
            "user_id",
            "product_id",
            {"column": "ts", "unit": "s"},
            [],
        ),
        (
            format_csv(
                USERS,
                [1_200_000_000_000_000_000 + 12_345_677 * i for i in ITEM_NUMBERS],
                SECONDS,
                names="user,tweet_id,ts",
            ),
            "user",
            "tweet_id",
            {"column": "ts", "unit": "s"},
            [],
        ),
        (
            format_csv(
                [1_500_000_000 + 1000 * user for user in USERS], ITEM_IDS, SECONDS
            ),
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
    doubtful_keys: list[str],
) -> None:
    suggestion, mapping = suggest_for(tmp_path, {"log.csv": content})

    assert (mapping["user"], mapping["item"], mapping["time"]) == (user, item, time)
    assert list_doubtful_keys(suggestion) == doubtful_keys


@pytest.mark.parametrize(
    ("files", "key", "doubt"),
    [
        (
            {"log.csv": format_csv(USERS, ITEM_IDS, SECONDS, names="user,spot,at")},
            "item",
            "no name says item; is it?",
        ),
        (
            {
                "a.csv": format_csv(
                    USERS,
                    VARIANTS,
                    ITEM_IDS,
                    ISO_TIMES,
                    names="user_id,sku,product_id,at",
                )
            },
            "item",
            "or item: sku?",
        ),
        (
            {
                "a.csv": format_csv(
                    USERS, VARIANTS, ITEM_IDS, ISO_TIMES, names="user,customer,item,at"
                )
            },
            "user",
            "or user: customer?",
        ),
        (
            {
                "log.csv": format_csv(
                    USERS,
                    ITEM_IDS,
                    ISO_TIMES,
                    [ISO_TIMES[-1 - row] for row in range(ROWS)],
                    names="user,item,created_at,viewed_at",
                )
            },
            "time",
            "or viewed_at?",
        ),
        (
            {"log.csv": format_csv(USERS, ITEM_IDS, names="user,item")},
            "time",
            "no column looks like times",
        ),
        ({"sales.csv": SALES, "orders.csv": SALES}, "files", "and sales.csv too?"),
        (
            {
                "views.csv": format_csv(
                    USERS, ITEM_IDS, ISO_TIMES, names="user,item,at"
                ),
                "buys.csv": format_csv(
                    USERS, ITEM_IDS, ISO_TIMES, ITEM_NUMBERS, names="user,item,at,price"
                ),
            },
            "files",
            "or views.csv?",
        ),
        (
            {
                "sales.csv": SALES,
                "articles.csv": format_items(str),
                "products.csv": format_items(str),
            },
            "files",
            "or products.csv?",
        ),
        (
            {
                "sales.csv": SALES,
                "articles_v1.csv": format_items(str),
                "articles_v2.csv": format_items(str),
            },
            "files",
            "2 files have the same items?",
        ),
        (
            {"sales.csv": SALES, "articles.csv": format_items(lambda item: f"x{item}")},
            "item",
            "articles.csv has none of these ids, but x1000",
        ),
        (
            {"sales.csv": SALES, "articles.csv": format_items(str, stride=3)},
            "files",
            "it has only 20 of 60 items; is it?",
        ),
        (
            {
                "ratings.csv": format_csv(
                    USERS,
                    [f"B{item}{row % 3}" for row, item in enumerate(ITEM_IDS)],
                    [f"B{item}" for item in ITEM_IDS],
                    ISO_TIMES,
                    names="user_id,asin,parent_asin,timestamp",
                ),
                "meta.csv": format_items(lambda item: f"B{item}").replace(
                    "article", "parent_asin"
                ),
            },
            "item",
            "or item: asin?",
        ),
        (
            {
                "log.csv": format_csv(USERS, ITEM_NUMBERS, SECONDS),
                "movies.csv": "movieId,title\n"
                + "".join(f"{item},film {item}\n" for item in range(1000)),
            },
            "user",
            "or user: c2?",
        ),
    ],
)
def test_a_doubt_names_its_reason_or_the_rival(
    tmp_path: Path, files: dict[str, str | bytes], key: str, doubt: str
) -> None:
    suggestion, _ = suggest_for(tmp_path, files)

    lines = [line for line in suggestion.doubts if line.strip().startswith(f"{key}:")]
    assert any(doubt in line for line in lines), suggestion.text


@pytest.mark.parametrize(
    ("names", "user", "item", "doubtful_keys"),
    [
        ("review_id,user_id,business_id,date", "user_id", "business_id", []),
        ("customer_id,order_id,product_type_id,date", "customer_id", None, ["item"]),
        ("user_feature_0,x,item_id,date", None, "item_id", ["user"]),
        ("user_agent,x,item_id,date", None, "item_id", ["user"]),
        ("cust_id,n,prod_id,date", "cust_id", "prod_id", []),
    ],
)
def test_an_attribute_of_users_or_items_is_not_their_id(
    tmp_path: Path,
    names: str,
    user: str | None,
    item: str | None,
    doubtful_keys: list[str],
) -> None:
    unique = range(ROWS)
    columns = [unique, USERS] if names.startswith("review") else [USERS, unique]
    log = format_csv(*columns, ITEM_IDS, ISO_TIMES, names=names)

    suggestion, mapping = suggest_for(tmp_path, {"log.csv": log})

    assert user in (None, mapping["user"])
    assert item in (None, mapping["item"])
    assert list_doubtful_keys(suggestion) == doubtful_keys


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
def test_the_column_of_who_acts_is_the_user(
    tmp_path: Path, names: str, user: str | None, item: str | None, doubts: list[str]
) -> None:
    second_column = [row * 7 % 50 for row in range(ROWS)]
    log = format_csv(USERS, second_column, ITEM_IDS, SECONDS, names=f"{names},at")

    suggestion, mapping = suggest_for(tmp_path, {"log.csv": log})

    assert user in (None, mapping["user"])
    assert item in (None, mapping["item"])
    assert len(suggestion.doubts) == len(doubts), suggestion.text
    for line, doubt in zip(suggestion.doubts, doubts, strict=True):
        assert doubt in line


def test_the_clicked_item_of_a_shown_list_is_a_label(tmp_path: Path) -> None:
    lists = [f"{item} {item + 1} {item + 2}" for item in ITEM_IDS]
    names = "user,shown_items,clicked_item,at"
    log = format_csv(USERS, lists, ITEM_IDS, SECONDS, names=names)

    _, mapping = suggest_for(tmp_path, {"log.csv": log})
    assert "clicked_item" in mapping["labels"]


def format_named_rows(header: str, word: str) -> str:
    """Return a CSV file of the ids 0 to 59 with names that have a word."""
    rows = [f"{n},{word} number {n}\n" for n in range(60)]
    return header + "\n" + "".join(rows)


@pytest.mark.parametrize(
    ("column", "item_file", "other_file", "num_doubts"),
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
def test_a_second_file_with_the_same_ids_is_a_rival_unless_its_name_is_of_others(
    tmp_path: Path,
    column: str,
    item_file: tuple[str, str],
    other_file: tuple[str, str],
    num_doubts: int,
) -> None:
    shops = [row * 7 % 50 for row in range(ROWS)]
    names = f"user_id,{column},timestamp,store_id"
    files: dict[str, str | bytes] = {
        "log.csv": format_csv(USERS, ITEM_NUMBERS, SECONDS, shops, names=names),
        item_file[0]: format_named_rows(item_file[1], "lamp"),
        other_file[0]: format_named_rows(other_file[1], "shop"),
    }

    suggestion, _ = suggest_for(tmp_path, files)

    lines = [line for line in suggestion.doubts if line.startswith("  files: ")]
    assert len(lines) == num_doubts, suggestion.text
    for line in lines:
        assert item_file[0] in line
        assert other_file[0] in line


def test_two_columns_of_an_item_file_that_match_are_named(tmp_path: Path) -> None:
    rows = "".join(f"{1000 + n},{1059 - n},thing {n}\n" for n in range(60))
    files = {"sales.csv": SALES, "articles.csv": f"id,sort,title\n{rows}"}

    suggestion, mapping = suggest_for(tmp_path, files)

    assert mapping["items"]["item"] == "id"
    (line,) = suggestion.doubts
    assert line.endswith("; or sort?")


def test_a_file_of_items_decides_which_column_has_the_items(tmp_path: Path) -> None:
    venues = [70_000 + 977 * item for item in ITEM_NUMBERS]
    log = format_csv(USERS, ISO_TIMES, LATITUDES, LONGITUDES, venues, delimiter="\t")
    items = "".join(f"{70_000 + 977 * item}\tVenue {item}\n" for item in range(60))

    suggestion, mapping = suggest_for(tmp_path, {"log.csv": log, "venues.csv": items})

    assert (mapping["user"], mapping["item"]) == ("c1", "c5")
    assert mapping["items"]["files"] == "venues.csv"
    assert suggestion.doubts == []


@pytest.mark.parametrize(
    ("log_id", "file_id", "log_sql", "file_sql"),
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
def test_ids_that_a_file_writes_differently_get_expressions_that_match(
    tmp_path: Path,
    log_id: Callable[[int], str],
    file_id: Callable[[int], str],
    log_sql: str,
    file_sql: str,
) -> None:
    articles = [log_id(item) for item in ITEM_IDS]
    sales = format_csv(USERS, articles, ISO_TIMES, names="customer,article,at")
    files = {"sales.csv": sales, "articles.csv": format_items(file_id)}

    suggestion, mapping = suggest_for(tmp_path, files)

    assert (mapping["item"], mapping["items"]["item"]) == (log_sql, file_sql)
    assert suggestion.doubts == []


def test_a_file_of_some_users_lowers_min_matched(tmp_path: Path) -> None:
    customers = "".join(f"{user},{user % 7 + 20}\n" for user in range(0, 100, 3))
    files = {
        "sales.csv": SALES,
        "customers.csv": f"customer,age\n{customers}",
        "coupons.txt": "a b\nc d\n",
    }

    suggestion, mapping = suggest_for(tmp_path, files)

    assert 0.1 < mapping["prepare"]["min_matched"] < 0.2
    assert "34 of the first 100 users have a row in customers.csv" in suggestion.text
    assert "# No key reads coupons.txt." in suggestion.text
    assert suggestion.doubts == []


@pytest.mark.parametrize(
    ("name", "next_name"),
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
def test_the_pattern_of_one_file_matches_the_file_of_the_next_day(
    tmp_path: Path, name: str, next_name: str
) -> None:
    content = SALES.encode()
    if name.endswith(".gz"):
        content = gzip.compress(content)

    _, mapping = suggest_for(tmp_path, {name: content, "items-2.txt": "no log"})

    assert fnmatchcase(name, mapping["files"])
    assert fnmatchcase(next_name, mapping["files"])
    assert not fnmatchcase("items-2.txt", mapping["files"])


def test_files_in_the_folder_and_below_it_are_one_log(tmp_path: Path) -> None:
    _, mapping = suggest_for(tmp_path, {"day-1.csv": SALES, "old/day-0.csv": SALES})
    mapping.pop("prepare")

    assert len(parse_log(mapping).event_files(str(tmp_path))) == 2


def test_scores_computed_before_the_event_are_numbers_and_not_labels(
    tmp_path: Path,
) -> None:
    names = "user,item,timestamp,propensity_score,predicted_click,relevance_score,score"
    scores = [[item / 61 for item in ITEM_NUMBERS]] * 3
    log = format_csv(USERS, ITEM_IDS, ISO_TIMES, *scores, ITEM_NUMBERS, names=names)

    suggestion, mapping = suggest_for(tmp_path, {"log.csv": log})

    assert list(mapping["labels"]) == ["score"]
    numbers = "# numbers: [propensity_score, predicted_click, relevance_score]"
    assert numbers in suggestion.text


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("case", "user", "item", "doubtful_keys"),
    [
        ("d4_suggest_coordinate_as_item/log", "c1", "c5", ["user", "item"]),
        ("d4_suggest_one_file_daily/raw", "customer", "article", []),
        ("d4_min_matched_quickstart/shop", "customer", "article", []),
        ("d4_suggest_numeric_user", "userId", "itemId", ["user"]),
    ],
)
def test_columns_of_reported_logs_are_recognized_or_in_doubt(
    case: str, user: str, item: str, doubtful_keys: list[str]
) -> None:
    suggestion = suggest(str(CASES / case))

    mapping = yaml.safe_load(suggestion.text)
    assert (mapping["user"], mapping["item"]) == (user, item)
    assert list_doubtful_keys(suggestion) == doubtful_keys
