"""Roles of the columns of an unknown log, from their names and first values.

`pipelines/data/suggestion/suggest.py` writes a first mapping from them.
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

# per role: how words of names begin (with $: the whole word)
WORDS = {
    "user": "user|uid$|u$|customer|member|visitor|account|reviewer|client|buyer|viewer|kund|käufer|mitglied|usuario|"
    "yong|cust$|household|shopper|subscriber|listener|player|patient|passenger|consumer|panelist",
    "item": "items?$|itemid|iid$|i$|article|artikel|product|produkt|prod$|prd$|movie|video|news$|asin|sku|track|song|"
    "book|meta$|catalog|venue|poi$|business|restaurant|hotel|listing|recipe|anime|artist|goods|isbn|ean$|upc$|gtin$|podcast|episode|place$|post$",
    "request": "request|impression|search|session|page|qid$",
    "query": "query|keyword|search(term|string|phrase|text)|suchbegriff",
    "position": "position|rank$|pos$",
    "time": "time|ts$|t$|dat(e|um|etime)?$|zeit|when|created|at$|day$|fecha|hour|clock|uhr|order$|index|step|seq",
    "late": "birth|dob$|born|deliver|ship|expir|valid|updat|modif|regist|return|releas|upload|signup|joined|since|"
    "launch|end$|ended|first|last|due$|geb|liefer|ablauf|nacim|naiss",
    "outcome": "rating|stars?$|score|overall|click|like|purchas|bought|buy|cart(?!oon|ridge)|quantit|qty|menge|anzahl|"
    "cantid|dwell|watch(?!list)|play(?!list)|stay|view|pv$|fav|follow|comment|forward|share|hate|hide|vote|transaction|revenue|sales|spen[dt]|paid|gmv|profit|conver(?!sation)|refund|skip|complet|finish|reward|umsatz",
    "amount": "price|cost|preis|precio|prix|duration|seconds|minutes|length|weight|gewicht|dauer|width|height|"
    "discount|amount|tax$|fee$|balance|age$|temperature|altitude|elevation|"
    "lat$|latitude|lon$|long$|lng$|longitude|coord",
    "attribute": "categ|type$|brand|colou?r|groups?$|class$|genre|depart|segment|status|level$|tier|count|size$|lang|"
    "city$|gender|agent|feature|year|position|pos$|rank$",
    "computed": "propens|prob$|probab|predict|pred$|estimat|logit|pscore|pctr|pcvr|confiden|similar|relevan|p$",
    "supplier": "seller|supplier|vendor|merchant|channel|author|creator|publisher|uploader|owner|provider|advertiser|"
    "driver|store|shop|brand|manufacturer|campaign",
    "beside": "index|sids?$|codes$|readme|licen|hist|past|previous",
}
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
MEASURE = rf"^[^\w.,+-]*(?:[A-Za-z]{{1,6}}\W{{0,2}})?{NUMBER}(?:[\s,;]+{NUMBER})*[^\d.,]{{0,8}}$"
"""One number or several with a unit or punctuation around, such as `40.7, -74.0`."""

ID_WORDS = ("id", "ids", "no", "nr", "key", "number", "nummer", "token")


def split_name(name: str) -> list[str]:
    """Return the lower-case words of a column's name."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()
    # a query's id is that of a request, not its text
    name = re.sub(r"query[\W_]?id", "qid id", name)
    return re.findall(r"[^\W\d_]+", name)


def names_id(name: str) -> bool:
    """Return whether a name contains a word for an id, for example `key`."""
    return any(word in ID_WORDS for word in split_name(name))


def names_subject(name: str) -> bool:
    """Return whether a name tells the kind of an id, as `store_id` does, not `id`."""
    words = [word for word in split_name(name) if word not in ID_WORDS]
    return any(len(word) > 1 for word in words)


def is_attribute(name: str) -> bool:
    """Return whether a name is a property that several users or items share."""
    return any(re.match(WORDS["attribute"], word) for word in split_name(name))


def tell(name: str, role: str) -> int:
    """Return how strongly a name points to a role, 0 if it does not."""
    words = split_name(name)
    hits = find_hits(words, role)
    if role == "outcome" and not is_outcome(words, hits):
        return 0
    if role in ("user", "item") and is_attribute(name):
        return 0
    ids = sum(word in ID_WORDS for word in words)
    return max(1, 9 + 2 * ids + len(hits) - len(words)) if hits else 0


