"""The papers' claims, decided by saved runs: holds, does not hold, not yet measured.

    python -m papers.claims [--results FILE_OR_FOLDER]

A claim is a rule in `claims.yaml`: one system against another by a metric, the effect
of a setting, or the range of a metric. It is decided on every dataset (and trie) on
which its systems were evaluated. Direction and size must both hold; the size may be
from half to double the printed range.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from benchmarks.tables import to_rows
from jobs import cli
from models.storage.tables import UserError
from papers import kept
from papers.noninferiority import non_inferiority
from papers.published import (
    CLAIMS,
    Pair,
    Papers,
    System,
    check_names,
    check_there,
    load,
    pairs,
    param_value,
)
from pipelines.comparison.load import load_rows
from pipelines.comparison.over_users import bootstrap_intervals, load_paired_metric
from pipelines.comparison.plots import group_controlled, to_number
from pipelines.comparison.rows import Row, lower_is_better, ratio
from pipelines.comparison.table import Table, percent

HOLDS, FAILS, OPEN = "holds", "does not hold", "not yet measured"

PAIR_EXPECTATIONS = ("higher", "lower", "same", "no_worse", "no_lower", "non_inferior")
"""Expectations of left against right."""

PARAM_EXPECTATIONS = ("best_in", "falls", "flat")
"""Expectations of the effect of a setting."""

MIN_SEEDS = 3
"""Pairs of runs for a test of non-inferiority, as in the paper (Table 12 of
SID-MLP)."""

SIZE_FACTOR = 2.0
"""A size holds within the printed range, widened by this factor at both ends."""


@dataclass(frozen=True)
class Claim:
    """A rule; the head of claims.yaml explains its fields."""

    id: str
    """Short name."""
    source: str
    """Paper and table."""
    says: str
    """The claim in words."""
    metric: str
    """Metric that decides the claim."""
    left: str | None = None
    """System that the claim is about."""
    right: str | None = None
    """System that it is compared with."""
    system: str | None = None
    """System of a rule about a setting or a range."""
    match: str = "settings"
    """`teacher`: right is the teacher of left; `settings`: all other settings are
    equal."""
    as_: str = "change"
    """change, points or times."""
    expect: str = "higher"
    """One of PAIR_EXPECTATIONS or PARAM_EXPECTATIONS."""
    within: float = 0.01
    """Tolerance of same, no_worse, no_lower and flat, as a share."""
    paper: tuple[float, float] | None = None
    """Smallest and largest printed size."""
    size: str = "printed"
    """any: only the direction is claimed."""
    param: str | None = None
    """Setting whose effect is claimed."""
    values: tuple[float, ...] = ()
    """Values of the setting that are claimed to be best."""
    range: tuple[float, float] | None = None
    """Claimed range of the metric."""

    def __post_init__(self) -> None:
        rules = {
            "left and right": bool(self.left and self.right),
            "param": bool(self.param),
            "range": bool(self.range),
        }
        if sum(rules.values()) != 1 or (bool(self.system) == bool(self.left)):
            raise UserError(
                f"claim {self.id}: give left and right, or a system with a param or a "
                f"range"
            )
        known = (
            PAIR_EXPECTATIONS
            if self.left
            else PARAM_EXPECTATIONS
            if self.param
            else ("higher",)
        )
        check_names([self.expect], known, f"claim {self.id}, expect")
        check_names([self.as_], ("change", "points", "times"), f"claim {self.id}, as")
        check_names([self.match], ("settings", "teacher"), f"claim {self.id}, match")


@dataclass(frozen=True)
class Verdict:
    """The decision on a claim for one dataset."""

    claim: Claim
    verdict: str
    """HOLDS, FAILS or OPEN."""
    where: str = ""
    """Experiment, with the semantic IDs if there are several."""
    ours: str = ""
    """Measured size."""
    paper: str = ""
    """Printed size."""
    why: str = ""
    """Part of the rule that decided."""
    rows: tuple[Row, ...] = field(default=(), repr=False)
    """Rows that the decision is based on."""


def read_claims(papers: Papers) -> list[Claim]:
    """Read the rules.

    Raises:
        UserError: If a rule is not valid.
    """
    claims = []
    for given in papers.claims:
        content = {"as_" if key == "as" else key: value for key, value in given.items()}
        check_names(
            content, [f.name for f in fields(Claim)], f"claim {given.get('id')}"
        )
        check_there(
            content, ("id", "source", "says", "metric"), f"claim {given.get('id')}"
        )
        for key in ("paper", "range", "values"):
            if key in content:
                content[key] = tuple(content[key])
        claims.append(Claim(**content))
    return claims


def decide(claim: Claim, rows: Sequence[Row], papers: Papers) -> list[Verdict]:
    """Decide a claim on every dataset on which it was measured.

    If there is none, the only verdict is "not yet measured".
    """
    ended = [row for row in rows if any(run.finished for run in row.runs)]
    if claim.left and claim.right:
        found = pairs(
            ended,
            papers.systems[claim.left],
            papers.systems[claim.right],
            claim.metric,
            claim.match,
        )
        verdicts = [judge_pair(claim, pair, papers) for pair in found]
    elif claim.param:
        verdicts = judge_param(claim, ended, papers.systems[str(claim.system)])
    else:
        verdicts = judge_range(claim, ended, papers.systems[str(claim.system)])
    return verdicts or [
        Verdict(claim, OPEN, paper=format_printed(claim, paper_range(claim, papers)))
    ]


def claimed_size(claim: Claim, left: float, right: float) -> float:
    """Return the claimed quantity of two metric values."""
    if claim.as_ == "points":
        return left - right
    return ratio(left, right) - (claim.as_ == "change")


def paper_range(claim: Claim, papers: Papers) -> tuple[float, float] | None:
    """Return the printed sizes, of the claim or of the published tables."""
    if claim.paper or not (claim.left and claim.right):
        return claim.paper or claim.range
    sizes = []
    for published in papers.published:
        for dataset in published.datasets:
            change = published.change(dataset, claim.left, claim.metric, claim.right)
            left, right = (
                published.value(dataset, name, claim.metric)
                for name in (claim.left, claim.right)
            )
            if change is not None and left is not None and right is not None:
                sizes.append(
                    change
                    if claim.as_ == "change"
                    else claimed_size(claim, left, right)
                )
    return (min(sizes), max(sizes)) if sizes else None


def judge_pair(claim: Claim, pair: Pair, papers: Papers) -> Verdict:
    """Compare left and right by the mean of the claimed quantity over pairs of runs.

    The verdict includes the bootstrap interval over users if a metric per user is
    saved.
    """
    left, values, rows = pair.left, pair.values(claim.metric), (pair.left, pair.right)
    size = statistics.fmean(claimed_size(claim, *both) for both in values)
    theirs = paper_range(claim, papers)
    if math.isnan(size):
        return Verdict(
            claim,
            OPEN,
            left.place,
            paper=format_printed(claim, theirs),
            why="nothing to be relative to",
            rows=rows,
        )
    neutral = 1.0 if claim.as_ == "times" else 0.0
    above, why = size - neutral, "direction"
    if claim.expect == "non_inferior":
        if len(values) < MIN_SEEDS:
            return Verdict(
                claim,
                OPEN,
                left.place,
                format_size(claim, size),
                why=f"needs {MIN_SEEDS} seeds",
                rows=rows,
            )
        p = non_inferiority(
            [ratio(*both) for both in values], 1.0
        ).p  # of one teacher it is the paper's test
        good, why = p < 0.05, f"p = {p:.3f}"
    elif claim.expect in ("higher", "lower"):
        good = above > 0 if claim.expect == "higher" else above < 0
        if good and theirs and claim.size == "printed":
            low, high = sorted(abs(end) for end in theirs)
            good, why = low / SIZE_FACTOR <= abs(size) <= high * SIZE_FACTOR, "size"
    else:
        good = {
            "same": abs(above) <= claim.within,
            "no_worse": above >= -claim.within,
            "no_lower": above >= -claim.within,
        }[claim.expect]
        why = f"within {percent(claim.within).lstrip('+')}"
    if "/" not in left.model:
        why += (
            "; seeds "
            + " / ".join(str(len({run.seed for run in row.runs})) for row in rows)
            + format_interval(claim, pair)
        )
    return Verdict(
        claim,
        HOLDS if good else FAILS,
        left.place,
        format_size(claim, size),
        format_printed(claim, theirs),
        why,
        rows,
    )


def format_interval(claim: Claim, pair: Pair) -> str:
    """Format the bootstrap interval over users, for example `; 95% -2.1% to +1.0%`.

    It is empty if the metric per user is not saved.
    """
    split, _, metric = claim.metric.partition("/")
    if split != "test" or (same := load_paired_metric(pair.runs, metric)) is None:
        return ""
    (found,) = bootstrap_intervals(same.difference[None], same.counts)
    low, high = (
        format_size(claim, claimed_size(claim, same.base_mean + end, same.base_mean))
        for end in (found.low, found.high)
    )
    return f"; 95% {low} to {high}"


def judge_param(claim: Claim, rows: Sequence[Row], system: System) -> list[Verdict]:
    """Judge the effect of a setting, with all others equal, per experiment and trie.

    Of several groups of rows, that with the most values is judged.
    """
    without = System(
        system.model,
        {name: value for name, value in system.params.items() if name != claim.param},
    )
    key = f"model.{claim.param}"
    groups: dict[tuple[str, str], list[Row]] = {}
    for group in group_controlled([row for row in rows if without.matches(row)], key):
        place_of = (group[0].experiment, group[0].params.get("table.trie", ""))
        if len(group) > len(groups.get(place_of, [])):
            groups[place_of] = group
    return [
        judged
        for group in groups.values()
        if len(group) > 2 and (judged := judge_line(claim, group)) is not None
    ]


def judge_line(claim: Claim, group: Sequence[Row]) -> Verdict | None:
    """Judge rows in the order of a setting; None if fewer than three are measured."""
    name = claim.metric
    if "/" not in name or not name.startswith(("val/", "test/", "train/")):
        name = next(
            (
                f"{s}/{name}"
                for s in ("test", "val")
                if all(r.values(f"{s}/{name}") for r in group)
            ),
            name,
        )
    line = [
        (to_number(param_value(row, str(claim.param))), row.mean(name))
        for row in group
        if row.values(name)
    ]
    if len(line) < 3:
        return None
    figures = [figure for _, figure in line]
    if claim.expect == "best_in":
        best = (min if lower_is_better(name) else max)(
            line, key=lambda point: point[1]
        )[0]
        good, ours, paper = (
            best in claim.values,
            f"best at {best:g}",
            " or ".join(f"{v:g}" for v in claim.values),
        )
    elif claim.expect == "falls":
        good = all(later < earlier for earlier, later in pairwise(figures))
        ours, paper = f"{figures[0]:.4g} to {figures[-1]:.4g}", "falls"
    else:
        spread = max(figures) / min(figures) - 1 if min(figures) > 0 else math.inf
        good, ours, paper = (
            spread <= claim.within,
            percent(spread),
            f"within {claim.within:.0%}",
        )
    values = ", ".join(f"{value:g}" for value, _ in line)
    return Verdict(
        claim,
        HOLDS if good else FAILS,
        group[0].place,
        ours,
        paper,
        f"{name} at {values}",
        tuple(group),
    )


def judge_range(claim: Claim, rows: Sequence[Row], system: System) -> list[Verdict]:
    """Judge whether the metric of a system is in its range, per experiment and trie."""
    low, high = claim.range or (-math.inf, math.inf)
    found: dict[tuple[str, str], Verdict] = {}
    for row in rows:
        if system.matches(row) and row.values(claim.metric):
            value = statistics.fmean(row.values(claim.metric))
            verdict = HOLDS if low <= value <= high else FAILS
            found[(row.experiment, row.params.get("table.trie", ""))] = Verdict(
                claim,
                verdict,
                row.place,
                f"{value:.4g}",
                f"{low:g} to {high:g}",
                claim.metric,
                (row,),
            )
    return list(found.values())


def format_size(claim: Claim, size: float) -> str:
    """Format a size as it is claimed: 8.74x, -2.4%, +1.91 points."""
    if claim.as_ == "times":
        return f"{size:.3f}x" if size < 2 else f"{size:.3g}x"
    return percent(size) if claim.as_ == "change" else f"{100 * size:+.2f} points"


def format_printed(claim: Claim, sizes: tuple[float, float] | None) -> str:
    """Format the printed sizes."""
    if sizes is None or claim.expect == "non_inferior":
        return ""
    if claim.range:
        return f"{sizes[0]:g} to {sizes[1]:g}"
    low, high = (format_size(claim, size) for size in sizes)
    return low if low == high else f"{low} to {high}"


def verdicts_table(verdicts: Sequence[Verdict]) -> Table:
    """Make the table of all claims, with the number of each verdict."""
    cells = [
        [v.verdict, v.claim.source, v.claim.says, v.where, v.ours, v.paper, v.why]
        for v in verdicts
    ]
    counts = {
        verdict: sum(v.verdict == verdict for v in verdicts)
        for verdict in (HOLDS, FAILS, OPEN)
    }
    notes = [
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".",
        f"A claim that one system is above or below another holds where its direction "
        f"does and its size lies within the printed range, {SIZE_FACTOR:g} times "
        f"widened. The rules are in claims.yaml, the figures from kept runs alone.",
        "ours: the mean over pairs of runs, each a student and its teacher, or two "
        "models of one seed. 95%: the interval of a bootstrap over users.",
    ]
    header = [
        "verdict",
        "source",
        "claim",
        "measured on",
        "ours",
        "printed",
        "decided by",
    ]
    return Table("Claims of the papers", header, cells, notes, 7)


def verdicts(rows: Sequence[Row], papers: Papers) -> list[Verdict]:
    """Decide all claims by rows that are not from simulated logs."""
    real = [row for row in rows if not row.simulated]
    return [
        verdict
        for claim in read_claims(papers)
        for verdict in decide(claim, real, papers)
    ]


@dataclass
class Config:
    """Options of `python -m papers.claims`."""

    results: str = str(kept.RESULTS)
    """File of saved runs, or folder of such files."""
    claims: str = str(CLAIMS)
    """File with systems, published figures and claims."""


def run(config: Config) -> None:
    """Print the claims with their verdicts."""
    papers = load(config.claims)
    runs, timings = kept.read(config.results)
    with kept.store(runs) as uri:
        print(
            verdicts_table(
                verdicts([*load_rows(kept.select_all(uri)), *to_rows(timings)], papers)
            ).text()
        )


if __name__ == "__main__":
    cli.main(run, Config)
