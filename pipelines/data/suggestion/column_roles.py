"""Determine the roles of the columns of an unknown log from names and first values.

`pipelines/data/suggestion/suggest.py` writes a suggested mapping from these roles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from pipelines.data.reading.rows import clean_ids
from pipelines.data.reading.times import LIKELY_MS, Time, parse_times

WORDS = {
    "user": (
        "user|uid$|u$|customer|member|visitor|account|reviewer|client|buyer|viewer"
        "|kund|käufer|mitglied|usuario|yong|cust$|household|shopper|subscriber"
        "|listener|player|patient|passenger|consumer|panelist"
    ),
    "item": (
        "items?$|itemid|iid$|i$|article|artikel|product|produkt|prod$|prd$|movie"
        "|video|news$|asin|sku|track|song|book|meta$|catalog|venue|poi$|business"
        "|restaurant|hotel|listing|recipe|anime|artist|goods|isbn|ean$|upc$|gtin$"
        "|podcast|episode|place$|post$"
    ),
    "request": "request|impression|search|session|page|qid$",
    "query": "query|keyword|search(term|string|phrase|text)|suchbegriff",
    "position": "position|rank$|pos$",
    "time": (
        "time|ts$|t$|dat(e|um|etime)?$|zeit|when|created|at$|day$|fecha|hour|clock"
        "|uhr|order$|index|step|seq"
    ),
    "late": (
        "birth|dob$|born|deliver|ship|expir|valid|updat|modif|regist|return|releas"
        "|upload|signup|joined|since|launch|end$|ended|first|last|due$|geb|liefer"
        "|ablauf|nacim|naiss"
    ),
    "outcome": (
        "rating|stars?$|score|overall|click|like|purchas|bought|buy|cart(?!oon"
        "|ridge)|quantit|qty|menge|anzahl|cantid|dwell|watch(?!list)|play(?!list)"
        "|stay|view|pv$|fav|follow|comment|forward|share|hate|hide|vote|transaction"
        "|revenue|sales|spen[dt]|paid|gmv|profit|conver(?!sation)|refund|skip"
        "|complet|finish|reward|umsatz"
    ),
    "amount": (
        "price|cost|preis|precio|prix|duration|seconds|minutes|length|weight"
        "|gewicht|dauer|width|height|discount|amount|tax$|fee$|balance|age$"
        "|temperature|altitude|elevation|lat$|latitude|lon$|long$|lng$|longitude"
        "|coord"
    ),
    "attribute": (
        "categ|type$|brand|colou?r|groups?$|class$|genre|depart|segment|status"
        "|level$|tier|count|size$|lang|city$|gender|agent|feature|year|position"
        "|pos$|rank$"
    ),
    "computed": (
        "propens|prob$|probab|predict|pred$|estimat|logit|pscore|pctr|pcvr|confiden"
        "|similar|relevan|p$"
    ),
    "supplier": (
        "seller|supplier|vendor|merchant|channel|author|creator|publisher|uploader"
        "|owner|provider|advertiser|driver|store|shop|brand|manufacturer|campaign"
    ),
    "beside": "index|sids?$|codes$|readme|licen|hist|past|previous",
}
"""Regex per role that matches the beginning of words in names ($: the whole word)."""
DAYS = (
    "%d.%m.%Y",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%m-%d-%Y",
    "%d-%m-%Y",
    "%Y/%m/%d",
    "%Y-%m-%d",
    "%d.%m.%y",
    "%m/%d/%y",
    "%d/%m/%y",
    "%d-%b-%Y",
    "%d %b %Y",
    "%d %B %Y",
    "%b %d, %Y",
    "%B %d, %Y",
)
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p")
FORMATS = [day + clock for day in DAYS for clock in CLOCKS]


NUMBER = r"[+-]?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:[eE][+-]?\d+)?"
MEASURE = (
    rf"^[^\w.,+-]*(?:[A-Za-z]{{1,6}}\W{{0,2}})?{NUMBER}"
    rf"(?:[\s,;]+{NUMBER})*[^\d.,]{{0,8}}$"
)
"""Regex of numbers with a unit or punctuation, such as `40.7, -74.0` or `$12`."""

NEARLY_ALL = 0.99
"""Share of rows that counts as nearly all; the others may be malformed."""

ID_WORDS = ("id", "ids", "no", "nr", "key", "number", "nummer", "token")


def split_name(name: str) -> list[str]:
    """Return the words of a name in lower case, split at punctuation and camel case."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()
    # the id of a query identifies a request
    name = re.sub(r"query[\W_]?id", "qid id", name)
    return re.findall(r"[^\W\d_]+", name)


