"""A suggested mapping names the columns of users, items and times, or asks about them."""

from __future__ import annotations

import gzip
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from core.errors import UserError
from jobs import cli, prepare
from pipelines.prepare.reading.log import parse_log
from pipelines.prepare.reading.rows import read_events
from pipelines.prepare.suggest.suggest import suggest

ROOT = Path(__file__).parents[3]
SHARED = ROOT / "../shared"
SALES = "customer,article,at\n" + "".join(
    f"c{n % 7},a{n % 5},{1_700_000_000 + n}\n" for n in range(40)
)


def suggest_and_read(
    folder: Path, files: dict[str, str | bytes], kind: str | None = None
) -> tuple[Any, list[str], pl.DataFrame]:
    """Return the mapping suggested for files, its doubtful keys and the events read."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    suggestion = suggest(str(folder), kind)
    mapping = yaml.safe_load(suggestion.text)
    log = parse_log({k: v for k, v in mapping.items() if k != "prepare"})
    [file, *_] = log.event_files(str(folder))
    blocks = list(read_events(log, str(folder), file))
    assert sum(block.rejects.height for block in blocks) == 0
    keys = [line.split(":")[0].strip() for line in suggestion.doubts]
    return mapping, keys, pl.concat([block.rows for block in blocks])


# Per log: name of a file, its first rows (invented), and the columns of users and items,
# the notation of times, and the keys with a question.
LOGS = {
    "Amazon 2014": (
        "interactions.csv",
        """\
user_id,item_id,order
A1YJ0,B00470YJA,0
A1YJ0,B00473YJA,1
A1YJ0,B00476YJA,2
A1YJ0,B00472YJA,3
A1YJ1,B00475YJA,0
A1YJ1,B00471YJA,1
A1YJ1,B00474YJA,2
A1YJ1,B00470YJA,3
A1YJ2,B00473YJA,0
A1YJ2,B00476YJA,1
""",
        ("user_id", "item_id", "order", "time"),
    ),
    "LC-Rec": (
        "inter.json",
        """\
{"0": [0, 4, 9], "1": [1, 5, 10], "2": [2, 6, 11], "3": [3, 4, 12], "4": [0, 5, 13], "5": [1, 6, 14], "6": [2, 4, 15], "7": [3, 5, 16], "8": [0, 6, 17], "9": [1, 4, 18]}
""",
        ("key", "value", "", "user"),
    ),
    "Amazon 2023": (
        "Toys.jsonl",
        """\
{"rating": 1.0, "asin": "B000", "parent_asin": "B00", "user_id": "AG0Q", "timestamp": 1588687728923}
{"rating": 2.0, "asin": "B001", "parent_asin": "B01", "user_id": "AG1Q", "timestamp": 1588697728923}
{"rating": 3.0, "asin": "B002", "parent_asin": "B02", "user_id": "AG2Q", "timestamp": 1588707728923}
{"rating": 4.0, "asin": "B003", "parent_asin": "B03", "user_id": "AG0Q", "timestamp": 1588717728923}
{"rating": 5.0, "asin": "B004", "parent_asin": "B00", "user_id": "AG1Q", "timestamp": 1588727728923}
{"rating": 1.0, "asin": "B005", "parent_asin": "B01", "user_id": "AG2Q", "timestamp": 1588737728923}
{"rating": 2.0, "asin": "B006", "parent_asin": "B02", "user_id": "AG0Q", "timestamp": 1588747728923}
{"rating": 3.0, "asin": "B007", "parent_asin": "B03", "user_id": "AG1Q", "timestamp": 1588757728923}
{"rating": 4.0, "asin": "B008", "parent_asin": "B00", "user_id": "AG2Q", "timestamp": 1588767728923}
{"rating": 5.0, "asin": "B009", "parent_asin": "B01", "user_id": "AG0Q", "timestamp": 1588777728923}
""",
        ("user_id", "asin", "ms", "item"),
    ),
    "Amazon 2023 ratings": (
        "Toys.csv",
        """\
