"""Determine the roles of the columns of an unknown log from names and first values.

`pipelines/prepare/suggest/suggest.py` writes a suggested mapping from these roles.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import polars as pl

from pipelines.prepare.reading.rows import clean_ids
from pipelines.prepare.reading.times import LIKELY_MS, Time, parse_times

ROLES = {
    "user": (
        "user|u|customer|cust|member|visitor|account|reviewer|client|buyer|viewer"
        "|household|shopper|subscriber|listener|player|reader|voter|liker|commenter"
        "|patient|passenger|consumer|panelist"
    ),
    "item": (
        "item|i|article|product|prod|prd|movie|video|news|asin|sku|stock|track|song"
        "|book|venue|poi|business|restaurant|hotel|listing|recipe|anime|artist|good"
        "|isbn|ean|upc|gtin|podcast|episode|place|post"
    ),
    "request": (
        "request|impression|session|visit|page|q|invoice|basket|order|cart"
        "|transaction|receipt"
    ),
    "query": "query|keyword|search|searchstring|term|phrase",
    "position": "position|pos|rank",
}
"""Regex per role that matches the last word of a name, except words for ids."""
ID = "ids?|no|nr|key|code|number|token"
TIME = (
    "time|timestamp|ts|t|date|datetime|dat|dt|day|hour|hourmin|month|year|week|when"
    "|created|at|clock|order|index|step|seq"
)
OTHER_TIME = (
    "birth|birthday|dob|born|deliver(y|ed)|ship(ped|ping)?|expir(y|es|ed)|valid|updat"
    "ed?|modified|registered|return(ed)?|releas(ed?|ing)|upload(ed)?|signup|joined"
    "|since|launch(ed)?|end(ed)?|first|last|due"
)
"""Regex of words that name another time than that of the event."""
OUTCOME = (
    "(rating|star|overall|click|like|purchase|bought|buy|add|quantity|qty|dwell|watch"
    "|play|stay|view|favou?rite|follow|comment|forward|share|hate|hide|hid|vote"
    "|revenue|sale|spent|paid|profit|conversion|refund|skip|skipped|complete|finish"
    "|reward)(e?d|s|ed|ing)?"
)
"""Regex of words that name what a user did."""
COMPUTED = "propensity|prob|probability|predict(ed|ion)|estimated?|expected|logit|p"
"""Regex of words that name scores, which are computed before the event."""
PROPERTY = (
    "category|type|brand|colou?r|group|class|genre|department|segment|status|level"
    "|tier|counts?|size|language|city|country|gender|age|agent|feature|name|title"
    "|text|desc|description|price|cost|duration|length|weight|discount|amount|lat"
    "|latitude|lon|lng|longitude|device|channel"
)
"""Regex of words that name properties, which are neither users nor items."""
DAYS = ["%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y", "%Y/%m/%d"]
DAYS += ["%d.%m.%y", "%m/%d/%y", "%d/%m/%y", "%d-%b-%Y", "%d %b %Y", "%b %d, %Y"]
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p")
FORMATS = [day + clock for day in DAYS for clock in CLOCKS]
NUMBER = r"^[+-]?\d*[.,]?\d+(?:[eE][+-]?\d+)?$"
FRACTION = r"[.,]\d*[1-9]|[eE+]|^-(?:[02-9]|1.)"
"""Regex of numbers that are no ids: -1 often stands for a missing id."""
MEASURE = r"^\W*[A-Za-z]{0,3}\W{0,2}\d+[.,:]\d[\d.,: +-]*\W*[A-Za-z]{0,6}$"
"""Regex of numbers with a unit or punctuation, such as `40.7, -74.0` or `$12.5`."""
NEARLY_ALL = 0.99
"""Share of rows that counts as nearly all; the others may be malformed."""


def split_name(name: str) -> list[str]:
    """Return the words of a name in lower case, split at punctuation and camel case."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return re.findall(r"[^\W\d_]+", name.lower())


