"""Offline stand-ins for online metrics: logged searches replayed under a model's ranking. Estimates, not measurements.

    python -m papers.replay --checkpoint runs/qgs --tables TABLES --text TEXT --base runs/base

QGS reports CTR, click-search ratio and dwell per page of an A/B test (Table 5). Here the same results are put in
the model's order and logged clicks are weighted. With the position-based click model (a click is a look, whose
chance theta depends on the position alone, times an interest that depends on the result alone; clicks of a search
are independent given the order), a result moved from position p to k would be clicked theta_k / theta_p times as
often. So with w = theta_new / theta_logged of each result and c its click,

* CTR: sum of w c over searches, by the number of results on their first pages;
* click-search ratio: mean over searches of 1 - prod(1 - w c): the product's mean is the chance of no click;
* dwell per page: mean over searches of sum of w c dwell, in ms.

Each is unbiased under that model with the true theta. The places of a request are the positions that it was logged
with; a result below the page has theta 0, and equal scores share the mean theta of their places. Models do not see
the logged position (`models/search/position.py`). What biases the estimates: theta is taken as
the click rate by position in the training split, which is right where the log's order says nothing of the results
(simulated logs), and too steep where the logging ranker put better ones first (results moved up then look better than
they are); a click is never seen on what was not shown; results influence each other (where every search has just one
click, a ratio can pass 1); users change with the ranking. On a page that holds all results every order is worth
nearly the same: choose a shorter one (`--page 3`).

Intervals are 95% percentiles of a bootstrap over users, the same resamples for model and base.

Shapes: `R` requests, `N` results of all requests, `P` positions, `U` users, `M` sums of a user.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from jobs import cli
from models.config import check_positive
from models.fit import to_device
from models.places import reach
from models.retrieval.data import request_number
from models.scores import check_finite
from models.search.data import read_part
from models.shares import runs, starts
from models.tables import UserError, iter_parts, join, sequences_manifest
from models.uri import write_file
from papers.loaded import Loaded, Options, load

Floats = NDArray[np.float64]

DWELL = "label_dwell_ms"
"""Column of behaviours that dwell per page needs."""

LEAST_SHOWN = 100
"""A position shown less often in training takes the theta of the one above it."""

SMALLEST = 0.01
"""Smallest theta, so that no click counts more than a hundredfold."""

RESAMPLES, CHUNK = 1000, 50
"""Bootstrap resamples, and how many of them are drawn at once."""

NAMES = ("ctr", "click_search_ratio", "dwell_ms_per_page")


@dataclass(frozen=True)
class Log:
    """The requests of one split as they were logged, in the order of the table."""

    user: NDArray[np.int64]
    """(R,) row of the user in the table."""
    request: NDArray[np.int64]
    """(R,) `request_number` of each."""
    counts: NDArray[np.int64]
    """(R,) results shown."""
    position: NDArray[np.int64]
    """(N,) where each result was shown, from 0."""
    click: NDArray[np.bool_]
    """(N,) the first label."""
    dwell: Floats | None
    """(N,) ms, 0 without a click or where it is not known; None for a log without dwell times."""


@dataclass(frozen=True)
class Estimate:
    """One metric with its interval, in its own unit; of a lift, relative to the base."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Replay:
    """What a replay found."""

    page: int
    """Results on a page."""
    estimates: dict[str, Estimate]
    """By name: `ctr`, ..., and `ctr_lift`, ... over the base."""
    base: str
    """What lifts are over: `the logged order`, or the name of a model."""
    positions: int
    """Positions with a theta."""

    def metrics(self) -> dict[str, float]:
        """`replay@PAGE/ctr`, `replay@PAGE/ctr_low`, ... as MLflow takes them."""
        found = {}
        for name, estimate in self.estimates.items():
            found[f"replay@{self.page}/{name}"] = estimate.value
            found[f"replay@{self.page}/{name}_low"] = estimate.low
            found[f"replay@{self.page}/{name}_high"] = estimate.high
        return found

    def lines(self) -> list[str]:
        """What is printed."""
        lines = [
            f"  replay: estimates on logged clicks, first {self.page} results, 95% interval over users"
        ]
        for name in NAMES:
            if name in self.estimates:
                e, lift = self.estimates[name], self.estimates[f"{name}_lift"]
                form = ",.0f" if name == "dwell_ms_per_page" else ".4f"
                lines.append(
                    f"  {name:<20}{e.value:{form}} [{e.low:{form}}, {e.high:{form}}]   {lift.value:+.2%} "
                    f"[{lift.low:+.2%}, {lift.high:+.2%}] over {self.base}"
                )
        return lines


