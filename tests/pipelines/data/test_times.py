"""Times of a log in all units and formats equal those of Python's datetime."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.data.reading.log import parse_log
from pipelines.data.reading.times import (
    EPOCH,
    MAX_TIME_MS,
    MIN_TIME_MS,
    Time,
    parse_times,
)

MOMENTS = st.datetimes(datetime(1980, 1, 2), datetime(2099, 12, 30))
ZONES = [
    "Europe/Berlin",
    "America/New_York",
    "Asia/Kolkata",
    "Australia/Lord_Howe",
    "UTC",
]
many = settings(max_examples=60)


def read(values: Any, **time: Any) -> list[int | str]:
    """Return milliseconds, or the reason of a reject."""
    series = values if isinstance(values, pl.Series) else pl.Series(values)
    made, reason = parse_times(series, Time("t", **time), "t")
    return [
        why or value
        for value, why in zip(made.to_list(), reason.to_list(), strict=True)
    ]


def right(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(milliseconds=1)


FORMATS = [
    "%Y-%m-%d %H:%M:%S",
    "%d.%m.%Y %H:%M:%S.%f",
    "%Y-%m-%d %H:%M:%S,%f",
    "%Y%m%d",
    "%Y%m%d%H%M%S",
    "%m/%d/%Y %H:%M",
    "%d/%m/%y %H:%M",
    "%d %B %Y %I:%M %p",
    "%a %b %d %H:%M:%S %z %Y",
    "%d/%b/%Y:%H:%M:%S %z",
    "%Y-%m-%dT%H:%M:%S.%f%z",
    "%Y-%m-%d %H:%M:%S %Z",
    "%G-W%V-%u",
    "%j %Y %H",
    "%A, %d. %B %Y",
    "%c",
    "%x %X",
    "%%%Y-%m-%d",
    "%f %Y-%m-%d",
]


@pytest.mark.parametrize("written", FORMATS)
@settings(max_examples=20)
@given(data=st.data())
def test_formats_as_python_reads_them(written: str, data: st.DataObject) -> None:
    named = "%z" in written
    offsets = st.integers(-12 * 60, 14 * 60).map(
        lambda minutes: timezone(timedelta(minutes=minutes))
    )
    found = data.draw(st.lists(st.tuples(MOMENTS, offsets), min_size=1, max_size=6))
    texts = [
        moment.replace(tzinfo=zone if named else UTC).strftime(written)
        for moment, zone in found
    ]
    if ".%f" in written or ",%f" in written:  # from one to six digits
        cut = data.draw(st.integers(1, 6))
        texts = [
            text[: text.index(text[19]) + 1 + cut] + text[26:]
            if len(text) > 20
            else text
            for text in texts
        ]
    texts += data.draw(
        st.lists(
            st.sampled_from(["", "soon", texts[0] + "x", "2023-02-30", texts[0][:-1]]),
            max_size=2,
        )
    )
    for text, made in zip(
        texts, read(pl.Series(texts, dtype=pl.String), format=written), strict=True
    ):
        try:
            moment = datetime.strptime(text, written)
        except ValueError:
            assert isinstance(made, str)
            continue
        expected = right(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
        assert made == expected or (
            isinstance(made, str) and not MIN_TIME_MS <= expected <= MAX_TIME_MS
        )


ISO: list[tuple[int, Any]] = [  # microseconds that the text keeps, and the text
    (1, lambda moment, utc: moment.isoformat()),
    (1000, lambda moment, utc: moment.isoformat(" ", "milliseconds")),
    (10**6, lambda moment, utc: moment.strftime("%Y%m%dT%H%M%S%z")),
    (10**6, lambda moment, utc: utc.strftime("%Y-%m-%d %H:%M:%S UTC")),
    (60 * 10**6, lambda moment, utc: utc.strftime("%Y-%m-%dT%H:%Mz")),
    (1, lambda moment, utc: utc.isoformat(" ").replace("+00:00", "+00")),
    (1, lambda moment, utc: moment.isoformat(" ").replace("+", " +")),
    (1, lambda moment, utc: moment.isoformat().replace(".", ",")),
    (86_400 * 10**6, lambda moment, utc: utc.strftime("%G-W%V-%u")),
    (
        60 * 10**6,
        lambda moment, utc: utc.replace(tzinfo=None).isoformat(timespec="minutes"),
    ),
]


@pytest.mark.parametrize(("kept", "form"), ISO)
@settings(max_examples=20)
@given(st.lists(st.tuples(MOMENTS, st.integers(0, 14 * 4)), min_size=1, max_size=9))
def test_iso_and_what_databases_write(
    kept: int, form: Any, found: list[tuple[datetime, int]]
) -> None:
    every = [
        moment.replace(tzinfo=timezone(timedelta(minutes=15 * zone)))
        for moment, zone in found
    ]
    unit = kept * timedelta(microseconds=1)
    expected = [right(EPOCH + (moment - EPOCH) // unit * unit) for moment in every]
    assert read([form(moment, moment.astimezone(UTC)) for moment in every]) == expected


@many
@given(
    st.lists(MOMENTS, min_size=1),
    st.sampled_from(ZONES),
    st.sampled_from([None, "%d.%m.%Y %H:%M:%S", "%c"]),
)
def test_zones(found: list[datetime], zone: str, written: str | None) -> None:
    local = [moment.replace(microsecond=0) for moment in found]
    texts = [moment.strftime(written or "%Y-%m-%d %H:%M:%S") for moment in local]
    made = read(texts, zone=zone, **({"format": written} if written else {}))
    assert made == [right(moment.replace(tzinfo=ZoneInfo(zone))) for moment in local]


def test_both_hours_of_a_change() -> None:
    """The first of two equal hours is used; a missing hour is read as Python does."""
    autumn, spring = "2023-10-29 02:30:00", "2023-03-26 02:30:00"
    berlin = ZoneInfo("Europe/Berlin")
    for written in (None, "%Y-%m-%d %H:%M:%S"):
        key = {"format": written} if written else {}
        made = read(
            [autumn, spring, "2023-10-29 03:10:00"], zone="Europe/Berlin", **key
        )
        assert made[0] == right(datetime(2023, 10, 29, 0, 30, tzinfo=UTC))
        assert made[1] == right(datetime(2023, 3, 26, 2, 30, tzinfo=berlin))
        assert made[2] == right(datetime(2023, 10, 29, 2, 10, tzinfo=UTC))
    typed = pl.Series([autumn]).str.to_datetime()
    assert read(typed, zone="Europe/Berlin") == made[:1]


DIVISORS = {
    "s": Fraction(1000),
    "ms": Fraction(1),
    "us": Fraction(1, 1000),
    "ns": Fraction(1, 10**6),
}


@many
@given(st.lists(MOMENTS, min_size=1), st.sampled_from(list(DIVISORS)), st.data())
def test_numbers_of_every_unit(
    found: list[datetime], unit: str, data: st.DataObject
) -> None:
    values = [
        math.floor(right(m.replace(tzinfo=UTC)) / DIVISORS[unit])
        + data.draw(st.integers(0, 999))
        for m in found
    ]
    expected = [math.floor(value * DIVISORS[unit]) for value in values]
    assert read(values, unit=unit) == expected
    assert read([f" {value} " for value in values], unit=unit) == expected
    if unit in ("us", "ns"):  # floats would not hold them
        return
    decimals = [
        Decimal(value) + Decimal(data.draw(st.integers(0, 999))) / 1000
        for value in values
    ]
    expected = [math.floor(Fraction(value) * DIVISORS[unit]) for value in decimals]
    assert read([str(value) for value in decimals], unit=unit) == expected
    assert read([f"{value}.0" for value in values], unit=unit) == [
        math.floor(v * DIVISORS[unit]) for v in values
    ]
    assert read(pl.Series(decimals, dtype=pl.Decimal(38, 3)), unit=unit) == expected


@many
@given(st.lists(st.integers(MIN_TIME_MS, MAX_TIME_MS), min_size=1))
def test_float_seconds_to_the_millisecond(values: list[int]) -> None:
    seconds = [value / 1000 for value in values]
    assert read(seconds, unit="s") == values
    assert read([repr(value) for value in seconds], unit="s") == values
    assert read([f"{value:e}" for value in [1.7e9, 1.5e9]], unit="s") == [
        1_700_000_000_000,
        1_500_000_000_000,
    ]


@many
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_order_takes_any_integer(values: list[int]) -> None:
    assert read(values, unit="order") == values
    assert read([str(value) for value in values], unit="order") == values
    assert read([f"{value % 10**9}.5" for value in values], unit="order") == [
        "t: not an integer"
    ] * len(values)
    assert read([3.0, 4.5], unit="order") == [3, "t: not an integer"]


@pytest.mark.parametrize(
    ("values", "time", "words"),
    [
        (["1588687728923"], {"unit": "s"}, "after the year 2099, check time.unit"),
        (["1588687728"], {"unit": "ms"}, "before 1980, check time.unit"),
        (["01.01.1970"], {"format": "%d.%m.%Y"}, "before 1980, check time.format"),
        (["", None], {}, "missing"),
        (["yesterday"], {}, "not an ISO 8601 time"),
        (["yesterday", "nan", "inf", "1,5"], {"unit": "s"}, "not a number of s"),
        ([math.nan, math.inf], {"unit": "s"}, "not a number of s"),
        (["2023-11-14"], {"format": "%d.%m.%Y"}, "not a time as %d.%m.%Y"),
    ],
)
def test_what_is_no_time_has_its_reason(
    values: list[Any], time: dict[str, str], words: str
) -> None:
    for reason in read(values, **time):
        assert f"t: {words}" in str(reason)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"column": "t", "unit": "sec"},
            "time.unit is 'sec'; it must be one of s, ms, us, ns, iso, order",
        ),
        ({}, "'time.column' is missing"),
        ({"column": "t", "unit": "s", "format": "%Y"}, "both unit 's' and format"),
        ({"column": "t", "unit": "s", "zone": "UTC"}, "numbers of unit s are UTC"),
        ({"column": "t", "zone": "Mars/Base"}, "not a time zone"),
        ({"column": "t", "format": "%H:%M"}, "lacks the day"),
        (
            {"column": "t", "format": "%Y-%m-%d %H:%M:%S%.f"},
            "use .%f for decimals of seconds",
        ),
        ({"column": "t", "format": "%s"}, "unit: s"),
        ({"column": "t", "format": "%Q"}, "strptime cannot parse"),
    ],
)
def test_times_that_cannot_be(keys: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        Time(**keys)


@pytest.mark.parametrize(("hours", "rejected"), [(-1, 0), (20, 0), (30, 1), (9999, 1)])
def test_events_a_day_after_the_clock_of_the_machine_are_rejected(
    tmp_path: Path, hours: int, rejected: int
) -> None:
    now = time.time()
    (tmp_path / "log.csv").write_text(
        f"u,i,t\na,x,{now - 10:.3f}\na,y,{now + hours * 3600:.3f}\n"
    )
    log = parse_log(
        {
            "files": "log.csv",
            "user": "u",
            "item": "i",
            "time": {"column": "t", "unit": "s"},
        }
    )

    (block,) = log.read_events(str(tmp_path), "log.csv")

    reasons = block.rejects["reason"].to_pylist()
    assert ["t: in the future" in reason for reason in reasons] == [True] * rejected
    assert block.rows.num_rows == 2 - rejected


def test_a_label_that_is_known_in_the_future_is_rejected(tmp_path: Path) -> None:
    late = time.time() + 10 * 86400
    (tmp_path / "log.csv").write_text(
        f"u,i,t,c,k\na,x,1700000000,1,{late:.0f}\na,y,1700000001,0,{late:.0f}\n"
    )
    log = parse_log(
        {
            "files": "log.csv",
            "user": "u",
            "item": "i",
            "time": {"column": "t", "unit": "s"},
            "labels": {"click": {"column": "c", "time": "k"}},
        }
    )

    (block,) = log.read_events(str(tmp_path), "log.csv")

    [reason] = block.rejects["reason"].to_pylist()
    assert reason.startswith("k: in the future")


@pytest.mark.parametrize(
    ("values", "unit", "hint"),
    [
        ([1365029107], "ms", "before 1980, check time.unit; 'unit: s' would fit"),
        (["1365029107"], "iso", "not an ISO 8601 time; 'unit: s' would fit"),
        (
            [1365029107000],
            "s",
            "after the year 2099, check time.unit; 'unit: ms' would fit",
        ),
        ([1365029107000000], "ms", "check time.unit; 'unit: us' would fit"),
        ([17], "s", "before 1980, check time.unit; 'unit: order' takes any number"),
    ],
)
def test_a_wrong_unit_names_the_one_that_fits(
    values: list[Any], unit: str, hint: str
) -> None:
    _, reasons = parse_times(pl.Series(values), Time("t", unit=unit), "t")
    assert hint in reasons[0]