def names_id(name: str) -> bool:
    """Return whether a name contains a word for ids, such as `key`."""
    return any(word in ID_WORDS for word in split_name(name))


def ends_in_id_word(name: str) -> bool:
    """Return whether the last word of a name is a word for ids: true for `play_id`."""
    return any(word in ID_WORDS for word in split_name(name)[-1:])


def names_subject(name: str) -> bool:
    """Return whether a name has a word besides `id`: true for `store_id`."""
    words = [word for word in split_name(name) if word not in ID_WORDS]
    return any(len(word) > 1 for word in words)


def is_attribute(name: str) -> bool:
    """Return whether a name names a property, such as `category` or `color`."""
    return any(re.match(WORDS["attribute"], word) for word in split_name(name))


def role_score(name: str, role: str) -> int:
    """Return how strongly a name indicates a role, 0 if it does not.

    Args:
        name: Name of a column or of a file.
        role: Key of WORDS.
    """
    words = split_name(name)
    matches = matching_words(words, role)
    if role == "outcome" and not is_outcome(words, matches):
        return 0
    if role in ("user", "item") and is_attribute(name):
        return 0
    ids = sum(word in ID_WORDS for word in words)
    return max(1, 9 + 2 * ids + len(matches) - len(words)) if matches else 0


def matching_words(words: list[str], role: str) -> list[str]:
    """Return the words of a name that indicate a role.

    Agent nouns such as `buyer` or `voter` indicate a user, not an outcome. But counts,
    such as `viewer_count` or `followers`, are outcomes.

    Args:
        words: Words of the name.
        role: Key of WORDS.
    """
    matches = [word for word in words if re.match(WORDS[role], word)]
    if any(word.startswith(("count", "total")) for word in words):
        return matches
    if role in ("outcome", "item"):
        return [word for word in matches if not re.search("(er|or)$", word)]
    if role == "user":
        agents = [word for word in words if re.search("(er|or)$", word)]
        for word in agents:
            if word not in matches and re.match(WORDS["outcome"], word):
                matches.append(word)
    return matches


def names_actor(name: str) -> bool:
    """Return whether the last word of an outcome's name is a user or an item.

    This is true for `purchased_product_id`, but not for `product_rating`, nor for a
    plural such as `clicked_items`, which is a list or a number.
    """
    if "ids" in split_name(name) or is_attribute(name):
        return False
    words = [word for word in split_name(name) if word not in ID_WORDS]
    last = words[-1:]
    if any(re.search("(?<!new)(?<!good)(?<!busines)s$", word) for word in last):
        return False
    return any(matching_words(last, role) for role in ("user", "item"))


def is_outcome(words: list[str], matches: list[str]) -> bool:
    """Return whether a name stands for an outcome of the event.

    Propensities and predicted clicks are not outcomes, as they are computed before the
    event. The same holds for scores, unless a user gives them in a review.

    Args:
        words: Words of the name.
        matches: Words among them that indicate an outcome.
    """
    is_computed = any(re.match(WORDS["computed"], word) for word in words)
    if is_computed and len(words) > 1:
        return False
    review_words = ("review", "user", "item", "my", "overall", "rating", "score")
    only_scores = all(word.startswith("score") for word in matches)
    return not only_scores or all(word.startswith(review_words) for word in words)


def pick_column(columns: list[Column], role: str) -> Any:
    """Return the column that most likely has a role, or None.

    Columns with few missing values precede the others, whatever their names.
    """
    return max(
        (c for c in columns if role_score(c.name, role)),
        key=lambda c: (c.is_complete, role_score(c.name, role)),
        default=None,
    )


def make_feature_name(name: str) -> str:
    """Convert the name of a column to a valid name of a feature."""
    plain = re.sub(r"\W+", "_", re.sub(r":\w+$", "", name), flags=re.ASCII).strip("_")
    if re.match("[A-Za-z]", plain):
        return plain
    return f"x_{plain or name.encode().hex()}"