user_id,parent_asin,rating,timestamp
AG0Q,B00,1.0,1588687728923
AG1Q,B01,2.0,1588697728923
AG2Q,B02,3.0,1588707728923
AG0Q,B03,4.0,1588717728923
AG1Q,B00,5.0,1588727728923
AG2Q,B01,1.0,1588737728923
AG0Q,B02,2.0,1588747728923
AG1Q,B03,3.0,1588757728923
AG2Q,B00,4.0,1588767728923
AG0Q,B01,5.0,1588777728923
""",
        ("user_id", "parent_asin", "ms", ""),
    ),
    "Beauty searches": (
        "searches.csv",
        """\
user_id,search_id,time_ms,query,impressed_item_ids,clicked_item_ids
A1CX0,s00,1388534479814,ice a,B0 B10 B20,B10
A1CX1,s01,1388535479814,ice b,B1 B11 B21,B11
A1CX2,s02,1388536479814,ice a,B2 B12 B22,B12
A1CX0,s03,1388537479814,ice b,B3 B13 B23,B13
A1CX1,s04,1388538479814,ice a,B4 B14 B24,B14
A1CX2,s05,1388539479814,ice b,B5 B15 B25,B15
A1CX0,s06,1388540479814,ice a,B6 B16 B26,B16
A1CX1,s07,1388541479814,ice b,B7 B17 B27,B17
A1CX2,s08,1388542479814,ice a,B8 B18 B28,B18
A1CX0,s09,1388543479814,ice b,B9 B19 B29,B19
""",
        ("user_id", "shown", "ms", ""),
    ),
    "Gowalla": (
        "gowalla_events.csv",
        """\
0\t2010-10-10T23:55:20Z\t30.2301\t-97.7901\t22847
1\t2010-10-11T23:55:21Z\t30.2311\t-97.7911\t22848
2\t2010-10-12T23:55:22Z\t30.2321\t-97.7921\t22849
0\t2010-10-13T23:55:23Z\t30.2331\t-97.7931\t22850
1\t2010-10-14T23:55:24Z\t30.2341\t-97.7941\t22851
2\t2010-10-15T23:55:25Z\t30.2301\t-97.7901\t22847
0\t2010-10-16T23:55:26Z\t30.2311\t-97.7911\t22848
1\t2010-10-10T23:55:27Z\t30.2321\t-97.7921\t22849
2\t2010-10-11T23:55:28Z\t30.2331\t-97.7931\t22850
0\t2010-10-12T23:55:29Z\t30.2341\t-97.7941\t22851
""",
        ("c1", "c5", "iso", "user item"),
    ),
    "H&M": (
        "transactions_train.csv",
        """\
t_dat,customer_id,article_id,price,sales_channel_id
2018-09-20,00058a,0663710001,0.05080,2
2018-09-21,00158a,0663711001,0.05081,2
2018-09-22,00258a,0663712001,0.05082,2
2018-09-23,00058a,0663713001,0.05083,2
2018-09-24,00158a,0663714001,0.05084,2
2018-09-25,00258a,0663710001,0.05085,2
2018-09-26,00058a,0663711001,0.05086,2
2018-09-20,00158a,0663712001,0.05087,2
2018-09-21,00258a,0663713001,0.05088,2
2018-09-22,00058a,0663714001,0.05089,2
""",
        ("customer_id", "article_id", "iso", ""),
    ),
    "KuaiRand": (
        "log_standard_4_25.csv",
        """\
