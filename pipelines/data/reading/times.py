"""Times of a log as int64 milliseconds since 1970 in UTC, of whatever a mapping file says that they are.

    time: {column: t, unit: s}                               # s, ms, us, ns: numbers, decimals too
    time: {column: t}                                        # ISO 8601 and what PostgreSQL writes; typed Parquet times
    time: {column: "day || ' ' || clock", format: "%d.%m.%Y %H:%M:%S.%f", zone: Europe/Berlin}
    time: {unit: order}                                      # no clock: the order of the rows

polars reads what it reads as Python does; what is left is read by Python, once per different value.
"""

from __future__ import annotations

import re
import time as clocks
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import polars as pl

UNITS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}
"""Units of numbers: factor and divisor to milliseconds."""
FIRST_MS = 315_532_800_000  # 1980: an earlier clock time is a wrong unit
LAST_MS = 4_102_444_799_999  # the end of year 2099: a later time is a wrong unit, or stands for none
AHEAD_MS = (
    86_400_000  # a day: local times that are read as UTC are up to 14 hours ahead
)
LIKELY_MS = (788_918_400_000, 2_208_988_800_000)
"""Times of most logs: 1995 to 2040."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SAME = set("YmdHMSIpbBaAjz")
"""Directives of `strptime` by which polars, where it reads a text, reads it as Python does."""


@dataclass(frozen=True)
class Time:
    """When an event happened."""

    column: str | None = None
    """Column or SQL expression. Without it the unit is `order`: events are in the order of the rows, files in the order
    of their names."""
    unit: str = "iso"
    """s, ms, us, ns (numbers since 1970), iso (ISO 8601 text, or typed times of Parquet), or order (an integer that
    orders the events of a log without clock times)."""
    format: str | None = None
    """How the time's text is written, as Python's `strptime` has it, such as '%d.%m.%Y %H:%M'; it replaces `unit`."""
    zone: str | None = None
    """Time zone of times that name none, such as Europe/Berlin; by default UTC."""

    def __post_init__(self) -> None:
        if self.unit not in (*UNITS, "iso", "order"):
            raise ValueError(
                f"time.unit is '{self.unit}'; it must be one of {', '.join(UNITS)}, iso, order"
            )
        if self.column is None and self.clock:
            raise ValueError(
                "'time.column' is missing; add such as 'column: time_ms', or 'unit: order' for that of rows"
            )
        if self.format is not None:
            if self.unit != "iso":
                raise ValueError(
                    f"time has both unit '{self.unit}' and format '{self.format}'; give one of them"
                )
            _check_format(self.format)
        if self.zone is not None:
            if self.unit != "iso":
                raise ValueError(
                    f"time.zone is '{self.zone}', which is of texts; numbers of unit {self.unit} have none"
                )
            try:
                ZoneInfo(self.zone)
            except (ValueError, OSError, KeyError) as error:
                raise ValueError(
                    f"time.zone is '{self.zone}', which is no time zone; write such as Europe/Berlin"
                ) from error

    @property
    def clock(self) -> bool:
        """Whether times are clock times."""
        return self.unit != "order"

    @property
    def written(self) -> str:
        """The unit or the format."""
        return f"as {self.format}" if self.format else self.unit

    @property
    def origin(self) -> str:
        """The raw column or expression, with its unit or format."""
        return f"{self.column}, {self.written}" if self.column else "the row's place"


def _check_format(written: str) -> None:
    """Raise ValueError for a format that Python lacks, or that has no year, month or
    day.
    """
    moment = datetime(2019, 11, 25, 20, 55, 22, 120000, tzinfo=UTC)
    try:
        read = datetime.strptime(moment.strftime(written), written)
    except ValueError as error:
        remedy = "decimals of seconds are .%f, and numbers of them 'unit: s'"
        raise ValueError(
            f"time.format is '{written}', which Python's strptime does not read ({error}); {remedy}"
        ) from error
    if read.date() != moment.date():
        raise ValueError(
            f"time.format is '{written}', which lacks the day, the month or the year; join the columns that have them, "
            f"such as column: \"day || ' ' || clock\""
        )


def moments(values: pl.Series, time: Time, what: str) -> tuple[pl.Series, pl.Series]:
    """Return milliseconds, and the reason for each value that is no time (null
    otherwise).

    Raises:
        TypeError: for a type that cannot hold times.
    """
    kind = values.dtype
    if isinstance(kind, pl.Datetime) or kind == pl.Date:
        made = values.cast(pl.Datetime("us") if kind == pl.Date else values.dtype)
        if time.zone and made.dtype.time_zone is None:  # type: ignore[attr-defined]
            made = made.dt.replace_time_zone(
                time.zone, ambiguous="earliest", non_existent="null"
            )
        made = made.dt.epoch("us") // 1000
    elif kind == pl.String or kind == pl.Null:
        made = _parse_text(values.cast(pl.String).str.strip_chars(), time)
    elif kind.is_numeric() and time.unit != "iso":
        made = _parse_numbers(values, time)
    else:
        raise TypeError(f"{what} is {kind}, not times as {time.written}")
    need = {"order": "an integer", "iso": "an ISO 8601 time"}.get(
        time.unit, f"a number of {time.unit}"
    )
    need = f"a time as {time.format}" if time.format else need
    check = "time.format" if time.format else "time.unit"
    missing = (
        values.is_null() | (values == "") if kind == pl.String else values.is_null()
    )
    t = pl.col("t")
    hint = suggest_unit(values, time, made)
    reason = (
        pl.when(pl.col("missing"))
        .then(pl.lit(f"{what}: missing"))
        .when(t.is_null())
        .then(pl.lit(f"{what}: not {need}{hint}"))
    )
    if time.clock:
        remedy = hint or "; 'unit: order' takes any number"
        early = f"{what}: before 1980, check {check}{remedy}"
        reason = reason.when(t < FIRST_MS).then(pl.lit(early))
        reason = reason.when(t > LAST_MS).then(
            pl.lit(f"{what}: after the year 2099, check {check}{hint}")
        )
    frame = pl.DataFrame({"t": made.cast(pl.Int64), "missing": missing})
    return frame["t"], frame.select(reason.otherwise(None)).to_series()


def reject_future(
    moments_ms: pl.Series, reasons: pl.Series, time: Time, what: str
) -> pl.Series:
    """Return `reasons`, filled in where a clock time is more than a day later than the clock of this machine.

    One such event would be the end of the log: the validation and test windows would hold it alone.
    """
    if not time.clock:
        return reasons
    latest = round(clocks.time() * 1000) + AHEAD_MS
    check = "time.format" if time.format else "time.unit"
    future = (
        f"{what}: in the future, more than a day after the clock of this machine; "
        f"check {check} and the clock of the log"
    )
    late = pl.when(moments_ms > latest).then(pl.lit(future))
    return pl.select(pl.coalesce(reasons, late)).to_series()


def suggest_unit(values: pl.Series, time: Time, made: pl.Series) -> str:
    """Return a hint at the unit by which values that are no times would be times.

    Args:
        values: The raw values.
        time: How they are read.
        made: The milliseconds that they are read as.
    """
    is_bad = made.is_null() | (made < FIRST_MS) | (made > LAST_MS)
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
    if time.unit != "iso":
        whole = text.cast(pl.Int64, strict=False)
        left = whole.is_null() & text.is_not_null()
        made, others = _parse_numbers(whole, time), text.filter(left)
        kinds = (
            [pl.Decimal(38, 9), *([pl.Float64()] if time.clock else [])]
            if left.any()
            else []
        )
        for kind in kinds:
            found = _parse_numbers(others.cast(kind, strict=False), time)
            made = made.scatter(
                left.arg_true(),
                pl.select(pl.coalesce(made.filter(left), found)).to_series(),
            )
        return made
    fast = _fast(text, time)
    left = fast.is_null() & text.is_not_null()
    if not left.any():
        return fast
    parse: Callable[[str], datetime] = _iso
    if time_format := time.format:
        parse = lambda s: datetime.strptime(s, time_format)  # noqa: E731
    known: dict[str, int | None] = {}
    zone = ZoneInfo(time.zone) if time.zone else UTC
    for value in text.filter(left).unique().to_list():  # once per different value
        try:
            moment = parse(value)
            named = (
                time.format and "%Z" in time.format
            )  # Python reads the name, and forgets it
            moment = (
                moment
                if moment.tzinfo
                else moment.replace(tzinfo=UTC if named else zone)
            )
            known[value] = (moment - EPOCH) // timedelta(milliseconds=1)
        except (ValueError, OverflowError):
            known[value] = None
    slow = text.filter(left).replace_strict(known, return_dtype=pl.Int64)
    return fast.scatter(left.arg_true(), slow)


def _parse_numbers(number: pl.Series, time: Time) -> pl.Series:
    """Convert numbers: decimals are truncated to the millisecond, floats after rounding
    their noise.
    """
    factor, divisor = UNITS.get(time.unit, (1, 1))
    if number.dtype.is_integer():
        number = number.cast(pl.Int64, strict=False)
        # what would overflow is after the year 2099
        return (
            number.clip(-LAST_MS, LAST_MS) * factor if factor > 1 else number // divisor
        )
    if number.dtype.is_decimal():
        number = number.cast(pl.Decimal(38, 9)) * pl.Series([factor]).cast(
            pl.Decimal(38, 0)
        )
        made = (
            number.cast(pl.Int128, strict=False).cast(pl.Int64, strict=False) // divisor
        )
    else:
        number = number.cast(pl.Float64)
        number = pl.select(pl.when(number.is_finite()).then(number)).to_series()
        made = ((number * (1000 * factor / divisor)).round(0) // 1000).cast(
            pl.Int64, strict=False
        )
    return (
        made
        if time.clock
        else pl.select(
            pl.when(number == made.cast(number.dtype)).then(made)
        ).to_series()
    )


def _fast(text: pl.Series, time: Time) -> pl.Series:
    """Parse with polars; values that it cannot parse are null."""
    column, tries = pl.col("text"), []
    if time.format is None:
        column = column.str.replace(" ", "T", literal=True).str.replace(
            r"[Zz]$", "+00:00"
        )
        tries = ["%Y-%m-%dT%H:%M:%S%.f%z", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d"]
    else:
        written = time.format
        if written.count(",%f") == 1 and "," not in written.replace(",%f", ""):
            written, column = (
                written.replace(",%f", "%.f"),
                column.str.replace(r",(\d+)", ".$1"),
            )
        written = written.replace(".%f", "%.f")
        if set(re.findall(r"%(.)", written.replace("%.f", ""))) <= SAME:
            tries = [written]
    found = []
    for each in tries:
        if each.endswith("%d") and time.format is None:
            read = column.str.to_date(each, strict=False).cast(pl.Datetime("us"))
        else:
            read = column.str.to_datetime(
                each,
                time_unit="us",
                time_zone="UTC" if "%z" in each else None,
                strict=False,
            )
        if "%z" not in each:
            read = read.dt.replace_time_zone(
                time.zone or "UTC", ambiguous="earliest", non_existent="null"
            )
            read = read.dt.convert_time_zone("UTC")
        found.append(read.dt.epoch("us").floordiv(1000))
    with suppress(pl.exceptions.PolarsError):  # of a format that polars does not have
        if found:
            return text.to_frame("text").select(pl.coalesce(found)).to_series()
    return pl.repeat(None, len(text), dtype=pl.Int64, eager=True)


def _iso(text: str) -> datetime:
    """Parse ISO 8601, also as PostgreSQL writes it: `+00`, a blank before the offset,
    `UTC`.
    """
    text = re.sub(r"\s*(UTC|GMT|[Zz])$", "+00:00", text)
    return datetime.fromisoformat(re.sub(r"\s+(?=[+-]\d\d(:?\d\d)?$)", "", text))


def milliseconds(text: str) -> int | None:
    """Convert an ISO 8601 time; None for other text."""
    value, _ = moments(pl.Series([str(text)]), Time("t"), "t")
    return value[0]