class Column:
    """First values of a column, and their properties."""

    def __init__(self, name: str, values: pl.Series) -> None:
        """Examine a column.

        Args:
            name: Name in the file.
            values: First values.
        """
        self.sql = '"' + name.replace('"', '""') + '"'
        """The column within SQL expressions."""
        with suppress(pl.exceptions.PolarsError):
            if pl.sql_expr(name).meta.root_names() == [name]:
                self.sql = name
        self.name = name if re.fullmatch(r"[^()'\"|]+", name) else self.sql
        """The column as a key's value in a mapping."""
        self.feature_name = make_feature_name(name)
        rows, values = len(values), values.drop_nulls()
        self.values = values
        """Values without nulls."""
        is_flat = not values.dtype.is_nested() and not values.dtype.is_temporal()
        ids = pl.Series([], dtype=pl.String)
        if is_flat:
            ids = clean_ids(values).drop_nulls()
        self.ids = ids
        """Values as ids; empty for lists, structs and times."""
        self.is_complete = len(ids) >= NEARLY_ALL * rows
        """Whether nearly all rows have an id."""
        self.distinct = ids.n_unique()
        """Number of distinct ids."""
        self.distinct_share = self.distinct / max(len(ids), 1)
        self.identifies_events = self.distinct_share >= NEARLY_ALL
        """Whether nearly every row has an id of its own."""
        self._describe_numbers()
        is_bool = self.mostly_matches("^(0|1|(?i:true|false))$")
        self.is_flag = 0 < self.distinct <= 2 and is_bool
        """Whether the values are 0 and 1, or true and false."""
        has_few_values = self.distinct <= 50 and self.distinct_share <= 0.5
        self.is_category = self.distinct > 1 and (
            self.distinct_share < 0.2 or has_few_values
        )
        """Whether the values repeat so often that they may be a categorical feature."""
        examples = values.head(200).unique(maintain_order=True) if is_flat else values
        self.examples = " | ".join(
            " ".join(str(value).split())[:40] for value in examples.head(3).to_list()
        )
        """Up to three values, for comments of the mapping."""
        self.time_keys: dict[str, str] = {}
        """Unit or format as keys of `time`; empty if the values are not times."""
        self.time_doubt = ""
        if len(values):
            self.time_keys, self.time_doubt = self.find_time()
        default_day = "%Y-%m-%d" if self.mostly_matches(r"^\d{4}-\d\d-\d\d$") else "%H"
        self.day_format = self.time_keys.get("format", default_day)
        """Format of the times; it has %H if they include a time of day."""
        self.list_sql = ""
        """SQL of a list of ids; empty if the values are not lists."""
        self.item_lists: Any = None
        """Values as lists of ids, or None."""
        if len(values) and not self.time_keys and not self.has_decimal_comma:
            self.list_sql, self.item_lists = self.find_list()

    def _describe_numbers(self) -> None:
        """Set the properties of numbers."""
        commas = int(self.ids.str.contains(",").sum())
        has_commas = commas > len(self.ids) / 2
        self.has_decimal_comma = self.mostly_matches(r"^-?\d+(,\d+)?$") and has_commas
        is_plain_number = self.mostly_matches(r"^[+-]?\d+(\.\d+)?([eE][+-]?\d+)?$")
        self.is_number = self.has_decimal_comma or is_plain_number
        self.is_integer = self.mostly_matches(r"^-?\d+$")
        self.is_measurement = self.detect_measurement()
        self.number_sql = self.name
        """Column, or SQL that converts the decimal comma."""
        if self.has_decimal_comma:
            self.number_sql = f"cast(replace({self.sql}, ',', '.') as double)"

    def mostly_matches(self, pattern: str) -> bool:
        """Return whether nearly all ids match a regex."""
        if not len(self.ids):
            return False
        matching = int(self.ids.str.contains(pattern).sum())
        return matching >= NEARLY_ALL * len(self.ids)

    def detect_measurement(self) -> bool:
        """Return whether values are decimals, coordinates, durations or signed numbers.

        Ids never look like this.
        """
        ids = self.ids
        if not len(ids):
            return False
        if self.is_number or self.mostly_matches(f"^{NUMBER}$"):
            fractions = int(ids.str.contains(r"[.,eE]").sum())
            if self.is_integer and names_id(self.name):
                fractions = 0  # fewer than 1% of the ids are malformed
            plus = int(ids.str.starts_with("+").sum())
            negative = int(ids.str.contains(r"^-\d{1,6}$").sum())
            negative -= int((ids == "-1").sum())  # -1 often stands for a missing id
            return fractions > 0 or plus > 0 or negative > 0.01 * len(ids)
        if self.mostly_matches(r"^[+-]?\d+:[\d:.]+$"):
            return True
        decimals = int(ids.str.contains(r"\d[.,]\d").sum()) > len(ids) / 2
        units = ids.head(500).str.replace_all(r"[^A-Za-z]", "").n_unique()
        return decimals and units <= 4 and self.mostly_matches(MEASURE)

    @property
    def may_be_id(self) -> bool:
        """Whether the name and the values fit ids of users or items."""
        is_outcome_name = role_score(self.name, "outcome") > 0 and (
            self.is_flag or not names_actor(self.name)
        )
        is_amount_name = role_score(self.name, "amount") > 0
        return self.has_ids and not is_outcome_name and not is_amount_name

    @property
    def has_ids(self) -> bool:
        """Whether the values, ignoring the name, may be ids of users or items."""
        is_other = self.has_decimal_comma or bool(self.list_sql) or self.is_measurement
        return self.distinct > 1 and not is_other

    @property
    def names_other_time(self) -> bool:
        """Whether the name indicates a time other than the event time, like a birth."""
        return bool(role_score(self.name, "late"))

    def find_time(self) -> tuple[dict[str, str], str]:
        """Determine the notation of times.

        Returns:
            The unit or format, as keys of `time`, and a doubt about it. The dict is
            empty if the values are not times.
        """
        if self.is_number and self.names_other_ids:
            return {}, ""
        kind, values = self.values.dtype, self.values.head(500)
        notations = ["iso"] if kind in (pl.Date, pl.Datetime) else []
        if self.is_number and not self.has_decimal_comma:
            notations += ["s", "ms", *self.fine_units(), "%Y%m%d"]
        if kind == pl.String and self.mostly_matches(
            r"^[\w ,:]{0,12}\d[\w.+:, /-]{5,30}$"
        ):
            notations += ["iso", *FORMATS]
        fits: dict[str, pl.Series] = {}
        for notation in notations:
            if "%" in notation:
                time = Time("t", format=notation)
            else:
                time = Time("t", unit=notation)
            with suppress(TypeError):
                parsed, _ = parse_times(values, time, "t")
                is_likely = parsed.drop_nulls().is_between(*LIKELY_MS).all()
                few_missing = parsed.null_count() <= 0.02 * len(parsed)
                if few_missing and (is_likely or not self.is_number):
                    fits[notation] = parsed
        if not fits:
            return {}, ""
        notation, first = next(iter(fits.items()))
        is_unambiguous = all(parsed.equals(first) for parsed in fits.values())
        doubt = "" if is_unambiguous else "day or month first? "
        return {"format" if "%" in notation else "unit": notation}, doubt

    @property
    def names_other_ids(self) -> bool:
        """Whether the name indicates that numbers are ids instead of times."""
        has_id_role = any(
            role_score(self.name, role) for role in ("user", "item", "request")
        )
        return names_id(self.name) or (
            has_id_role and not role_score(self.name, "time")
        )

    def fine_units(self) -> list[str]:
        """Return the units below a millisecond that numbers may have.

        Ids that are generated from a clock look like times in nanoseconds. Unlike most
        times, they are not multiples of 1000.
        """
        numbers = self.ids.cast(pl.Int64, strict=False).drop_nulls()
        round_numbers = bool(((numbers % 1000) == 0).all())
        return ["us", "ns"] if role_score(self.name, "time") or round_numbers else []

    def find_list(self) -> tuple[str, Any]:
        """Determine whether values are lists of ids.

        Returns:
            SQL of the lists, and the lists of text. They are "" and None if the values
            are not lists.
        """
        kind = self.values.dtype
        if isinstance(kind, pl.List):
            if kind.inner.is_integer() or kind.inner == pl.String:
                return self.name, self.values.cast(pl.List(pl.String))
            return "", None
        for delimiter in " ,|;" if kind == pl.String else "":
            lists = self.values.str.split(delimiter)
            is_id = lists.explode().str.contains(r"^[\w:-]*\d[\w:-]*$")
            long_enough = (lists.list.len() > 1).sum() >= len(lists) / 2
            if long_enough and is_id.sum() >= 0.95 * len(is_id):
                return f"string_to_array({self.sql}, '{delimiter}')", lists
        return "", None