user_id,video_id,date,hourmin,time_ms,is_click,is_like,long_view,play_time_ms,duration_ms,tab
712,5239,20220425,0,1650812741436,0,0,0,0,49866,1
713,5240,20220425,1,1650812841436,1,0,1,613,49867,1
714,5241,20220425,2,1650812941436,0,0,0,1226,49868,1
712,5242,20220425,3,1650813041436,1,0,1,1839,49869,1
713,5243,20220425,4,1650813141436,0,0,0,2452,49870,1
714,5239,20220425,5,1650813241436,1,0,1,3065,49871,1
712,5240,20220425,6,1650813341436,0,0,0,3678,49872,1
713,5241,20220425,7,1650813441436,1,0,1,4291,49873,1
714,5242,20220425,8,1650813541436,0,0,0,4904,49874,1
712,5243,20220425,9,1650813641436,1,0,1,5517,49875,1
""",
        ("user_id", "video_id", "ms", ""),
    ),
    "KuaiSearch": (
        "recall.jsonl",
        """\
{"user_id": 1, "session_id": 1, "impressed_item_ids": [0, 38, 50], "clicked_item_ids": [38], "query": "dress 0", "time_index": 0}
{"user_id": 2, "session_id": 2, "impressed_item_ids": [1, 39, 51], "clicked_item_ids": [39], "query": "dress 1", "time_index": 1}
{"user_id": 3, "session_id": 3, "impressed_item_ids": [2, 40, 52], "clicked_item_ids": [40], "query": "dress 2", "time_index": 2}
{"user_id": 4, "session_id": 4, "impressed_item_ids": [3, 41, 53], "clicked_item_ids": [41], "query": "dress 0", "time_index": 3}
{"user_id": 5, "session_id": 5, "impressed_item_ids": [4, 42, 54], "clicked_item_ids": [42], "query": "dress 1", "time_index": 4}
{"user_id": 6, "session_id": 6, "impressed_item_ids": [5, 43, 55], "clicked_item_ids": [43], "query": "dress 2", "time_index": 5}
{"user_id": 7, "session_id": 7, "impressed_item_ids": [6, 44, 56], "clicked_item_ids": [44], "query": "dress 0", "time_index": 6}
{"user_id": 8, "session_id": 8, "impressed_item_ids": [7, 45, 57], "clicked_item_ids": [45], "query": "dress 1", "time_index": 7}
{"user_id": 9, "session_id": 9, "impressed_item_ids": [8, 46, 58], "clicked_item_ids": [46], "query": "dress 2", "time_index": 8}
{"user_id": 10, "session_id": 10, "impressed_item_ids": [9, 47, 59], "clicked_item_ids": [47], "query": "dress 0", "time_index": 9}
""",
        ("user_id", "shown", "order", "time"),
    ),
    "MIND": (
        "behaviors.tsv",
        """\
1\tU1040\t11/10/2019 9:00:54 AM\tN50 N40\tN50-1 N30-0
2\tU1140\t11/11/2019 9:01:54 AM\tN51 N41\tN51-1 N31-0
3\tU1240\t11/12/2019 9:02:54 AM\tN52 N42\tN52-1 N32-0
4\tU1040\t11/13/2019 9:03:54 AM\tN53 N43\tN53-1 N33-0
5\tU1140\t11/14/2019 9:04:54 AM\tN54 N44\tN54-1 N34-0
6\tU1240\t11/15/2019 9:05:54 AM\tN55 N45\tN50-1 N35-0
7\tU1040\t11/16/2019 9:06:54 AM\tN56 N46\tN51-1 N36-0
8\tU1140\t11/10/2019 9:07:54 AM\tN57 N47\tN52-1 N37-0
9\tU1240\t11/11/2019 9:08:54 AM\tN58 N48\tN53-1 N38-0
10\tU1040\t11/12/2019 9:09:54 AM\tN59 N49\tN54-1 N39-0
""",
        ("c2", "shown", "%m/%d/%Y %I:%M:%S %p", "user explode"),
    ),
    "MovieLens-1M": (
        "ratings.dat",
        """\
1::1193::1::978300760
2::1194::2::978301757
3::1195::3::978302754
1::1196::4::978303751
2::1197::5::978304748
3::1193::1::978305745
1::1194::2::978306742
2::1195::3::978307739
3::1196::4::978308736
1::1197::5::978309733
""",
        ("c1", "c2", "s", "user item"),
    ),
    "MovieLens": (
        "ratings.csv",
        """\
