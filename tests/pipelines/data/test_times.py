"""Times in every unit and format are parsed as Python's datetime parses them."""

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
many_examples = settings(max_examples=60)


def parse(values: Any, **time: Any) -> list[int | str]:
    """Return the milliseconds of each value, or the reason why it is rejected."""
    series = values if isinstance(values, pl.Series) else pl.Series(values)
    times, reasons = parse_times(series, Time("t", **time), "t")
    return [
        reason or ms
        for ms, reason in zip(times.to_list(), reasons.to_list(), strict=True)
    ]


def to_ms(moment: datetime) -> int:
    """Return the milliseconds since 1970 of a moment with a time zone."""
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


OFFSETS = st.integers(-12 * 60, 14 * 60).map(
    lambda minutes: timezone(timedelta(minutes=minutes))
)
FRACTION = slice(20, 26)
"""The six digits of the fraction of a second in texts of formats with `.%f` or `,%f`."""


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=20)
@given(data=st.data())
def test_a_format_is_parsed_as_python_parses_it(
    format: str, data: st.DataObject
) -> None:
    moments = data.draw(st.lists(st.tuples(MOMENTS, OFFSETS), min_size=1, max_size=6))
    texts = [
        moment.replace(tzinfo=zone if "%z" in format else UTC).strftime(format)
        for moment, zone in moments
    ]
    if ".%f" in format or ",%f" in format:
        digits = data.draw(st.integers(1, 6))
        texts = [
            text[: FRACTION.start] + text[FRACTION][:digits] + text[FRACTION.stop :]
            for text in texts
        ]
    invalid = ["", "soon", texts[0] + "x", "2023-02-30", texts[0][:-1]]
    texts += data.draw(st.lists(st.sampled_from(invalid), max_size=2))

    parsed = parse(pl.Series(texts, dtype=pl.String), format=format)

    for text, ms_or_reason in zip(texts, parsed, strict=True):
        try:
            moment = datetime.strptime(text, format)
        except ValueError:
            assert isinstance(ms_or_reason, str)
            continue
        expected = to_ms(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
        if isinstance(ms_or_reason, str):
            assert not MIN_TIME_MS <= expected <= MAX_TIME_MS
        else:
            assert ms_or_reason == expected


# The microseconds that a text can tell apart, and the text of a moment with its zone
# and of the same moment in UTC.
ISO_TEXTS: list[tuple[int, Any]] = [
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


@pytest.mark.parametrize(("resolution_us", "format_moment"), ISO_TEXTS)
@settings(max_examples=20)
@given(st.lists(st.tuples(MOMENTS, st.integers(0, 14 * 4)), min_size=1, max_size=9))
def test_iso_8601_and_the_times_that_databases_write_are_parsed(
    resolution_us: int, format_moment: Any, drawn: list[tuple[datetime, int]]
) -> None:
    moments = [
        moment.replace(tzinfo=timezone(timedelta(minutes=15 * quarters)))
        for moment, quarters in drawn
    ]
    texts = [format_moment(moment, moment.astimezone(UTC)) for moment in moments]

    resolution = timedelta(microseconds=resolution_us)
    expected = [
        to_ms(EPOCH + (moment - EPOCH) // resolution * resolution) for moment in moments
    ]
    assert parse(texts) == expected


@many_examples
@given(
    st.lists(MOMENTS, min_size=1),
    st.sampled_from(ZONES),
    st.sampled_from([{}, {"format": "%d.%m.%Y %H:%M:%S"}, {"format": "%c"}]),
)
def test_times_without_an_offset_are_of_the_zone_of_the_settings(
    drawn: list[datetime], zone: str, keys: dict[str, str]
) -> None:
    moments = [moment.replace(microsecond=0) for moment in drawn]
    format = keys.get("format", "%Y-%m-%d %H:%M:%S")
    texts = [moment.strftime(format) for moment in moments]

    expected = [to_ms(moment.replace(tzinfo=ZoneInfo(zone))) for moment in moments]
    assert parse(texts, zone=zone, **keys) == expected


@pytest.mark.parametrize("keys", [{}, {"format": "%Y-%m-%d %H:%M:%S"}])
def test_hours_that_a_clock_change_repeats_or_skips(keys: dict[str, str]) -> None:
    """The first of two equal hours is used; a skipped hour is read as Python does."""
    repeated, skipped = "2023-10-29 02:30:00", "2023-03-26 02:30:00"
    after = "2023-10-29 03:10:00"
    berlin = ZoneInfo("Europe/Berlin")

    assert parse([repeated, skipped, after], zone="Europe/Berlin", **keys) == [
        to_ms(datetime(2023, 10, 29, 0, 30, tzinfo=UTC)),
        to_ms(datetime(2023, 3, 26, 2, 30, tzinfo=berlin)),
        to_ms(datetime(2023, 10, 29, 2, 10, tzinfo=UTC)),
    ]


def test_typed_times_of_a_repeated_hour_are_the_first_one() -> None:
    typed = pl.Series(["2023-10-29 02:30:00"]).str.to_datetime()

    expected = to_ms(datetime(2023, 10, 29, 0, 30, tzinfo=UTC))
    assert parse(typed, zone="Europe/Berlin") == [expected]


MS_PER_UNIT = {
    "s": Fraction(1000),
    "ms": Fraction(1),
    "us": Fraction(1, 1000),
    "ns": Fraction(1, 10**6),
}


@many_examples
@given(st.lists(MOMENTS, min_size=1), st.sampled_from(list(MS_PER_UNIT)), st.data())
def test_whole_numbers_of_every_unit_are_rounded_down_to_milliseconds(
    moments: list[datetime], unit: str, data: st.DataObject
) -> None:
    values = draw_values(moments, unit, data)

    expected = [math.floor(value * MS_PER_UNIT[unit]) for value in values]
    assert parse(values, unit=unit) == expected
    assert parse([f" {value} " for value in values], unit=unit) == expected


def draw_values(moments: list[datetime], unit: str, data: st.DataObject) -> list[int]:
    """Return whole numbers of a unit, at most 999 units after the moments."""
    return [
        math.floor(to_ms(moment.replace(tzinfo=UTC)) / MS_PER_UNIT[unit])
        + data.draw(st.integers(0, 999))
        for moment in moments
    ]


@many_examples
@given(st.lists(MOMENTS, min_size=1), st.sampled_from(["s", "ms"]), st.data())
def test_decimals_of_seconds_and_milliseconds_are_rounded_down_to_milliseconds(
    moments: list[datetime], unit: str, data: st.DataObject
) -> None:
    values = draw_values(moments, unit, data)
    thousandths = [data.draw(st.integers(0, 999)) for _ in values]
    decimals = [
        Decimal(value) + Decimal(thousandth) / 1000
        for value, thousandth in zip(values, thousandths, strict=True)
    ]

    expected = [math.floor(Fraction(value) * MS_PER_UNIT[unit]) for value in decimals]
    assert parse([str(value) for value in decimals], unit=unit) == expected
    assert parse(pl.Series(decimals, dtype=pl.Decimal(38, 3)), unit=unit) == expected
    whole = [math.floor(value * MS_PER_UNIT[unit]) for value in values]
    assert parse([f"{value}.0" for value in values], unit=unit) == whole


@many_examples
@given(st.lists(st.integers(MIN_TIME_MS, MAX_TIME_MS), min_size=1))
def test_float_seconds_are_exact_to_the_millisecond(values: list[int]) -> None:
    seconds = [value / 1000 for value in values]

    assert parse(seconds, unit="s") == values
    assert parse([repr(value) for value in seconds], unit="s") == values


def test_seconds_with_an_exponent_are_parsed() -> None:
    expected = [1_700_000_000_000, 1_500_000_000_000]
    assert parse(["1.700000e+09", "1.500000e+09"], unit="s") == expected


@many_examples
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_the_unit_order_takes_any_integer_and_no_fraction(values: list[int]) -> None:
    assert parse(values, unit="order") == values
    assert parse([str(value) for value in values], unit="order") == values
    fractions = [f"{value % 10**9}.5" for value in values]
    for reason in parse(fractions, unit="order"):
        assert reason == "t: not an integer"
    assert parse([3.0, 4.5], unit="order") == [3, "t: not an integer"]


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
def test_a_value_that_is_no_time_is_rejected_with_the_reason(
    values: list[Any], time: dict[str, str], words: str
) -> None:
    for reason in parse(values, **time):
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
def test_an_invalid_mapping_of_times_is_refused(
    keys: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        Time(**keys)


LOG_OF_SECONDS = {
    "files": "log.csv",
    "user": "u",
    "item": "i",
    "time": {"column": "t", "unit": "s"},
}


@pytest.mark.parametrize(
    ("hours", "num_rejects"), [(-1, 0), (20, 0), (30, 1), (9999, 1)]
)
def test_events_over_a_day_after_the_clock_of_the_machine_are_rejected(
    tmp_path: Path, hours: int, num_rejects: int
) -> None:
    now = time.time()
    (tmp_path / "log.csv").write_text(
        f"u,i,t\na,x,{now - 10:.3f}\na,y,{now + hours * 3600:.3f}\n"
    )
    log = parse_log(LOG_OF_SECONDS)

    (block,) = log.read_events(str(tmp_path), "log.csv")

    reasons = block.rejects["reason"].to_pylist()
    assert len(reasons) == num_rejects
    assert all("t: in the future" in reason for reason in reasons)
    assert block.rows.num_rows == 2 - num_rejects


def test_a_label_that_becomes_known_in_the_future_is_rejected(tmp_path: Path) -> None:
    known = time.time() + 10 * 86400
    (tmp_path / "log.csv").write_text(
        f"u,i,t,c,k\na,x,1700000000,1,{known:.0f}\na,y,1700000001,0,{known:.0f}\n"
    )
    labels = {"click": {"column": "c", "time": "k"}}
    log = parse_log(LOG_OF_SECONDS | {"labels": labels})

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
def test_the_reason_for_a_wrong_unit_names_the_unit_that_fits(
    values: list[Any], unit: str, hint: str
) -> None:
    _, reasons = parse_times(pl.Series(values), Time("t", unit=unit), "t")

    assert hint in reasons[0]
