"""Parse the times of a log to int64 milliseconds since 1970 in UTC.

    time: {column: t, unit: s}   # s, ms, us, ns: numbers, also with decimals
    time: {column: t}            # ISO 8601, PostgreSQL's text, typed Parquet times
    time: {column: "day || ' ' || clock", format: "%d.%m.%Y %H:%M", zone: Europe/Berlin}
    time: {unit: order}          # no clock: the order of the rows

polars parses the formats that it reads like Python. Python's `datetime` parses all
other texts, once per distinct value.
"""

from __future__ import annotations

import re
import time as clocks
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

import polars as pl

UNITS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}
"""Units of numbers: factor and divisor to milliseconds."""
MIN_TIME_MS = 315_532_800_000
"""Start of 1980. Earlier clock times are assumed to be in a wrong unit."""
MAX_TIME_MS = 4_102_444_799_999
"""End of 2099. Later times are assumed to be in a wrong unit, or placeholders."""
MAX_AHEAD_MS = 86_400_000
"""Allowed lead over this machine's clock: one day, because local times that are parsed
as UTC are up to 14 hours ahead."""
LIKELY_MS = (788_918_400_000, 2_208_988_800_000)
"""Range of times in most logs: 1995 to 2040."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHARED_DIRECTIVES = set("YmdHMSIpbBaAjz")
"""Directives of `strptime` that polars parses as Python does."""


@dataclass(frozen=True)
class Time:
    """Column and notation of the time of an event."""

    column: str | None = None
    """Column or SQL expression. It may be omitted with unit `order`: events are then in
    the order of rows, and files in the order of their names."""
    unit: Literal["s", "ms", "us", "ns", "iso", "order"] = "iso"
    """s, ms, us, ns (numbers since 1970), iso (ISO 8601 text, or typed times of
    Parquet), or order (an integer that orders the events of a log without clock times).
    """
    format: str | None = None
    """Format of the time's text for Python's `strptime`, such as '%d.%m.%Y %H:%M';
    replaces `unit`."""
    zone: str | None = None
    """Time zone of times without one, such as Europe/Berlin; by default UTC."""

    def __post_init__(self) -> None:
        if self.column is None and self.has_clock_times:
            raise ValueError(
                "'time.column' is missing, which only unit order does not need"
            )
        if self.format is not None:
            if self.unit != "iso":
                raise ValueError(
                    f"time has both unit '{self.unit}' and format '{self.format}'"
                )
            _check_format(self.format)
        if self.zone is not None:
            if self.unit != "iso":
                raise ValueError(
                    f"time.zone is '{self.zone}', but numbers of unit {self.unit} are "
                    f"UTC"
                )
            try:
                ZoneInfo(self.zone)
            except (ValueError, OSError, KeyError) as error:
                raise ValueError(
                    f"time.zone is '{self.zone}', which is not a time zone; use a name "
                    f"such as Europe/Berlin"
                ) from error

    @property
    def has_clock_times(self) -> bool:
        """Whether times are clock times, not ordinals."""
        return self.unit != "order"

    @property
    def notation(self) -> str:
        """Unit or format, for messages."""
        return f"as {self.format}" if self.format else self.unit


def _check_format(time_format: str) -> None:
    """Raise a ValueError if a format is invalid for `strptime` or lacks the date."""
    moment = datetime(2019, 11, 25, 20, 55, 22, 120000, tzinfo=UTC)
    try:
        parsed = datetime.strptime(moment.strftime(time_format), time_format)
    except ValueError as error:
        raise ValueError(
            f"time.format is '{time_format}', which Python's strptime cannot parse "
            f"({error})"
        ) from error
    if parsed.date() != moment.date():
        raise ValueError(
            f"time.format is '{time_format}', which lacks the day, the month or the "
            f"year; concatenate the columns that have them, such as "
            f"column: \"day || ' ' || clock\""
        )


def parse_times(
    values: pl.Series, time: Time, what: str, *, past: bool = False
) -> tuple[pl.Series, pl.Series]:
    """Parse times to milliseconds.

    Args:
        values: (n,) values of the log.
        time: Notation of the values.
        what: Name of the column, for messages.
        past: Whether clock times more than a day ahead of this machine's clock are
            rejected. A single one would determine the end of the log, and the
            validation and test windows would contain no other event.

    Returns:
        (n,) epoch ms, null for invalid values, and (n,) reasons why a value is
        rejected, null for valid times.

    Raises:
        TypeError: If the type of the values does not fit the notation.
    """
    kind = values.dtype
    if isinstance(kind, pl.Datetime) or kind == pl.Date:
        moments = values.cast(pl.Datetime("us")) if kind == pl.Date else values
        if time.zone and moments.dtype.time_zone is None:  # type: ignore[attr-defined]
            moments = moments.dt.replace_time_zone(
                time.zone, ambiguous="earliest", non_existent="null"
            )
        parsed = moments.dt.epoch("us") // 1000
    elif kind == pl.String or kind == pl.Null:
        parsed = _parse_text(values.cast(pl.String).str.strip_chars(), time)
    elif kind.is_numeric() and time.unit != "iso":
        parsed = _parse_numbers(values, time)
    else:
        raise TypeError(f"{what} is {kind}, not times as {time.notation}")
    parsed = parsed.cast(pl.Int64)
    return parsed, _reject_times(values, parsed, time, what, past)


def _reject_times(
    values: pl.Series, parsed: pl.Series, time: Time, what: str, past: bool
) -> pl.Series:
    """Return (n,) reasons why times are rejected, null for valid times."""
    if time.format:
        expected, key = f"a time as {time.format}", "time.format"
    else:
        descriptions = {"order": "an integer that is exact", "iso": "an ISO 8601 time"}
        expected = descriptions.get(time.unit, f"a number of {time.unit}")
        key = "time.unit"
    missing = values.is_null()
    if values.dtype == pl.String:
        missing = missing | (values == "")
    moment = pl.col("moment")
    reason = (
        pl.when(pl.col("missing"))
        .then(pl.lit(f"{what}: missing"))
        .when(moment.is_null())
        .then(pl.lit(f"{what}: not {expected}"))
    )
    if time.has_clock_times:
        early = f"{what}: before 1980, check {key}"
        late = f"{what}: after the year 2099, check {key}"
        reason = reason.when(moment < MIN_TIME_MS).then(pl.lit(early))
        reason = reason.when(moment > MAX_TIME_MS).then(pl.lit(late))
    if time.has_clock_times and past:
        latest = round(clocks.time() * 1000) + MAX_AHEAD_MS
        future = (
            f"{what}: in the future, more than a day after the clock of this machine; "
            f"check {key} and the clock of the log"
        )
        reason = reason.when(moment > latest).then(pl.lit(future))
    frame = pl.DataFrame({"moment": parsed, "missing": missing})
    return frame.select(reason.otherwise(None)).to_series()


def _parse_text(text: pl.Series, time: Time) -> pl.Series:
    """Parse texts to epoch ms, null for invalid texts."""
    if time.unit != "iso":
        return _parse_number_text(text, time)
    parsed = _parse_by_polars(text, time)
    is_unparsed = parsed.is_null() & text.is_not_null()
    if not is_unparsed.any():
        return parsed
    unparsed = text.filter(is_unparsed)
    by_value = {value: _parse_by_python(value, time) for value in unparsed.unique()}
    moments = unparsed.replace_strict(by_value, return_dtype=pl.Int64)
    return parsed.scatter(is_unparsed.arg_true(), moments)


def _parse_number_text(text: pl.Series, time: Time) -> pl.Series:
    """Parse texts as integers, then as floats."""
    whole = text.str.replace(r"\.0*$", "").cast(pl.Int64, strict=False)
    parsed = _parse_numbers(whole, time)
    is_open = parsed.is_null() & text.is_not_null()
    if is_open.any():
        numbers = text.filter(is_open).cast(pl.Float64, strict=False)
        parsed = parsed.scatter(is_open.arg_true(), _parse_numbers(numbers, time))
    return parsed


def _parse_by_python(text: str, time: Time) -> int | None:
    """Return the epoch ms of a text, or None if it is invalid."""
    zone = ZoneInfo(time.zone) if time.zone else UTC
    try:
        if time.format is None:
            # ISO 8601, or a variant that PostgreSQL and other systems write
            text = re.sub(r"\s*(UTC|GMT|[Zz])$", "+00:00", text)
            text = re.sub(r"\s+(?=[+-]\d\d(:?\d\d)?$)", "", text)
            moment = datetime.fromisoformat(text)
        else:
            moment = datetime.strptime(text, time.format)
            if "%Z" in time.format:  # strptime parses the zone's name and ignores it
                zone = UTC
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=zone)
        return (moment - EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        return None


def _parse_numbers(number: pl.Series, time: Time) -> pl.Series:
    """Convert numbers of a unit to epoch ms, null for invalid numbers."""
    factor, divisor = UNITS.get(time.unit, (1, 1))
    if number.dtype.is_integer():
        number = number.cast(pl.Int64, strict=False)
        if factor == 1:
            return number // divisor
        # clipping avoids an overflow and leaves the number out of the valid range
        return number.clip(-MAX_TIME_MS, MAX_TIME_MS) * factor
    if number.dtype.is_decimal():
        return _parse_number_text(number.cast(pl.String), time)
    number = number.cast(pl.Float64)
    number = pl.select(pl.when(number.is_finite()).then(number)).to_series()
    micros = (number * (1000 * factor / divisor)).round(0)
    parsed = (micros // 1000).cast(pl.Int64, strict=False)
    if time.has_clock_times:
        return parsed
    # larger floats may be rounded integers
    is_whole = (number == parsed.cast(number.dtype)) & (number.abs() < 2**53)
    return pl.select(pl.when(is_whole).then(parsed)).to_series()


def _parse_by_polars(text: pl.Series, time: Time) -> pl.Series:
    """Parse texts in formats that polars supports to epoch ms, null for other texts."""
    column = pl.col("text")
    if time.format is None:
        column = column.str.replace(" ", "T", literal=True)
        column = column.str.replace(r"[Zz]$", "+00:00")
        formats = ["%Y-%m-%dT%H:%M:%S%.f%z", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d"]
    else:
        time_format = time.format
        if time_format.count(",") == 1 and ",%f" in time_format:  # a decimal comma
            time_format = time_format.replace(",%f", "%.f")
            column = column.str.replace(r",(\d+)", ".$1")
        time_format = time_format.replace(".%f", "%.f")
        directives = set(re.findall(r"%(.)", time_format.replace("%.f", "")))
        formats = [time_format] if directives <= SHARED_DIRECTIVES else []
    attempts = [_parse_format(column, name, time.zone) for name in formats]
    with suppress(pl.exceptions.PolarsError):  # a format that polars does not support
        if attempts:
            return text.to_frame("text").select(pl.coalesce(attempts)).to_series()
    return pl.repeat(None, len(text), dtype=pl.Int64, eager=True)


def _parse_format(column: pl.Expr, polars_format: str, zone: str | None) -> pl.Expr:
    """Parse texts of one format to epoch ms, null for other texts."""
    has_zone = "%z" in polars_format
    parsed = column.str.to_datetime(
        polars_format,
        time_unit="us",
        time_zone="UTC" if has_zone else None,
        strict=False,
    )
    if not has_zone:
        parsed = parsed.dt.replace_time_zone(
            zone or "UTC", ambiguous="earliest", non_existent="null"
        )
        parsed = parsed.dt.convert_time_zone("UTC")
    return parsed.dt.epoch("us").floordiv(1000)