@dataclass
class Roles:
    """The columns of users, items and times of a log, and doubts about these roles."""

    user: Column | None
    item: Column | None
    listed: Column | None
    """Column with a list of items per row, instead of `item`."""
    times: list[Column]
    """Columns that may be the time of the event, the likeliest first."""
    sure: int
    """Number of roles (user, item) that a name or other files confirm, 0 to 2."""
    user_doubts: list[str] = field(default_factory=list)
    item_doubts: list[str] = field(default_factory=list)
    time_doubts: list[str] = field(default_factory=list)


Shares = dict[str, dict[str, float]]
"""Share of the ids of a column that are in a file of users or items, by role ("user" or
"item") and column."""

MIN_EVIDENCE = 0.5
"""Share of a column's ids in a file of users or items above which the file confirms the
role of the column."""
MIN_LEAD = 0.3
"""Lead over the shares of other columns from which on a file confirms the role of an
unnamed column."""
SIMILAR_SHARE = 0.05
"""Largest difference between two shares of ids in files that count as about equal."""


def choose_roles(columns: list[Column], rows: int, shares: Shares) -> Roles:
    """Choose the columns of users, items and times of a log, and note doubts.

    Args:
        columns: Columns of the log.
        rows: Approximate number of examined rows of the log.
        shares: Shares of the columns' ids in other files.
    """
    times = sort_times(columns)
    # numbers that look like times may be ids if another column is a likelier time
    may_be_ids = [
        c for c in times[1:] if c.is_number and not role_score(c.name, "time")
    ]
    ids = [c for c in columns if c.may_be_id and (not c.time_keys or c in may_be_ids)]
    lists = [c for c in columns if c.list_sql and not role_score(c.name, "outcome")]
    lists.sort(key=lambda c: bool(role_score(c.name, "beside")))
    if lists:  # next to a list of items, `clicked_item` is an element of the list
        ids = [c for c in ids if not role_score(c.name, "outcome")]
    item = pick_named_column(ids, "item", shares)
    listed = lists[0] if lists and not (item and item.is_complete) else None
    item = None if listed else item
    users = [c for c in ids if c is not item]
    user = pick_named_column(users, "user", shares) or pick_column(users, "request")
    roles = Roles(user, item, listed, times, 0)
    unnamed = find_unnamed_ids(users, roles)
    misnamed = find_misnamed_ids(columns, ids)
    if roles.item is None and listed is None:
        roles.item = take_likeliest(unnamed, "item", shares, roles.user is None)
    if roles.user is None:
        roles.user = take_likeliest(unnamed, "user", shares, False)
    is_user_sure = user is not None or is_confirmed(roles.user, "user", ids, shares)
    is_item_named = item is not None or listed is not None
    is_item_sure = is_item_named or is_confirmed(roles.item, "item", ids, shares)
    roles.sure = is_user_sure + is_item_sure
    others = unnamed + misnamed
    if roles.user:
        roles.user_doubts = list_id_doubts(roles, "user", ids, others, rows, shares)
    if roles.item:
        roles.item_doubts = list_id_doubts(roles, "item", ids, others, rows, shares)
    if listed:
        other_lists = [c.name for c in lists[1:] if not role_score(c.name, "beside")]
        roles.item_doubts = [f"or the list {name}?" for name in other_lists]
    roles.time_doubts = list_time_doubts(roles.times)
    return roles