def read_log(sequences: str, split: str) -> Log:
    """The requests of a split; UserError where they have no results."""
    info = sequences_manifest(sequences, "search").info
    label = f"label_{info['labels'][0]}"
    parts: list[dict[str, Any]] = []
    users = 0
    wanted = [
        "item_index",
        "timestamp_ms",
        "query_index",
        "position",
        "features",
        "requests",
    ]
    for table in iter_parts(sequences, "sequences", None):
        if not table.num_rows:
            continue
        known = DWELL in table.column_names
        part = read_part(table.select(wanted), [label], len(info["features"]))
        chosen = np.flatnonzero(part["split"] == split)
        counts = part["counts"][chosen]
        flat = runs(part["candidate_start"][chosen], counts)
        click = part["labels"][flat, 0]
        dwell = np.zeros(len(flat))
        if known:
            owner = np.repeat(part["owner"][chosen], counts)[click]
            when, query = (
                np.repeat(part[name][chosen], counts)[click]
                for name in ("request_time", "request_query")
            )
            columns = (
                owner,
                when,
                query,
                part["candidate"][flat][click],
                part["position"][flat][click],
            )
            behaviours = (
                np.repeat(np.arange(table.num_rows), part["lengths"]),
                part["time"],
                part["query"],
                part["item"],
                table["position"].combine_chunks().flatten().to_numpy(),
            )
            times = pc.fill_null(
                table[DWELL].combine_chunks().flatten(), 0.0
            ).to_numpy()
            dwell[click] = matched(
                columns, behaviours, times, info.get("max_request_spread_ms", 0)
            )
        number = request_number(users + part["owner"][chosen], part["place"][chosen])
        parts.append(
            {
                "user": users + part["owner"][chosen],
                "request": number,
                "counts": counts,
                "position": part["position"][flat].astype(np.int64),
                "click": click,
                "dwell": dwell,
                "known": known,
            }
        )
        users += table.num_rows
    if not parts or not sum(len(part["position"]) for part in parts):
        raise UserError(
            f"the split '{split}' of {sequences} has no result to replay; choose another --split"
        )
    whole = {
        name: np.concatenate([part[name] for part in parts])
        for name in parts[0]
        if name != "known"
    }
    if not whole["position"].any() and (whole["counts"] > 1).any():
        raise UserError(
            f"{sequences} says of no result where it was shown; name the log's `position` in its mapping"
        )
    dwell = whole.pop("dwell")
    return Log(**whole, dwell=dwell if all(part["known"] for part in parts) else None)


def matched(
    keys: tuple[NDArray, ...],
    table: tuple[NDArray, ...],
    values: NDArray,
    spread: int = 0,
) -> Floats:
    """The value of each key, 0 where the table does not have it (a behaviour that was cut off).

    The second column is the time: of a request in `keys`, in `table` of a result, which may be up to `spread` later.
    """
    names = [f"k{i}" for i in range(len(keys))]
    by = [name for name in names if name != "k1"]
    left = pl.DataFrame(
        {name: key.astype(np.int64) for name, key in zip(names, keys, strict=True)}
    )
    right = pl.DataFrame(
        {name: key.astype(np.int64) for name, key in zip(names, table, strict=True)}
    )
    right = right.with_columns(value=pl.Series(values.astype(np.float64))).unique(
        subset=names, keep="first"
    )
    joined = (
        left.with_row_index("row")
        .sort("k1")
        .join_asof(
            right.sort("k1"),
            on="k1",
            by=by,
            strategy="forward",
            tolerance=spread,
            check_sortedness=False,
        )
    )
    return joined.sort("row")["value"].fill_null(0.0).fill_nan(0.0).to_numpy()


def click_rates(log: Log) -> Floats:
    """(P,) theta by position relative to the first: click rates, of rare positions that of the one above.

    None is above the one before it (isotonic regression): users look from the top, and what rises is noise.
    """
    from sklearn.isotonic import isotonic_regression

    positions = int(log.position.max()) + 1
    shown = np.bincount(log.position, minlength=positions)
    clicks = np.bincount(log.position, log.click, minlength=positions)
    rate = np.zeros(positions)
    for p in range(positions):
        rate[p] = (
            clicks[p] / shown[p]
            if shown[p] >= LEAST_SHOWN or (p == 0 and shown[p])
            else rate[max(0, p - 1)]
        )
    rate = isotonic_regression(
        rate, sample_weight=np.maximum(shown, 1), increasing=False
    )
    if not rate[0] > 0:
        raise UserError(
            "no result at the first position was clicked in training, so theta is unknown; take another log"
        )
    return np.clip(rate / rate[0], SMALLEST, None)


def new_theta(
    scores: Floats,
    counts: NDArray[np.int64],
    position: NDArray[np.int64],
    theta: Floats,
    page: int,
) -> Floats:
    """(N,) theta of the place of each result when its request's results are sorted by score, highest first.

    The places of a request are its logged positions (N,), from the top. Those from the `page`-th on have 0. Equal
    scores share the mean of their places.
    """
    request = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((-scores, request))
    place = np.arange(len(scores)) - np.repeat(starts(counts), counts)
    at = np.where(place < page, theta[position[np.lexsort((position, request))]], 0.0)
    ranked, owner = scores[order], request[order]
    new = np.ones(len(order), bool)
    new[1:] = (ranked[1:] != ranked[:-1]) | (owner[1:] != owner[:-1])
    tie = np.cumsum(new) - 1
    mean = np.bincount(tie, at) / np.bincount(tie) if len(tie) else at
    found = np.empty(len(scores))
    found[order] = mean[tie]
    return found


