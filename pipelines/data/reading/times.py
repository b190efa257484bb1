"""Times of a log as int64 milliseconds since 1970 in UTC.

    time: {column: t, unit: s}   # s, ms, us, ns: numbers, also with decimals
    time: {column: t}            # ISO 8601, PostgreSQL's text, typed Parquet times
    time: {column: "day || ' ' || clock", format: "%d.%m.%Y %H:%M", zone: Europe/Berlin}
    time: {unit: order}          # no clock: the order of the rows

polars parses texts that it parses as Python does. Python parses the others, once per
distinct value.
"""

from __future__ import annotations

import re
import time as clocks
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import polars as pl

UNITS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}
"""Units of numbers: factor and divisor to milliseconds."""
MIN_TIME_MS = 315_532_800_000
"""Start of 1980. Earlier clock times are in a wrong unit."""
MAX_TIME_MS = 4_102_444_799_999
"""End of 2099. Later times are in a wrong unit, or stand for a missing time."""
MAX_AHEAD_MS = 86_400_000
"""A day: local times that are read as UTC are up to 14 hours ahead."""
LIKELY_MS = (788_918_400_000, 2_208_988_800_000)
"""Range of times in most logs: 1995 to 2040."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHARED_DIRECTIVES = set("YmdHMSIpbBaAjz")
"""Directives of `strptime` that polars parses as Python does."""


@dataclass(frozen=True)
class Time:
    """Column and notation of the time of an event."""

    column: str | None = None
    """Column or SQL expression. Without it the unit is `order`: events are in the order
    of the rows, and files in the order of their names."""
    unit: str = "iso"
    """s, ms, us, ns (numbers since 1970), iso (ISO 8601 text, or typed times of
    Parquet), or order (an integer that orders the events of a log without clock times).
    """
    format: str | None = None
    """Format of the time's text for Python's `strptime`, such as '%d.%m.%Y %H:%M';
    replaces `unit`."""
    zone: str | None = None
    """Time zone of times without one, such as Europe/Berlin; by default UTC."""

    def __post_init__(self) -> None:
        if self.unit not in (*UNITS, "iso", "order"):
            raise ValueError(
                f"time.unit is '{self.unit}'; it must be one of {', '.join(UNITS)}, "
                f"iso, order"
            )
        if self.column is None and self.clock:
            raise ValueError(
                "'time.column' is missing; add such as 'column: time_ms', or 'unit: "
                "order' for that of rows"
            )
        if self.format is not None:
            if self.unit != "iso":
                raise ValueError(
                    f"time has both unit '{self.unit}' and format '{self.format}'; "
                    f"give one of them"
                )
            _check_format(self.format)
        if self.zone is not None:
            if self.unit != "iso":
                raise ValueError(
                    f"time.zone is '{self.zone}', which is of texts; numbers of unit "
                    f"{self.unit} have none"
                )
            try:
                ZoneInfo(self.zone)
            except (ValueError, OSError, KeyError) as error:
                raise ValueError(
                    f"time.zone is '{self.zone}', which is no time zone; write such as "
                    f"Europe/Berlin"
                ) from error

    @property
    def clock(self) -> bool:
        """Whether times are clock times."""
        return self.unit != "order"

    @property
    def notation(self) -> str:
        """The unit or the format."""
        return f"as {self.format}" if self.format else self.unit

    @property
    def origin(self) -> str:
        """Column and notation of the time in the raw file."""
        return f"{self.column}, {self.notation}" if self.column else "the row's place"


def _check_format(time_format: str) -> None:
    """Raise a ValueError if `strptime` cannot read the format or it lacks the date."""
    moment = datetime(2019, 11, 25, 20, 55, 22, 120000, tzinfo=UTC)
    try:
        parsed = datetime.strptime(moment.strftime(time_format), time_format)
    except ValueError as error:
        remedy = "decimals of seconds are .%f, and numbers of them 'unit: s'"
        raise ValueError(
            f"time.format is '{time_format}', which Python's strptime does not read "
            f"({error}); {remedy}"
        ) from error
    if parsed.date() != moment.date():
        raise ValueError(
            f"time.format is '{time_format}', which lacks the day, the month or the "
            f"year; join the columns that have them, such as column: \"day || ' ' || "
            f'clock"'
        )


def parse_times(
    values: pl.Series, time: Time, what: str
) -> tuple[pl.Series, pl.Series]:
    """Parse times to milliseconds.

    Args:
        values: Values of the log.
        time: Their notation.
        what: Name of the column, for messages.

    Returns:
        Milliseconds, and the reason why a value is rejected (null for valid times).

    Raises:
        TypeError: If values of this type cannot be times.
    """
    kind = values.dtype
    if isinstance(kind, pl.Datetime) or kind == pl.Date:
        parsed = _parse_typed(values, time)
    elif kind == pl.String or kind == pl.Null:
        parsed = _parse_text(values.cast(pl.String).str.strip_chars(), time)
    elif kind.is_numeric() and time.unit != "iso":
        parsed = _parse_numbers(values, time)
    else:
        raise TypeError(f"{what} is {kind}, not times as {time.notation}")
    parsed = parsed.cast(pl.Int64)
    return parsed, _reject_times(values, parsed, time, what)


def _parse_typed(values: pl.Series, time: Time) -> pl.Series:
    """Convert dates and datetimes to milliseconds."""
    if values.dtype == pl.Date:
        values = values.cast(pl.Datetime("us"))
    if time.zone and values.dtype.time_zone is None:  # type: ignore[attr-defined]
        values = values.dt.replace_time_zone(
            time.zone, ambiguous="earliest", non_existent="null"
        )
    return values.dt.epoch("us") // 1000


def _reject_times(
    values: pl.Series, parsed: pl.Series, time: Time, what: str
) -> pl.Series:
    """Return the reason why a time is rejected, null for valid times."""
    if time.format:
        need, check = f"a time as {time.format}", "time.format"
    else:
        named = {"order": "an integer", "iso": "an ISO 8601 time"}
        need = named.get(time.unit, f"a number of {time.unit}")
        check = "time.unit"
    missing = values.is_null()
    if values.dtype == pl.String:
        missing = missing | (values == "")
    hint = suggest_unit(values, time, parsed)
    t = pl.col("t")
    reason = (
        pl.when(pl.col("missing"))
        .then(pl.lit(f"{what}: missing"))
        .when(t.is_null())
        .then(pl.lit(f"{what}: not {need}{hint}"))
    )
    if time.clock:
        remedy = hint or "; 'unit: order' takes any number"
        early = f"{what}: before 1980, check {check}{remedy}"
        late = f"{what}: after the year 2099, check {check}{hint}"
        reason = reason.when(t < MIN_TIME_MS).then(pl.lit(early))
        reason = reason.when(t > MAX_TIME_MS).then(pl.lit(late))
    frame = pl.DataFrame({"t": parsed, "missing": missing})
    return frame.select(reason.otherwise(None)).to_series()


def reject_future(
    moments_ms: pl.Series, reasons: pl.Series, time: Time, what: str
) -> pl.Series:
    """Reject clock times that are more than a day later than this machine's clock.

    A single such event would be the end of the log, so that the validation and test
    windows would hold it alone.

    Args:
        moments_ms: Parsed times.
        reasons: Reasons why times are rejected, null for valid times.
        time: Notation of the times.
        what: Name of the column, for messages.

    Returns:
        `reasons`, completed.
    """
    if not time.clock:
        return reasons
    latest = round(clocks.time() * 1000) + MAX_AHEAD_MS
    check = "time.format" if time.format else "time.unit"
    future = (
        f"{what}: in the future, more than a day after the clock of this machine; "
        f"check {check} and the clock of the log"
    )
    late = pl.when(moments_ms > latest).then(pl.lit(future))
    return pl.select(pl.coalesce(reasons, late)).to_series()


def suggest_unit(values: pl.Series, time: Time, made: pl.Series) -> str:
    """Suggest the unit in which rejected values would be likely times.

    Args:
        values: Values of the log.
        time: Their notation.
        made: The parsed milliseconds.
    """
    is_bad = made.is_null() | (made < MIN_TIME_MS) | (made > MAX_TIME_MS)
    bad = values.filter(is_bad & values.is_not_null()).head(1)
    if not time.clock or not len(bad):
        return ""
    numbers = bad.cast(pl.String).str.strip_chars().cast(pl.Float64, strict=False)
    number = numbers[0]
    if number is None:
        return ""
    for unit, (factor, divisor) in UNITS.items():
        if LIKELY_MS[0] <= number * factor / divisor <= LIKELY_MS[1]:
            return f"; 'unit: {unit}' would fit"
    return ""


def _parse_text(text: pl.Series, time: Time) -> pl.Series:
    """Parse texts to milliseconds, null for texts that are no times."""
    if time.unit != "iso":
        return _parse_number_text(text, time)
    fast = _parse_by_polars(text, time)
    left = fast.is_null() & text.is_not_null()
    if not left.any():
        return fast
    others = text.filter(left)
    by_value = {value: _parse_by_python(value, time) for value in others.unique()}
    slow = others.replace_strict(by_value, return_dtype=pl.Int64)
    return fast.scatter(left.arg_true(), slow)


def _parse_number_text(text: pl.Series, time: Time) -> pl.Series:
    """Parse texts as integers, then decimals, then floats (for clock times)."""
    integers = text.cast(pl.Int64, strict=False)
    parsed = _parse_numbers(integers, time)
    left = integers.is_null() & text.is_not_null()
    if not left.any():
        return parsed
    kinds: list[pl.DataType] = [pl.Decimal(38, 9)]
    if time.clock:
        kinds.append(pl.Float64())
    for kind in kinds:
        others = _parse_numbers(text.filter(left).cast(kind, strict=False), time)
        completed = pl.select(pl.coalesce(parsed.filter(left), others)).to_series()
        parsed = parsed.scatter(left.arg_true(), completed)
    return parsed


def _parse_by_python(text: str, time: Time) -> int | None:
    """Return the milliseconds of a text, or None if it is no time."""
    zone = ZoneInfo(time.zone) if time.zone else UTC
    try:
        if time.format is None:
            moment = _parse_iso(text)
        else:
            moment = datetime.strptime(text, time.format)
            if "%Z" in time.format:  # strptime reads the zone's name and drops it
                zone = UTC
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=zone)
        return (moment - EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        return None


def _parse_numbers(number: pl.Series, time: Time) -> pl.Series:
    """Convert numbers to milliseconds.

    Decimals are truncated to the millisecond, floats after rounding off their noise.
    """
    factor, divisor = UNITS.get(time.unit, (1, 1))
    if number.dtype.is_integer():
        number = number.cast(pl.Int64, strict=False)
        if factor == 1:
            return number // divisor
        # numbers that would overflow are rejected as after the year 2099
        return number.clip(-MAX_TIME_MS, MAX_TIME_MS) * factor
    if number.dtype.is_decimal():
        scale = pl.Series([factor]).cast(pl.Decimal(38, 0))
        number = number.cast(pl.Decimal(38, 9)) * scale
        whole = number.cast(pl.Int128, strict=False).cast(pl.Int64, strict=False)
        parsed = whole // divisor
    else:
        number = number.cast(pl.Float64)
        number = pl.select(pl.when(number.is_finite()).then(number)).to_series()
        micros = (number * (1000 * factor / divisor)).round(0)
        parsed = (micros // 1000).cast(pl.Int64, strict=False)
    if time.clock:
        return parsed
    is_whole = number == parsed.cast(number.dtype)
    return pl.select(pl.when(is_whole).then(parsed)).to_series()


def _parse_by_polars(text: pl.Series, time: Time) -> pl.Series:
    """Parse the texts that polars can parse to milliseconds, null for the others."""
    column, formats = pl.col("text"), []
    if time.format is None:
        column = column.str.replace(" ", "T", literal=True)
        column = column.str.replace(r"[Zz]$", "+00:00")
        formats = ["%Y-%m-%dT%H:%M:%S%.f%z", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d"]
    else:
        time_format = time.format
        commas = time_format.count(",")
        if commas == 1 and ",%f" in time_format:  # a decimal comma
            time_format = time_format.replace(",%f", "%.f")
            column = column.str.replace(r",(\d+)", ".$1")
        time_format = time_format.replace(".%f", "%.f")
        directives = set(re.findall(r"%(.)", time_format.replace("%.f", "")))
        if directives <= SHARED_DIRECTIVES:
            formats = [time_format]
    attempts = []
    for each in formats:
        has_zone = "%z" in each
        if each.endswith("%d") and time.format is None:
            parsed = column.str.to_date(each, strict=False).cast(pl.Datetime("us"))
        else:
            parsed = column.str.to_datetime(
                each,
                time_unit="us",
                time_zone="UTC" if has_zone else None,
                strict=False,
            )
        if not has_zone:
            parsed = parsed.dt.replace_time_zone(
                time.zone or "UTC", ambiguous="earliest", non_existent="null"
            )
            parsed = parsed.dt.convert_time_zone("UTC")
        attempts.append(parsed.dt.epoch("us").floordiv(1000))
    with suppress(pl.exceptions.PolarsError):  # a format that polars does not know
        if attempts:
            return text.to_frame("text").select(pl.coalesce(attempts)).to_series()
    return pl.repeat(None, len(text), dtype=pl.Int64, eager=True)


def _parse_iso(text: str) -> datetime:
    """Parse ISO 8601 and variants of it.

    PostgreSQL and others write `+00`, a blank before the offset, or UTC in letters.
    """
    text = re.sub(r"\s*(UTC|GMT|[Zz])$", "+00:00", text)
    return datetime.fromisoformat(re.sub(r"\s+(?=[+-]\d\d(:?\d\d)?$)", "", text))


def parse_iso_ms(text: str) -> int | None:
    """Return the milliseconds of an ISO 8601 time, or None if it is not valid."""
    value, _ = parse_times(pl.Series([str(text)]), Time("t"), "t")
    return value[0]