def pick_named_column(ids: list[Column], role: str, shares: Shares) -> Column | None:
    """Return the likeliest column whose name indicates a role, or None.

    Args:
        ids: Columns that may be ids.
        role: "user" or "item".
        shares: Shares of the columns' ids in other files.
    """
    named = [c for c in ids if role_score(c.name, role)]

    def rank(c: Column) -> tuple[bool, bool, bool, int]:
        described = shares[role].get(c.name, 0) >= MIN_EVIDENCE
        return (
            c.is_complete,
            described,
            not c.identifies_events,
            role_score(c.name, role),
        )

    return max(named, key=rank, default=None)


def find_misnamed_ids(columns: list[Column], ids: list[Column]) -> list[Column]:
    """Return ids whose names also say an outcome or an amount, such as `play_id`.

    Args:
        columns: Columns of the log.
        ids: Columns among them whose names and values fit ids.
    """
    return [
        c
        for c in columns
        if c not in ids
        and c.has_ids
        and not c.time_keys
        and not c.is_flag
        and not c.identifies_events
        and ends_in_id_word(c.name)
    ]


def find_unnamed_ids(ids: list[Column], roles: Roles) -> list[Column]:
    """Return columns that may be users or items, the likeliest first.

    Args:
        ids: Columns that may be ids.
        roles: Roles that are chosen by name.
    """
    candidates = [
        c
        for c in ids
        if c is not roles.user
        and not c.is_flag
        and not role_score(c.name, "query")
        and not role_score(c.name, "position")
    ]
    candidates = [c for c in candidates if not c.identifies_events or roles.listed]

    def rank(c: Column) -> tuple[bool, bool, bool]:
        supplies = roles.user is None and bool(role_score(c.name, "supplier"))
        # few distinct values indicate a category
        return is_attribute(c.name), supplies, c.distinct <= 20

    return sorted(candidates, key=rank)