class Column:
    """A column of a file: its name, its first values, and its likely roles."""

    def __init__(self, name: str, values: pl.Series) -> None:
        """Examine a column."""
        self.name = name if name.isidentifier() else f'"{name}"'
        """The column as SQL."""
        self.feature_name = re.sub(r"\W+", "_", name)
        self.words = split_name(name)
        self.has_id_word = self.has_word(ID)
        self.values = values.drop_nulls()
        """Values without nulls."""
        self.ids = pl.Series([], dtype=pl.String)
        """Values as ids; empty for lists, structs and times."""
        if not values.dtype.is_nested() and not values.dtype.is_temporal():
            self.ids = clean_ids(self.values).drop_nulls()
        self.distinct = self.ids.n_unique()
        self.is_complete = len(
            self.values if values.dtype.is_nested() else self.ids
        ) >= NEARLY_ALL * len(values)
        """Whether nearly all rows have an id or a list."""
        self.is_unique = self.distinct >= NEARLY_ALL * len(self.ids)
        self.is_number = self.share(NUMBER) >= NEARLY_ALL
        self.is_flag = self.distinct <= 2 and self.share("^(?i:0|1|true|false)$") == 1
        pattern, limit = (FRACTION, 0.01) if self.is_number else (MEASURE, 0.5)
        self.is_measure = self.share(pattern) > limit
        examples = [str(value).split() for value in self.values.head(2).to_list()]
        self.examples = " | ".join(" ".join(words)[:40] for words in examples)
        """Two values, for comments of the mapping."""
        self.time: dict[str, str] = {}
        """Unit or format as keys of `time`; empty if the values are not times."""
        self.list_sql = ""
        """SQL of a list of ids; empty if the values are not lists."""
        self.doubts: list[str] = []
        """Questions about the role of user, item or time."""
        if len(self.values):
            self._find_time()
            if not self.time and not self.is_number:
                self.list_sql = self._find_list_sql()

    def share(self, pattern: str) -> float:
        """Return the share of the ids that match a regex."""
        return int(self.ids.str.contains(pattern).sum()) / max(1, len(self.ids))

    def has_word(self, pattern: str) -> bool:
        """Return whether a word of the name matches a regex."""
        return any(re.fullmatch(pattern, word) for word in self.words)

    @property
    def role(self) -> str:
        """The role that the last word indicates, besides words for ids, or ""."""
        words = [word for word in self.words if not re.fullmatch(ID, word)]
        for role, pattern in ROLES.items():
            if words and re.fullmatch(f"({pattern})(id|no|key)?s?", words[-1]):
                # the id of a query identifies a request
                return "request" if role == "query" and self.has_id_word else role
        return ""

    @property
    def is_outcome(self) -> bool:
        """Whether the name stands for an action of a user."""
        return self.has_word(OUTCOME) and not self.has_word(COMPUTED)

    @property
    def is_text(self) -> bool:
        """Whether the values may be texts that describe an item."""
        is_other = self.is_number or self.is_outcome or bool(self.time)
        is_link = self.examples.startswith("http")
        return (
            not is_other and not is_link and (self.distinct > 1 or bool(self.list_sql))
        )

    @property
    def may_be_id(self) -> bool:
        """Whether the name and the values fit ids of users, items or requests."""
        is_other = self.is_measure or self.is_flag or bool(self.list_sql)
        if self.distinct < 2 or is_other or (self.time and not self.is_number):
            return False
        if self.role:
            return True
        is_text = self.share(r"\S\s+\S") > 0.5
        other_words = f"{TIME}|{OTHER_TIME}|{OUTCOME}|{PROPERTY}"
        return not is_text and not self.has_word(other_words)

    def _find_time(self) -> None:
        """Set the unit or the format if the values are times."""
        values, is_named = self.values.head(500), self.has_word(TIME)
        notations: list[str] = []
        if values.dtype in (pl.Date, pl.Datetime):
            notations = ["iso"]
        elif self.is_number and is_named:
            notations = ["s", "ms", "us", "ns"]
            notations += ["%Y%m%d"] if values.dtype == pl.String else []
        elif self.is_number and not self.has_id_word and not self.role:
            notations = ["s", "ms"]
        elif self.share(r"^[\w ,:]{0,12}\d[\w.+:, /-]{5,30}$") >= NEARLY_ALL:
            notations = ["iso", *FORMATS]
        fits: list[pl.Series] = []
        for notation in notations:
            options: Any = {"format" if "%" in notation else "unit": notation}
            parsed, _ = parse_times(values, Time("t", **options), "t")
            if parsed.is_between(*LIKELY_MS).sum() >= 0.98 * len(parsed):
                fits.append(parsed)
                self.time = self.time or options
        if fits:
            # whether the day and the month may be exchanged
            self.is_day_ambiguous = not all(times.equals(fits[0]) for times in fits)
            is_day = bool((fits[0].drop_nulls() % 86_400_000 == 0).all())
            # times of events with a clock come first
            self.time_rank = self.has_word(OTHER_TIME), is_day, not is_named

    def _find_list_sql(self) -> str:
        """Return the SQL of a list of ids; empty if the values are not lists."""
        kind = self.values.dtype
        if isinstance(kind, pl.List) and not kind.inner.is_nested():
            return self.name
        word = r"[\w:-]*\d[\w:-]*"
        for delimiter in " ,|;":
            if self.share(rf"^{word}([{delimiter}]{word})+$") > 0.5:
                return f"string_to_array({self.name}, '{delimiter}')"
        return ""