def find_hits(words: list[str], role: str) -> list[str]:
    """Return the words of a name that indicate a role.

    A noun for a person who acts, such as `buyer` or `voter`, indicates a user instead
    of an outcome. A count such as `viewer_count` or `followers` stays an outcome.
    """
    hits = [word for word in words if re.match(WORDS[role], word)]
    if any(word.startswith(("count", "total")) for word in words):
        return hits
    if role in ("outcome", "item"):
        return [word for word in hits if not re.search("(er|or)$", word)]
    if role == "user":
        acting = [word for word in words if re.search("(er|or)$", word)]
        hits += [
            word
            for word in acting
            if word not in hits and re.match(WORDS["outcome"], word)
        ]
    return hits


def names_actor(name: str) -> bool:
    """Return whether the last word of an outcome's name is a user or an item.

    `purchased_product_id` is an item, but `product_rating` is not. A plural, such as
    `clicked_items`, is a list or a number.
    """
    if "ids" in split_name(name) or is_attribute(name):
        return False
    words = [word for word in split_name(name) if word not in ID_WORDS]
    last = words[-1:]
    if any(re.search("(?<!new)(?<!good)(?<!busines)s$", word) for word in last):
        return False
    return any(find_hits(last, role) for role in ("user", "item"))


def is_outcome(words: list[str], hits: list[str]) -> bool:
    """Return whether words that indicate an outcome mean an outcome of the event.

    A propensity or a predicted click is computed before the event, and so is a score of
    anything but a review.
    """
    is_computed = any(re.match(WORDS["computed"], word) for word in words)
    if is_computed and len(words) > 1:
        return False
    review_words = ("review", "user", "item", "my", "overall", "rating", "score")
    only_scores = all(word.startswith("score") for word in hits)
    return not only_scores or all(word.startswith(review_words) for word in words)


def pick(columns: list[Column], role: str) -> Any:
    """Return the column whose name points most to a role, preferably without gaps."""
    return max(
        (c for c in columns if tell(c.name, role)),
        key=lambda c: (c.full, tell(c.name, role)),
        default=None,
    )


def make_feature_name(name: str) -> str:
    """Return the name of a column as a name of a feature."""
    plain = re.sub(r"\W+", "_", re.sub(r":\w+$", "", name), flags=re.ASCII).strip("_")
    if re.match("[A-Za-z]", plain):
        return plain
    return f"x_{plain or name.encode().hex()}"