def take_likeliest(
    unnamed: list[Column], role: str, shares: Shares, leave_one: bool
) -> Column | None:
    """Remove and return the likeliest column of a role, or None.

    Args:
        unnamed: Columns that may be users or items, the likeliest first.
        role: "user" or "item".
        shares: Shares of the columns' ids in other files.
        leave_one: Whether to skip the first column if no file confirms the role: the
            first column is the user then, and the item follows.
    """
    confirmed = [c for c in unnamed if is_confirmed(c, role, unnamed, shares)]
    candidates = confirmed or unnamed[leave_one:]
    if not candidates:
        return None
    unnamed.remove(candidates[0])
    return candidates[0]


def is_confirmed(
    column: Column | None, role: str, others: Sequence[Column], shares: Shares
) -> bool:
    """Return whether other files confirm the role of a column.

    They do if they have most ids of this column, and clearly fewer of other columns.

    Args:
        column: The column, or None.
        role: "user" or "item".
        others: Columns to compare with.
        shares: Shares of the columns' ids in other files.
    """
    if column is None:
        return False
    share = shares[role].get(column.name, 0)
    other_shares = [shares[role].get(c.name, 0) for c in others if c is not column]
    lead = share - max(other_shares, default=0)
    return share >= MIN_EVIDENCE and lead >= MIN_LEAD


def list_id_doubts(
    roles: Roles,
    role: str,
    ids: list[Column],
    unnamed: list[Column],
    rows: int,
    shares: Shares,
) -> list[str]:
    """Return doubts about the column that was chosen for users or items.

    Args:
        roles: Chosen columns.
        role: "user" or "item".
        ids: Columns that may be ids.
        unnamed: Columns of ids whose names do not indicate a role.
        rows: Approximate number of examined rows of the log.
        shares: Shares of the columns' ids in other files.
    """
    other = "item" if role == "user" else "user"
    column: Column = getattr(roles, role)
    counterpart: Column | None = getattr(roles, other)
    doubts = []
    ids = [c for c in ids if c not in (column, counterpart)]
    if role_score(column.name, role) or (
        role == "user" and role_score(column.name, "request")
    ):
        rivals = [c for c in ids if is_rival_by_name(c, column, role)]
        share = shares[role].get(column.name, 0)
        limit = max(share + SIMILAR_SHARE, MIN_EVIDENCE)
        rivals += [
            c for c in ids if c not in rivals and shares[role].get(c.name, 0) > limit
        ]
        if rivals:
            doubts.append(f"or {role}: {list_names(rivals)}?")
    elif not is_confirmed(
        column, role, [*unnamed, *filter(None, [counterpart])], shares
    ):
        doubts += list_unnamed_doubts(roles, column, role, unnamed)
    if column.distinct < 5 and rows > 100:
        doubts.append(f"{role}s of only {column.distinct} values?")
    if not column.is_complete:
        article = "a" if role == "user" else "an"
        doubts.append(f"rows without {article} {role} are rejected; another column?")
    return doubts