user_id,movie_id,rating,timestamp
1,31,0.5,1260759144
2,32,1.5,1260760141
3,33,2.5,1260761138
1,34,3.5,1260762135
2,35,4.5,1260763132
3,31,0.5,1260764129
1,32,1.5,1260765126
2,33,2.5,1260766123
3,34,3.5,1260767120
1,35,4.5,1260768117
""",
        ("user_id", "movie_id", "s", ""),
    ),
    "simulated searches": (
        "events-0.csv",
        """\
user_id,search_id,query,item_id,position,timestamp_ms,click,purchase,dwell_ms
u0,s0,red 0,i0,0,1700000000000,0,0,0
u1,s0,red 0,i1,1,1700000000000,1,0,7000
u2,s1,red 1,i2,0,1700001000000,0,0,0
u0,s1,red 1,i3,1,1700001000000,1,0,7000
u1,s2,red 2,i4,0,1700002000000,0,0,0
u2,s2,red 2,i0,1,1700002000000,1,0,7000
u0,s3,red 3,i1,0,1700003000000,0,0,0
u1,s3,red 3,i2,1,1700003000000,1,0,7000
u2,s4,red 4,i3,0,1700004000000,0,0,0
u0,s4,red 4,i4,1,1700004000000,1,0,7000
""",
        ("user_id", "item_id", "ms", ""),
    ),
    "MovieTweetings": (
        "ratings.dat",
        """\
1::0114508::5::1381006850
2::0114509::6::1381007847
3::0114510::7::1381008844
1::0114511::8::1381009841
2::0114512::5::1381010838
3::0114508::6::1381011835
1::0114509::7::1381012832
2::0114510::8::1381013829
3::0114511::5::1381014826
1::0114512::6::1381015823
""",
        ("c1", "c2", "s", "user item"),
    ),
    "dunnhumby": (
        "transaction_data.csv",
        """\
household_key,BASKET_ID,DAY,PRODUCT_ID,QUANTITY,SALES_VALUE,STORE_ID,RETAIL_DISC,TRANS_TIME,WEEK_NO
2375,26984851470,1,1004906,0,0.39,364,-0.6,1630,1
2376,26984851470,1,1005906,1,1.39,364,-0.6,1631,1
2377,26984851471,2,1006906,2,2.39,364,-0.6,1630,1
2375,26984851471,2,1007906,3,3.39,364,-0.6,1631,1
2376,26984851472,3,1008906,0,4.39,364,-0.6,1630,1
2377,26984851472,3,1004906,1,5.39,364,-0.6,1631,1
2375,26984851473,4,1005906,2,6.39,364,-0.6,1630,1
2376,26984851473,4,1006906,3,7.39,364,-0.6,1631,1
2377,26984851474,5,1007906,0,8.39,364,-0.6,1630,1
2375,26984851474,5,1008906,1,9.39,364,-0.6,1631,1
""",
        ("household_key", "PRODUCT_ID", "order", "time"),
    ),
    "Online Retail": (
        "2010-12-01.csv",
        """\
InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country
536360,85120A,WHITE HANGING HEART,1,2010-12-01 08:26:00,2.55,17850.0,United Kingdom
536360,85121A,WHITE HANGING HEART,2,2010-12-01 08:26:00,2.55,17851.0,United Kingdom
536360,85122A,WHITE HANGING HEART,3,2010-12-01 08:26:00,2.55,17852.0,United Kingdom
536361,85123A,WHITE HANGING HEART,4,2010-12-02 08:26:00,2.55,17850.0,United Kingdom
536361,85124A,WHITE HANGING HEART,5,2010-12-02 08:26:00,2.55,17851.0,United Kingdom
536361,85120A,WHITE HANGING HEART,6,2010-12-02 08:26:00,2.55,17852.0,United Kingdom
536362,85121A,WHITE HANGING HEART,7,2010-12-03 08:26:00,2.55,17850.0,United Kingdom
536362,85122A,WHITE HANGING HEART,1,2010-12-03 08:26:00,2.55,17851.0,United Kingdom
536362,85123A,WHITE HANGING HEART,2,2010-12-03 08:26:00,2.55,17852.0,United Kingdom
536363,85124A,WHITE HANGING HEART,3,2010-12-04 08:26:00,2.55,17850.0,United Kingdom
""",
        ("CustomerID", "StockCode", "iso", ""),
    ),
    "Last.fm": (
        "user_taggedartists.dat",
        """\