class Column:
    """First values of a column without nulls, and their properties.

    `sql` is the column within expressions.
    """

    def __init__(self, name: str, values: pl.Series) -> None:
        self.sql = '"' + name.replace('"', '""') + '"'
        with suppress(pl.exceptions.PolarsError):
            if pl.sql_expr(name).meta.root_names() == [name]:
                self.sql = name
        self.name = name if re.fullmatch(r"[^()'\"|]+", name) else self.sql
        self.feature = make_feature_name(name)
        rows, values = len(values), values.drop_nulls()
        self.values = values
        is_flat = not values.dtype.is_nested() and not values.dtype.is_temporal()
        ids = pl.Series([], dtype=pl.String)
        if is_flat:
            ids = clean_ids(values).drop_nulls()
        self.ids = ids
        # rows without a user or an item are rejected
        self.full = len(ids) >= 0.99 * rows
        self.distinct = ids.n_unique()
        self.share = self.distinct / max(len(ids), 1)
        commas = int(ids.str.contains(",").sum())
        self.comma = self.most(r"^-?\d+(,\d+)?$") and commas > len(ids) / 2
        self.number = self.comma or self.most(r"^[+-]?\d+(\.\d+)?([eE][+-]?\d+)?$")
        self.whole = self.most(r"^-?\d+$")
        self.measure = self.is_measure()
        self.flag = 0 < self.distinct <= 2 and self.most("^(0|1|(?i:true|false))$")
        is_category = self.distinct <= 50 and self.share <= 0.5
        self.few = self.distinct > 1 and (self.share < 0.2 or is_category)
        self.value = self.name
        if self.comma:
            self.value = f"cast(replace({self.sql}, ',', '.') as double)"
        examples = values.head(200).unique(maintain_order=True) if is_flat else values
        self.shown = " | ".join(
            " ".join(str(value).split())[:40] for value in examples.head(3).to_list()
        )
        self.time: dict[str, str] = {}
        self.doubt = ""
        if len(values):
            self.time, self.doubt = self.find_time()
        default_day = "%Y-%m-%d" if self.most(r"^\d{4}-\d\d-\d\d$") else "%H"
        self.day = self.time.get("format", default_day)
        self.list = ""
        self.lists: Any = None
        if len(values) and not self.time and not self.comma:
            self.list, self.lists = self.find_list()

    def most(self, pattern: str) -> bool:
        """Return whether nearly all ids match a pattern."""
        if not len(self.ids):
            return False
        return int(self.ids.str.contains(pattern).sum()) >= 0.99 * len(self.ids)

    def is_measure(self) -> bool:
        """Return whether values are decimals, coordinates, durations or signed numbers.

        Such values are never ids.
        """
        ids = self.ids
        if not len(ids):
            return False
        if self.number or self.most(f"^{NUMBER}$"):
            fractions = int(ids.str.contains(r"[.,eE]").sum())
            if self.whole and names_id(self.name):
                fractions = 0  # a few damaged ids
            plus = int(ids.str.starts_with("+").sum())
            negative = int(ids.str.contains(r"^-\d{1,6}$").sum())
            negative -= int((ids == "-1").sum())  # -1 often stands for a missing id
            return fractions > 0 or plus > 0 or negative > 0.01 * len(ids)
        if self.most(r"^[+-]?\d+:[\d:.]+$"):
            return True
        decimals = int(ids.str.contains(r"\d[.,]\d").sum()) > len(ids) / 2
        units = ids.head(500).str.replace_all(r"[^A-Za-z]", "").n_unique()
        return decimals and units <= 4 and self.most(MEASURE)

    @property
    def may_be_id(self) -> bool:
        """Whether name and values fit ids of users or items."""
        outcome = tell(self.name, "outcome") and (
            self.flag or not names_actor(self.name)
        )
        says_else = outcome or tell(self.name, "amount")
        return self.has_ids and not says_else

    @property
    def has_ids(self) -> bool:
        """Whether the values, whatever the name, may be ids of users or items."""
        is_else = self.comma or bool(self.list) or self.measure
        return self.distinct > 1 and not is_else

    @property
    def late(self) -> bool:
        """Whether the name indicates another time than the event's, like a birth."""
        return bool(tell(self.name, "late"))

    def find_time(self) -> tuple[dict[str, str], str]:
        """Return the notation of times, and a doubt about it.

        The notation is a `unit` or `format`, or empty if the values are no times.
        """
        if self.number and self.names_other_ids:
            return {}, ""
        kind, values = self.values.dtype, self.values.head(500)
        notations = ["iso"] if kind in (pl.Date, pl.Datetime) else []
        if self.number and not self.comma:
            notations += ["s", "ms", *self.fine_units(), "%Y%m%d"]
        if kind == pl.String and self.most(r"^[\w ,:]{0,12}\d[\w.+:, /-]{5,30}$"):
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
                if few_missing and (is_likely or not self.number):
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
        of_whom = any(tell(self.name, role) for role in ("user", "item", "request"))
        return names_id(self.name) or (of_whom and not tell(self.name, "time"))

    def fine_units(self) -> list[str]:
        """Return the units below a millisecond that numbers may have.

        Ids that count up from a clock, such as those of posts, look like times in
        nanoseconds, but use all digits.
        """
        numbers = self.ids.cast(pl.Int64, strict=False).drop_nulls()
        round_numbers = bool(((numbers % 1000) == 0).all())
        return ["us", "ns"] if tell(self.name, "time") or round_numbers else []

    def find_list(self) -> tuple[str, Any]:
        """Return the column or SQL of a list of ids, and the lists.

        The SQL is empty and the lists are None if the values are no lists.
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
    """The columns of users, items and times of a log, and doubts about them."""

    user: Column | None
    item: Column | None
    listed: Column | None
    """Column with a list of items per row."""
    times: list[Column]
    """Columns that may be the time of the event, the likeliest first."""
    sure: int
    """Number of roles among user and item that a name or other files confirm."""
    user_doubts: list[str] = field(default_factory=list)
    item_doubts: list[str] = field(default_factory=list)
    time_doubts: list[str] = field(default_factory=list)


# by `user` or `item` and column: share of the ids that a file of users or items
# contains
Shares = dict[str, dict[str, float]]

MIN_EVIDENCE = 0.5
"""Share of a column's ids in a file of users or items that confirms its role."""