def list_unnamed_doubts(
    roles: Roles, column: Column, role: str, unnamed: list[Column]
) -> list[str]:
    """Return doubts about a column whose name does not indicate its role.

    Args:
        roles: Chosen columns.
        column: The column that was chosen for `role`.
        role: "user" or "item".
        unnamed: Columns of ids whose names do not indicate a role.
    """
    other = "item" if role == "user" else "user"
    counterpart: Column | None = getattr(roles, other)
    rivals = [c for c in unnamed if c.distinct > min(20, column.distinct / 2)]
    if rivals:
        return [f"no name tells; or {role}: {list_names(rivals)}?"]
    if counterpart and not roles.sure and not role_score(counterpart.name, other):
        return [f"no name tells; or {role}: {counterpart.name}?"]
    if role == "user" and role_score(column.name, "supplier"):
        return ["its name says who offers items; is it the user?"]
    has_generated_name = re.fullmatch(r"c\d+", column.name) is not None
    names_only_id = names_id(column.name) and not is_attribute(column.name)
    if has_generated_name or names_only_id:
        return []
    return [f"no name says {role}; is it?"]


def is_rival_by_name(c: Column, column: Column, role: str) -> bool:
    """Return whether the name of a column fits a role about as well as a chosen one.

    Args:
        c: Column that may be a rival.
        column: Column that was chosen for the role.
        role: "user" or "item".
    """
    difference = role_score(column.name, role) - role_score(c.name, role)
    if (
        not role_score(c.name, role)
        or not c.is_complete
        or difference > 1
        or c.distinct < 5
    ):
        return False
    if difference == 1 and c.distinct <= column.distinct / 2:
        return False  # a coarser id, such as that of a category
    if c.identifies_events and not column.identifies_events:
        return False
    if len(c.ids) != len(column.ids):
        return True
    pairs = pl.DataFrame({"a": c.ids, "b": column.ids}).n_unique()
    is_equivalent = pairs == c.distinct == column.distinct
    return not is_equivalent


def list_names(columns: Sequence[Column]) -> str:
    """Join the names of the first three columns."""
    return ", ".join(c.name for c in columns[:3])


def sort_times(columns: list[Column]) -> list[Column]:
    """Return the columns of times, the likeliest time of events first."""

    def rank(c: Column) -> tuple[bool, bool, bool, float]:
        named = bool(role_score(c.name, "time"))
        # numbers that repeat may be ids, which look like times
        repeats = 0.0 if named else -c.distinct_share
        return c.names_other_time, "%H" not in c.day_format, not named, repeats

    return sorted((c for c in columns if c.time_keys), key=rank)


def list_time_doubts(times: list[Column]) -> list[str]:
    """Return doubts about the first of the columns of times.

    Other columns that may be the time are named, unless they differ by about a day.
    """
    if not times:
        return []
    best, *others = times
    doubts = [best.time_doubt.strip()] if best.time_doubt else []
    rivals = [c for c in others if best.names_other_time or not c.names_other_time]
    if role_score(best.name, "time"):
        rivals = [c for c in rivals if role_score(c.name, "time")]
        if "%H" in best.day_format:
            rivals = [c for c in rivals if "%H" in c.day_format]
    doubts += [f"or {c.name}?" for c in rivals if not within_a_day(c, best)]
    if best.names_other_time:
        doubts.append("its name says another time than that of the event?")
    return doubts


def within_a_day(c: Column, other: Column) -> bool:
    """Return whether the first times of two columns differ by at most 36 hours."""
    if len(c.values) != len(other.values):
        return False
    times, _ = parse_times(c.values.head(500), Time("t", **c.time_keys), "t")
    other_values = other.values.head(500)
    other_times, _ = parse_times(other_values, Time("t", **other.time_keys), "t")
    difference = (times - other_times).abs().max()
    return isinstance(difference, int) and difference <= 36 * 3_600_000