userID\tartistID\ttagID\tday\tmonth\tyear
2\t52\t13\t1\t4\t2009
3\t53\t14\t2\t4\t2009
4\t54\t15\t3\t4\t2009
2\t55\t16\t1\t4\t2009
3\t56\t13\t2\t4\t2009
4\t52\t14\t3\t4\t2009
2\t53\t15\t1\t4\t2009
3\t54\t16\t2\t4\t2009
4\t55\t13\t3\t4\t2009
2\t56\t14\t1\t4\t2009
""",
        ("userID", "artistID", "%Y-%m-%d", ""),
    ),
    "Yoochoose": (
        "clicks.csv",
        """\
SessionId,Timestamp,ItemId,Category
1,2014-04-07T10:51:00.277Z,214536500,0
1,2014-04-07T10:51:01.277Z,214536501,0
1,2014-04-07T10:51:02.277Z,214536502,0
1,2014-04-07T10:51:03.277Z,214536503,0
2,2014-04-07T10:51:04.277Z,214536504,0
2,2014-04-07T10:51:05.277Z,214536500,0
2,2014-04-07T10:51:06.277Z,214536501,0
2,2014-04-07T10:51:07.277Z,214536502,0
3,2014-04-07T10:51:08.277Z,214536503,0
3,2014-04-07T10:51:09.277Z,214536504,0
""",
        ("SessionId", "ItemId", "iso", ""),
    ),
    "ids that look like seconds": (
        "log.csv",
        """\
network,userId,itemId,showTime,click
0,1000014000,460140891,1624843756147,0
1,1000014001,460140892,1624843766147,1
0,1000014002,460140893,1624843776147,0
1,1000014000,460140894,1624843786147,1
0,1000014001,460140895,1624843796147,0
1,1000014002,460140891,1624843806147,1
0,1000014000,460140892,1624843816147,0
1,1000014001,460140893,1624843826147,1
0,1000014002,460140894,1624843836147,0
1,1000014000,460140895,1624843846147,1
""",
        ("userId", "itemId", "ms", ""),
    ),
    "humid is no id": (
        "visits.csv",
        """\
user_id,humid,spot_id,at
u0,50,s0,11.02.2023 10:00
u1,51,s1,12.02.2023 10:00
u2,52,s2,13.02.2023 10:00
u0,53,s3,14.02.2023 10:00
u1,50,s4,15.02.2023 10:00
u2,51,s0,16.02.2023 10:00
u0,52,s1,17.02.2023 10:00
u1,53,s2,18.02.2023 10:00
u2,50,s3,19.02.2023 10:00
u0,51,s4,20.02.2023 10:00
""",
        ("user_id", "spot_id", "%d.%m.%Y %H:%M", "item"),
    ),
    "other times": (
        "log.csv",
        """\