def choose_roles(columns: list[Column], rows: int, shares: Shares) -> Roles:
    """Choose the user, the item and the time of a log, and note doubts.

    Args:
        columns: Columns of the log.
        rows: Approximate number of rows of the log.
        shares: Shares of the columns' ids in the files beside the log.
    """
    times = sort_times(columns)
    # numbers that look like times, beside a likelier column, may be ids
    spare = [c for c in times[1:] if c.number and not tell(c.name, "time")]
    ids = [c for c in columns if c.may_be_id and (not c.time or c in spare)]
    lists = [c for c in columns if c.list and not tell(c.name, "outcome")]
    lists.sort(key=lambda c: bool(tell(c.name, "beside")))
    if lists:  # `clicked_item` beside a list of items is one of the list
        ids = [c for c in ids if not tell(c.name, "outcome")]
    item = pick_described(ids, "item", shares)
    listed = lists[0] if lists and not (item and item.full) else None
    item = None if listed else item
    users = [c for c in ids if c is not item]
    user = pick_described(users, "user", shares) or pick(users, "request")
    roles = Roles(user, item, listed, times, 0)
    unnamed = find_unnamed(users, roles)
    hidden = find_hidden(columns, ids)
    if roles.item is None and listed is None:
        roles.item = take_unnamed(unnamed, "item", shares, roles.user is None)
    if roles.user is None:
        roles.user = take_unnamed(unnamed, "user", shares, False)
    told = {
        role: column is not None and is_told(column, role, ids, shares)
        for role, column in (("user", roles.user), ("item", roles.item))
    }
    roles.sure = bool(user or told["user"]) + bool(item or listed or told["item"])
    if roles.user:
        roles.user_doubts = doubt_ids(
            roles, "user", ids, unnamed + hidden, rows, shares
        )
    if roles.item:
        roles.item_doubts = doubt_ids(
            roles, "item", ids, unnamed + hidden, rows, shares
        )
    if listed:
        others = [c.name for c in lists[1:] if not tell(c.name, "beside")]
        roles.item_doubts = [f"or the list {name}?" for name in others]
    roles.time_doubts = doubt_times(roles.times)
    return roles


def pick_described(ids: list[Column], role: str, shares: Shares) -> Column | None:
    """Return the column named as a role, preferably one that a file describes."""
    named = [c for c in ids if tell(c.name, role)]

    def rank(c: Column) -> tuple[bool, bool, bool, int]:
        described = shares[role].get(c.name, 0) >= MIN_EVIDENCE
        # a distinct number in each row identifies the event
        return c.full, described, c.share < 0.99, tell(c.name, role)

    return max(named, key=rank, default=None)


def find_hidden(columns: list[Column], ids: list[Column]) -> list[Column]:
    """Return columns of ids with a name of something else, for example `play_id`."""
    return [
        c
        for c in columns
        if c not in ids
        and c.has_ids
        and not c.time
        and not c.flag
        and c.share < 0.99
        and any(word in ID_WORDS for word in split_name(c.name)[-1:])
    ]


def find_unnamed(ids: list[Column], roles: Roles) -> list[Column]:
    """Return columns that may be users or items though their names do not say so, the likeliest first."""
    candidates = [
        c
        for c in ids
        if c is not roles.user
        and not c.flag
        and not tell(c.name, "query")
        and not tell(c.name, "position")
    ]
    candidates = [c for c in candidates if c.share < 0.99 or roles.listed]

    def rank(c: Column) -> tuple[bool, bool, bool]:
        supplies = roles.user is None and bool(tell(c.name, "supplier"))
        # of two columns, one of few values is less likely to be an id
        return is_attribute(c.name), supplies, c.distinct <= 20

    return sorted(candidates, key=rank)


def take_unnamed(
    unnamed: list[Column], role: str, shares: Shares, leave_one: bool
) -> Column | None:
    """Remove and return the likeliest column of a role.

    Without a file that describes it, an item follows the user if neither is named, so
    `leave_one` skips the first column.
    """
    described = [c for c in unnamed if shares[role].get(c.name, 0) >= MIN_EVIDENCE]
    described = [c for c in described if is_told(c, role, unnamed, shares)]
    candidates = described or unnamed[leave_one:]
    if not candidates:
        return None
    unnamed.remove(candidates[0])
    return candidates[0]


def is_told(
    column: Column, role: str, others: Sequence[Column], shares: Shares
) -> bool:
    """Return whether files of a role have the ids of this column, and of no other."""
    share = shares[role].get(column.name, 0)
    rest = [shares[role].get(c.name, 0) for c in others if c is not column]
    return share >= MIN_EVIDENCE and share - max(rest, default=0) >= 0.3