@dataclass
class Roles:
    """The columns of users, items and times of a log."""

    user: Any = None
    item: Any = None
    """Column of items, or of lists of items."""
    time: Any = None
    named: int = 0
    """Number of roles (user, item) that a name says, 0 to 2."""


def choose_roles(columns: list[Column], described: Collection[str]) -> Roles:
    """Choose the columns of users, items and times of a log, and note doubts.

    Args:
        columns: Columns of the log.
        described: Names of columns of other files, each as words joined by blanks.
    """
    roles = Roles()
    times = [c for c in columns if c.time]
    if times:
        best = min(times, key=lambda c: (c.time_rank, -c.distinct))
        rivals = [c for c in times if c is not best and c.time_rank == best.time_rank]
        roles.time, best.doubts = best, [f"or {c.name}?" for c in rivals]
        if best.is_day_ambiguous:
            best.doubts.append("day or month first?")
        if best.has_word(OTHER_TIME):
            best.doubts.append("its name says another time than the event's?")
    ids = [c for c in columns if c.may_be_id and c is not roles.time]
    other_words = f"{PROPERTY}|{OUTCOME}"
    lists = [c for c in columns if c.list_sql and not c.has_word(other_words)]
    if any(c.role == "item" and c.is_complete and not c.is_outcome for c in ids):
        lists = []
    if lists:  # `clicked_item` is an element of the list
        ids = [c for c in ids if not c.is_outcome]

    def rank(c: Column) -> tuple[bool, bool, bool]:
        is_likely = not c.has_word("hist|history|past") if c.role else not c.is_unique
        return c.is_complete, " ".join(c.words) in described, is_likely

    for role in ("user", "item"):
        ids = [c for c in ids if c is not roles.user]
        pool = [c for c in ids if c.role == role]
        if not pool and role == "user":  # a session is a user of its own
            pool = [c for c in ids if c.role == "request"]
        if role == "item" and lists:
            pool = lists
        roles.named += bool(pool)
        questions = [] if pool else [f"no name says {role}; is it?"]
        pool = pool or [c for c in ids if not c.role]
        if not pool:
            continue
        best = max(pool, key=lambda c: (*rank(c), c.has_id_word, -len(c.words)))
        rivals = [c for c in pool if c is not best and rank(c) == rank(best)]
        questions += [f"or {c.name}?" for c in rivals]
        if not best.is_complete:
            questions.append("rows without it are rejected; another column?")
        setattr(roles, role, best)
        best.doubts = questions
    return roles