user,product_rating,item,birth_date,order_time,updated_at
u0,1,i0,1990-01-10,2024-01-10 10:00,2024-02-10 10:00
u1,2,i1,1990-01-11,2024-01-11 10:00,2024-02-11 10:00
u2,3,i2,1990-01-12,2024-01-12 10:00,2024-02-12 10:00
u0,4,i3,1990-01-13,2024-01-13 10:00,2024-02-13 10:00
u1,5,i0,1990-01-14,2024-01-14 10:00,2024-02-14 10:00
u2,1,i1,1990-01-15,2024-01-15 10:00,2024-02-15 10:00
u0,2,i2,1990-01-16,2024-01-16 10:00,2024-02-16 10:00
u1,3,i3,1990-01-17,2024-01-17 10:00,2024-02-17 10:00
u2,4,i0,1990-01-18,2024-01-18 10:00,2024-02-18 10:00
u0,5,i1,1990-01-19,2024-01-19 10:00,2024-02-19 10:00
""",
        ("user", "item", "iso", ""),
    ),
    "day or month": (
        "log.csv",
        """\
user_id;item_id;when
u0;i0;1/2/2023
u1;i1;2/3/2023
u2;i2;3/4/2023
u0;i3;4/5/2023
u1;i0;5/6/2023
u2;i1;6/7/2023
u0;i2;7/8/2023
u1;i3;8/9/2023
u2;i0;9/10/2023
u0;i1;10/11/2023
""",
        ("user_id", "item_id", "%m/%d/%Y", "time"),
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_columns_are_recognized_or_in_doubt(tmp_path: Path, name: str) -> None:
    file, text, expected = LOGS[name]

    mapping, doubts, events = suggest_and_read(tmp_path, {file: text})

    item = mapping.get("sequence", mapping.get("item"))
    time = mapping.get("time", {})
    notation = time.get("format", time.get("unit", "iso" if time else ""))
    assert (mapping["user"], item, notation, " ".join(doubts)) == expected
    assert len(events) >= 10


@pytest.mark.shared_data
def test_a_coordinate_is_no_item() -> None:
    suggestion = suggest(str(SHARED / "cases/d4_suggest_coordinate_as_item/log"))

    assert "item: c5" in suggestion.text
    assert len(suggestion.doubts) == 2


def test_texts_are_in_the_file_with_the_column_of_items(tmp_path: Path) -> None:
    items = "ARTICLE;Title;stars;picture\n" + "".join(
        f"a{n};thing {n};{n};http://x/{n}\n" for n in range(5)
    )
    codes = "article,c1\n" + "".join(f"a{n},{n}\n" for n in range(5))
    files: dict[str, str | bytes] = {"sales.csv": SALES, "a.csv": codes, "b.csv": items}

    mapping, doubts, _ = suggest_and_read(tmp_path, files)

    expected = {
        "files": "b.csv",
        "delimiter": ";",
        "item": "ARTICLE",
        "texts": ["Title"],
    }
    assert mapping["items"] == expected
    assert doubts == []


def test_a_file_of_items_decides_between_two_columns(tmp_path: Path) -> None:
    file, text, _ = LOGS["Amazon 2023"]
    meta = '{"parent_asin": "B00", "title": "Car"}\n{"parent_asin": "B01", "title": "Bus"}\n'

    mapping, doubts, _ = suggest_and_read(tmp_path, {file: text, "meta.jsonl": meta})

    assert (mapping["item"], doubts) == ("parent_asin", [])


def test_outcomes_are_labels_and_nothing_is_a_feature(tmp_path: Path) -> None:
    file, text, _ = LOGS["KuaiRand"]

    mapping, _, _ = suggest_and_read(tmp_path, {file: text}, "actions")

    assert list(mapping["labels"]) == [
        "is_click",
        "is_like",
        "long_view",
        "play_time_ms",
    ]
    assert mapping["labels"]["play_time_ms"] == {
        "column": "play_time_ms",
        "type": "float32",
    }
    assert not {"numbers", "categories"} & set(mapping)
    assert mapping["prepare"] == {
        "kind": "actions",
        "core": 0,
        "split": {"by": "temporal"},
    }


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("KuaiSearch", {"clicked_item_ids"}),
        ("simulated searches", {"click", "purchase", "dwell_ms"}),
    ],
)
def test_a_search_log_has_queries_and_clicks(
    tmp_path: Path, name: str, labels: set[str]
) -> None:
    file, text, _ = LOGS[name]

    mapping, _, _ = suggest_and_read(tmp_path, {file: text})

    assert set(mapping["labels"]) == labels
    assert mapping["query"] == "query"
    assert mapping["prepare"]["kind"] == "search"
    assert "click" in mapping["prepare"]["behaviour"]


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252"])
def test_an_encoding_is_detected(tmp_path: Path, encoding: str) -> None:
    content = SALES.replace("c1", "é").encode(encoding)

    mapping, _, events = suggest_and_read(tmp_path, {"log.csv": content})

    assert mapping["encoding"] == encoding
    assert "é" in events["user_id"].to_list()


@pytest.mark.parametrize(
    ("name", "next_name"),
    [
        ("sales_2024-01-05.csv", "sales_2024-01-06.csv"),
        ("log.3.csv.gz", "log.4.csv.gz"),
        ("dt=2024-01-05/events.csv", "dt=2024-01-06/events.csv"),
    ],
)
def test_the_pattern_matches_the_file_of_the_next_day(
    tmp_path: Path, name: str, next_name: str
) -> None:
    content = SALES.encode()
    if name.endswith(".gz"):
        content = gzip.compress(content)

    mapping, doubts, _ = suggest_and_read(
        tmp_path, {name: content, "notes-2.txt": "no log"}
    )

    assert fnmatchcase(next_name, mapping["files"])
    assert not fnmatchcase("notes-2.txt", mapping["files"])
    assert doubts == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (SALES.replace("article", "thing"), "item"),
        (SALES.replace("c1,", ","), "user"),
        (
            "user_id,customer_id,item_id,at\n1,2,3,1700000000\n2,3,4,1700000001\n",
            "user",
        ),
        (
            "user,item,created_at,viewed_at\n1,3,1700000000,1700000009\n2,4,1700000001,1700000002\n",
            "time",
        ),
        ("user,item,birth_date\n1,3,2001-01-01\n2,4,2002-02-02\n", "time"),
    ],
)
def test_a_doubt_is_a_question_in_the_file(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "log.csv").write_text(text)

    [line] = suggest(str(tmp_path)).doubts

    assert line.startswith(f"{key}: ")
    assert line.endswith("?")


def test_the_command_writes_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/log.csv").write_text(SALES)
    output = tmp_path / "source.yaml"
    words = ["--suggest", str(tmp_path / "raw"), "--output", str(output)]

    prepare.main(cli.config_from_words(prepare, words))

    assert yaml.safe_load(output.read_text())["user"] == "customer"
    with pytest.raises(UserError, match="exists"):
        prepare.main(cli.config_from_words(prepare, words))


@pytest.mark.parametrize(
    "text", ["", "station,temperature\nOslo,3.5\nRoma,20.25\n", "hello\n"]
)
def test_a_folder_without_a_log_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "weather.csv").write_text(text)

    with pytest.raises(UserError, match="users and items"):
        suggest(str(tmp_path))


def test_a_dry_run_prints_the_first_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/log.csv").write_text(SALES + "c1,a1,soon\n")
    source, output = tmp_path / "source.yaml", str(tmp_path / "tables")
    words = ["--source", str(source), "--input", str(tmp_path / "raw"), "--dry-run"]
    words += ["--output", output, "--max_rejects", "0.1"]
    mapping = (
        "files: log.csv\nuser: customer\nitem: article\ntime: {column: at, unit: s}\n"
    )

    source.write_text(mapping)
    prepare.main(cli.config_from_words(prepare, words))

    printed = " ".join(capsys.readouterr().out.split())
    assert "41 rows, 1 rejected" in printed
    assert "timestamp_ms at 2023-11-14 22:13:20 |" in printed
    source.write_text(mapping.replace("customer", "custmer"))
    with pytest.raises(UserError, match="customer"):
        prepare.main(cli.config_from_words(prepare, words))
    assert not Path(output).exists()