def doubt_ids(
    roles: Roles,
    role: str,
    ids: list[Column],
    unnamed: list[Column],
    rows: int,
    shares: Shares,
) -> list[str]:
    """Return doubts about the column chosen for users or items.

    Args:
        roles: Chosen columns.
        role: "user" or "item".
        ids: Columns that may be ids.
        unnamed: Columns without a name that indicates a role.
        rows: Approximate number of rows of the log.
        shares: Shares of the columns' ids in the files beside the log.
    """
    other = "item" if role == "user" else "user"
    column: Column = getattr(roles, role)
    counterpart: Column | None = getattr(roles, other)
    doubts = []
    ids = [c for c in ids if c not in (column, counterpart)]
    if tell(column.name, role) or (role == "user" and tell(column.name, "request")):
        rivals = [c for c in ids if rivals_by_name(c, column, role)]
        best = shares[role].get(column.name, 0)
        limit = max(best + 0.05, 0.5)
        rivals += [
            c for c in ids if c not in rivals and shares[role].get(c.name, 0) > limit
        ]
        if rivals:
            doubts.append(f"or {role}: {list_names(rivals)}?")
    elif not is_told(column, role, [*unnamed, *filter(None, [counterpart])], shares):
        doubts += doubt_unnamed(roles, column, role, unnamed)
    if column.distinct < 5 and rows > 100:
        doubts.append(f"{role}s of only {column.distinct} values?")
    if not column.full:
        article = "a" if role == "user" else "an"
        doubts.append(f"rows without {article} {role} are rejected; another column?")
    return doubts


def doubt_unnamed(
    roles: Roles, column: Column, role: str, unnamed: list[Column]
) -> list[str]:
    """Return doubts about a column whose name does not indicate its role."""
    other = "item" if role == "user" else "user"
    counterpart: Column | None = getattr(roles, other)
    rivals = [c for c in unnamed if c.distinct > min(20, column.distinct / 2)]
    if rivals:
        return [f"no name tells; or {role}: {list_names(rivals)}?"]
    if counterpart and not roles.sure and not tell(counterpart.name, other):
        return [f"no name tells; or {role}: {counterpart.name}?"]
    if role == "user" and tell(column.name, "supplier"):
        return ["its name says who offers items; is it the user?"]
    header = re.fullmatch(r"c\d+", column.name)
    is_id = header or (names_id(column.name) and not is_attribute(column.name))
    return [] if is_id else [f"no name says {role}; is it?"]


def rivals_by_name(c: Column, column: Column, role: str) -> bool:
    """Return whether the name of `c` fits a role about as well as that of `column`."""
    difference = tell(column.name, role) - tell(c.name, role)
    if not tell(c.name, role) or not c.full or difference > 1 or c.distinct < 5:
        return False
    if difference == 1 and c.distinct <= column.distinct / 2:
        return False  # a coarser id, such as that of a category
    if c.share >= 0.99 > column.share:
        return False  # distinct in each row, so the id of an event
    if len(c.ids) != len(column.ids):
        return True
    pairs = pl.DataFrame({"a": c.ids, "b": column.ids}).n_unique()
    return not pairs == c.distinct == column.distinct  # equivalent ids are no rivals


def list_names(columns: Sequence[Column]) -> str:
    """Return the names of the first three columns."""
    return ", ".join(c.name for c in columns[:3])


def sort_times(columns: list[Column]) -> list[Column]:
    """Return the columns of times, the likeliest time of the event first."""

    def rank(c: Column) -> tuple[bool, bool, bool, float]:
        named = bool(tell(c.name, "time"))
        # ids of users repeat more often than times
        repeats = 0.0 if named else -c.share
        return c.late, "%H" not in c.day, not named, repeats

    return sorted((c for c in columns if c.time), key=rank)


def doubt_times(times: list[Column]) -> list[str]:
    """Return doubts about the first of the columns of times."""
    if not times:
        return []
    best, *others = times
    doubts = [best.doubt.strip()] if best.doubt else []
    rivals = [c for c in others if best.late or not c.late]
    if tell(best.name, "time"):
        rivals = [c for c in rivals if tell(c.name, "time")]
        if "%H" in best.day:
            rivals = [c for c in rivals if "%H" in c.day]
    doubts += [f"or {c.name}?" for c in rivals if not within_a_day(c, best)]
    if best.late:
        doubts.append("its name says another time than that of the event?")
    return doubts


def within_a_day(c: Column, other: Column) -> bool:
    """Return whether two columns of times differ by little more than a day."""
    if len(c.values) != len(other.values):
        return False
    first, second = (
        parse_times(each.values.head(500), Time("t", **each.time), "t")[0]
        for each in (c, other)
    )
    apart = (first - second).abs().max()
    return isinstance(apart, int) and apart <= 36 * 3_600_000