def user_sums(
    log: Log, scores: Floats, theta: Floats, page: int
) -> tuple[NDArray[np.int64], Floats]:
    """Users, and their sums (U, M): results on pages, requests, weighted clicks, searches with a click, dwell."""
    weight = (
        new_theta(scores, log.counts, log.position, theta, page)
        / theta[log.position]
        * log.click
    )
    request = np.repeat(np.arange(len(log.counts)), log.counts)
    total = len(log.counts)
    none = np.ones(total)
    np.multiply.at(none, request, 1 - weight)
    dwell = (
        np.zeros(total)
        if log.dwell is None
        else np.bincount(request, weight * log.dwell, minlength=total)
    )
    columns = [
        np.minimum(log.counts, page),
        log.counts > 0,
        np.bincount(request, weight, minlength=total),
        1 - none,
        dwell,
    ]
    users, place = np.unique(log.user, return_inverse=True)
    return users, np.stack(
        [np.bincount(place, column, minlength=len(users)) for column in columns], 1
    )


def estimates_of(sums: Floats) -> Floats:
    """(..., 3): the metrics of `NAMES` from sums (..., M)."""
    shown, searches, clicks, clicked, dwell = np.moveaxis(sums, -1, 0)
    return np.stack([clicks / shown, clicked / searches, dwell / searches], -1)


def bootstrap(
    mine: Floats,
    base: Floats,
    seed: int,
    with_dwell: bool = True,
    resamples: int = RESAMPLES,
) -> dict[str, Estimate]:
    """Metrics and their lifts over the base, from user sums (U, M) of both."""
    rng = np.random.default_rng(seed)
    users = len(mine)
    both = np.concatenate([mine, base], 1)
    drawn = []
    for begin in range(0, resamples, CHUNK):
        times = rng.multinomial(
            users, np.full(users, 1 / users), size=min(CHUNK, resamples - begin)
        )
        drawn.append(times @ both)
    sums = np.concatenate([both.sum(0)[None], *drawn])  # the first row is no resample
    own, other = (estimates_of(part) for part in np.split(sums, 2, axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        lift = own / other - 1
    found = {}
    for i, name in enumerate(NAMES if with_dwell else NAMES[:2]):
        for suffix, values in (("", own[:, i]), ("_lift", lift[:, i])):
            low, high = np.percentile(values[1:], [2.5, 97.5])
            found[name + suffix] = Estimate(float(values[0]), float(low), float(high))
    return found


def scores_of(loaded: Loaded, log: Log, batch_size: int) -> Floats:
    """(N,) score of every result of the log, in the log's order; of the first label."""
    scores = np.full(len(log.position), np.nan)
    first = starts(log.counts)
    with torch.no_grad():
        for rows in loaded.examples.batches(batch_size):
            batch = loaded.examples.collate(rows)
            found = (
                check_finite(loaded.model.score(to_device(batch, loaded.device))[:, 0])
                .double()
                .cpu()
                .numpy()
            )
            place = np.searchsorted(log.request, batch["request"].numpy())
            scores[runs(first[place], log.counts[place])] = found
    if np.isnan(scores).any():
        raise UserError(
            f"the model '{loaded.name}' gives a score that is no number; train with a lower learning rate"
        )
    return scores


@dataclass(kw_only=True)
class Config(Options):
    """Options."""

    text: str | None = None
    """TEXT: the folder that jobs.encode made."""
    base: str | None = None
    """Checkpoint or run that lifts are over; by default the order in which the log showed results."""
    page: int = 10
    """Results on a page."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ["page"])


def run(config: Config) -> Replay:
    """Replays the split, prints the estimates and writes them beside the checkpoint."""
    reach(checkpoint=config.checkpoint, tables=config.tables, text=config.text)
    sequences = join(config.tables, "sequences")
    log = read_log(sequences, config.split)
    theta = click_rates(read_log(sequences, "train"))
    theta = np.concatenate(
        [theta, np.full(max(0, int(log.position.max()) + 1 - len(theta)), theta[-1])]
    )
    where: dict[str, Any] = {
        "text": config.text,
        "split": config.split,
        "device": config.device,
    }
    loaded = load(config.checkpoint, config.tables, **where)
    other, base_scores = "the logged order", -log.position.astype(np.float64)
    if config.base:
        base = load(config.base, config.tables, **where)
        other, base_scores = base.name, scores_of(base, log, config.batch_size)
    _, mine = user_sums(
        log, scores_of(loaded, log, config.batch_size), theta, config.page
    )
    _, theirs = user_sums(log, base_scores, theta, config.page)
    found = Replay(
        config.page,
        bootstrap(mine, theirs, 0, log.dwell is not None),
        other,
        len(theta),
    )
    print(f"{loaded.name} on {config.split}")
    print("\n".join(found.lines()))
    place = join(loaded.uri, f"replay-{config.split}.json")
    write_file(place, json.dumps(found.metrics(), indent=2).encode())
    print(f"  written to  {place}")
    return found


if __name__ == "__main__":
    cli.main(run, Config)
