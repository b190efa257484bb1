"""Decide the papers' claims by saved runs: holds, does not hold, not yet measured.

    python -m papers.claims [--results FILE_OR_FOLDER]

A claim is a rule in `claims.yaml`: two systems compared by a metric, the effect of a
setting, or the range of a metric. Each claim is decided on each dataset (and trie) on
which its systems were evaluated. Both the direction and the size of a difference must
hold; the size may lie between half and double the printed range.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from benchmarks.tables import to_rows
from jobs import cli
from models.storage.tables import UserError
from papers import kept
from papers.noninferiority import SIGNIFICANCE, non_inferiority
from papers.published import (
    CLAIMS,
    Pair,
    Papers,
    System,
    check_names,
    check_required,
    load,
    pair_rows,
    param_value,
)
from pipelines.comparison.load import load_rows
from pipelines.comparison.over_users import (
    MIN_USERS,
    bootstrap_intervals,
    load_paired_metric,
)
from pipelines.comparison.plots import group_controlled, to_number
from pipelines.comparison.rows import Row, lower_is_better, ratio
from pipelines.comparison.table import Table, percent

HOLDS, FAILS, OPEN = "holds", "does not hold", "not yet measured"

PAIR_EXPECTATIONS = ("higher", "lower", "same", "no_worse", "no_lower", "non_inferior")
"""Values of `expect` for a comparison of two systems, left against right."""

PARAM_EXPECTATIONS = ("best_in", "falls", "flat")
"""Values of `expect` for the effect of a setting."""

MIN_SEEDS = 3
"""Smallest number of pairs of runs for a test of non-inferiority (Table 12 of
SID-MLP)."""

SIZE_FACTOR = 2.0
"""Factor by which the printed range of sizes is widened at both ends."""


@dataclass(frozen=True)
class Claim:
    """A rule of claims.yaml, whose first lines explain the fields."""

    id: str
    """Short name."""
    source: str
    """Paper, and table or section."""
    says: str
    """The claim in words."""
    metric: str
    """Metric that decides the claim."""
    left: str | None = None
    """System that the claim is about."""
    right: str | None = None
    """System with which `left` is compared."""
    system: str | None = None
    """System of a rule about a setting or a range."""
    match: str = "settings"
    """`teacher`: right is the teacher of left; `settings`: all other settings are
    equal."""
    as_: str = "change"
    """Unit of the size: change, points or times."""
    expect: str = "higher"
    """One of PAIR_EXPECTATIONS or PARAM_EXPECTATIONS."""
    within: float = 0.01
    """Tolerance of same, no_worse, no_lower and flat, as a share."""
    paper: tuple[float, float] | None = None
    """Smallest and largest printed size."""
    size: str = "printed"
    """`printed`: the size is compared with the paper's; `any`: only the direction
    counts."""
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
        expectations: tuple[str, ...] = ("higher",)
        if self.left:
            expectations = PAIR_EXPECTATIONS
        elif self.param:
            expectations = PARAM_EXPECTATIONS
        check_names([self.expect], expectations, f"claim {self.id}, expect")
        check_names([self.as_], ("change", "points", "times"), f"claim {self.id}, as")
        check_names([self.match], ("settings", "teacher"), f"claim {self.id}, match")


@dataclass(frozen=True)
class Verdict:
    """The decision on a claim for one dataset."""

    claim: Claim
    verdict: str
    """HOLDS, FAILS or OPEN."""
    dataset: str = ""
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
    """Convert the rules of claims.yaml to claims.

    Raises:
        UserError: If a rule is not valid.
    """
    names = [field.name for field in fields(Claim)]
    claims = []
    for rule in papers.claims:
        content = {"as_" if key == "as" else key: value for key, value in rule.items()}
        label = f"claim {rule.get('id')}"
        check_names(content, names, label)
        check_required(content, ("id", "source", "says", "metric"), label)
        for key in ("paper", "range", "values"):
            if key in content:
                content[key] = tuple(content[key])
        claims.append(Claim(**content))
    return claims


def decide(claim: Claim, rows: Sequence[Row], papers: Papers) -> list[Verdict]:
    """Decide a claim on each dataset on which it was measured.

    Args:
        claim: Rule to decide.
        rows: Rows of all experiments; rows without a finished run are ignored.
        papers: Systems and published figures.

    Returns:
        A verdict per dataset, or one verdict `OPEN` if there is no measurement.
    """
    finished = [row for row in rows if any(run.finished for run in row.runs)]
    if claim.left and claim.right:
        pairs = pair_rows(
            finished,
            papers.systems[claim.left],
            papers.systems[claim.right],
            claim.metric,
            claim.match,
        )
        verdicts = [judge_pair(claim, pair, papers) for pair in pairs]
    elif claim.param:
        verdicts = judge_param(claim, finished, papers.systems[str(claim.system)])
    else:
        verdicts = judge_range(claim, finished, papers.systems[str(claim.system)])
    return verdicts or [
        Verdict(claim, OPEN, paper=format_printed(claim, paper_range(claim, papers)))
    ]


def claimed_size(claim: Claim, left: float, right: float) -> float:
    """Return the size of a difference in the claim's unit.

    The size is `left - right` as points, `left / right` as times, and
    `left / right - 1` as change.

    Args:
        claim: Claim with the unit `as_`.
        left: Value of the compared system.
        right: Value of the reference system.
    """
    if claim.as_ == "points":
        return left - right
    times = ratio(left, right)
    return times - 1 if claim.as_ == "change" else times


def paper_range(claim: Claim, papers: Papers) -> tuple[float, float] | None:
    """Return the smallest and largest printed size, or None if none is printed.

    The claim's own `paper` replaces the sizes in the published tables. A claim about
    one system has no printed size: its `range` is returned, which is None for a claim
    about a setting.
    """
    if claim.paper:
        return claim.paper
    if not (claim.left and claim.right):
        return claim.range
    sizes = []
    for published in papers.published:
        for dataset in published.datasets:
            change = published.change(dataset, claim.left, claim.metric, claim.right)
            left = published.value(dataset, claim.left, claim.metric)
            right = published.value(dataset, claim.right, claim.metric)
            if change is None or left is None or right is None:
                continue
            if claim.as_ == "change":
                sizes.append(change)
            else:
                sizes.append(claimed_size(claim, left, right))
    return (min(sizes), max(sizes)) if sizes else None


def judge_pair(claim: Claim, pair: Pair, papers: Papers) -> Verdict:
    """Judge the mean size of a difference over pairs of runs.

    The verdict names the seeds and, if the metric per user is saved, the bootstrap
    interval over users.

    Args:
        claim: Claim about two systems.
        pair: Rows of the two systems on one dataset.
        papers: Published figures.
    """
    left = pair.left
    rows = (pair.left, pair.right)
    values = pair.values(claim.metric)
    size = statistics.fmean(claimed_size(claim, ours, base) for ours, base in values)
    printed = paper_range(claim, papers)
    if math.isnan(size):
        return Verdict(
            claim,
            OPEN,
            left.experiment_and_sids,
            paper=format_printed(claim, printed),
            why="the right value is 0",
            rows=rows,
        )
    if claim.expect == "non_inferior" and len(values) < MIN_SEEDS:
        return Verdict(
            claim,
            OPEN,
            left.experiment_and_sids,
            format_size(claim, size),
            why=f"needs {MIN_SEEDS} seeds",
            rows=rows,
        )
    holds, why = judge_size(claim, size, values, printed)
    if "/" not in left.model:
        seeds = [str(len({run.seed for run in row.runs})) for row in rows]
        why += f"; seeds {' / '.join(seeds)}{format_interval(claim, pair)}"
    return Verdict(
        claim,
        HOLDS if holds else FAILS,
        left.experiment_and_sids,
        format_size(claim, size),
        format_printed(claim, printed),
        why,
        rows,
    )


def judge_size(
    claim: Claim,
    size: float,
    values: Sequence[tuple[float, float]],
    printed: tuple[float, float] | None,
) -> tuple[bool, str]:
    """Return whether a size is as claimed, and the part of the rule that decided.

    Args:
        claim: Claim about two systems.
        size: Mean size in the claim's unit.
        values: Left and right value of each pair of runs.
        printed: Smallest and largest printed size, or None.
    """
    if claim.expect == "non_inferior":
        # With a single teacher this equals the paper's test.
        p = non_inferiority([ratio(ours, base) for ours, base in values], 1.0).p
        return p < SIGNIFICANCE, f"p = {p:.3f}"
    excess = size - 1 if claim.as_ == "times" else size
    if claim.expect == "same":
        return abs(excess) <= claim.within, format_tolerance(claim)
    if claim.expect in ("no_worse", "no_lower"):
        return excess >= -claim.within, format_tolerance(claim)
    has_direction = excess > 0 if claim.expect == "higher" else excess < 0
    if not has_direction or not printed or claim.size != "printed":
        return has_direction, "direction"
    low, high = sorted(abs(end) for end in printed)
    return low / SIZE_FACTOR <= abs(size) <= high * SIZE_FACTOR, "size"


def format_tolerance(claim: Claim) -> str:
    """Format the tolerance of a claim, for example `within 1.0%`."""
    return f"within {percent(claim.within).lstrip('+')}"


def format_interval(claim: Claim, pair: Pair) -> str:
    """Format the bootstrap interval over users, for example `; 95% -2.1% to +1.0%`.

    Return an empty string if the metric per user is not saved.
    """
    split, _, metric = claim.metric.partition("/")
    paired = load_paired_metric(pair.runs, metric) if split == "test" else None
    if paired is None:
        return ""
    (interval,) = bootstrap_intervals(paired.difference[None], paired.counts)
    base = paired.base_mean
    low = format_size(claim, claimed_size(claim, base + interval.low, base))
    high = format_size(claim, claimed_size(claim, base + interval.high, base))
    return f"; 95% {low} to {high}"


def judge_param(claim: Claim, rows: Sequence[Row], system: System) -> list[Verdict]:
    """Judge the effect of a setting on a system, per experiment and trie.

    Rows of a group differ only in the setting. If an experiment has several groups, the
    group with the most values is judged.

    Args:
        claim: Claim about a setting.
        rows: Rows of all experiments.
        system: System of the claim; its own value of the setting is ignored.
    """
    other_params = {
        name: value for name, value in system.params.items() if name != claim.param
    }
    any_value = System(system.model, other_params)
    matching = [row for row in rows if any_value.matches(row)]
    groups: dict[tuple[str, str], list[Row]] = {}
    for group in group_controlled(matching, f"model.{claim.param}"):
        dataset = (group[0].experiment, group[0].params.get("table.trie", ""))
        if len(group) > len(groups.get(dataset, [])):
            groups[dataset] = group
    verdicts = [judge_values(claim, group) for group in groups.values()]
    return [verdict for verdict in verdicts if verdict is not None]


def judge_values(claim: Claim, group: Sequence[Row]) -> Verdict | None:
    """Judge a metric at the values of a setting.

    Args:
        claim: Claim about a setting.
        group: Rows in the order of the setting.

    Returns:
        The verdict, or None if fewer than three values are measured.
    """
    name = find_measured_metric(claim.metric, group)
    points = [
        (to_number(param_value(row, str(claim.param))), row.mean(name))
        for row in group
        if row.values(name)
    ]
    if len(points) < 3:
        return None
    measured = [value for _, value in points]
    if claim.expect == "best_in":
        choose = min if lower_is_better(name) else max
        best, _ = choose(points, key=lambda point: point[1])
        holds = best in claim.values
        ours = f"best at {best:g}"
        paper = " or ".join(f"{value:g}" for value in claim.values)
    elif claim.expect == "falls":
        holds = all(later < earlier for earlier, later in pairwise(measured))
        ours = f"{measured[0]:.4g} to {measured[-1]:.4g}"
        paper = "falls"
    else:
        low, high = min(measured), max(measured)
        spread = high / low - 1 if low > 0 else math.inf
        holds = spread <= claim.within
        ours = percent(spread)
        paper = f"within {claim.within:.0%}"
    settings = ", ".join(f"{setting:g}" for setting, _ in points)
    return Verdict(
        claim,
        HOLDS if holds else FAILS,
        group[0].experiment_and_sids,
        ours,
        paper,
        f"{name} at {settings}",
        tuple(group),
    )


def find_measured_metric(name: str, rows: Sequence[Row]) -> str:
    """Prefix a metric with `test/`, or with `val/` if some rows lack the test metric.

    A name that has a prefix is returned unchanged, and so is a metric that some rows
    lack on both splits.
    """
    if name.startswith(("val/", "test/", "train/")):
        return name
    for split in ("test", "val"):
        if all(row.values(f"{split}/{name}") for row in rows):
            return f"{split}/{name}"
    return name


def judge_range(claim: Claim, rows: Sequence[Row], system: System) -> list[Verdict]:
    """Judge whether the metric of a system is in its range, per experiment and trie.

    Args:
        claim: Claim about a range.
        rows: Rows of all experiments; the last matching row of a trie counts.
        system: System of the claim.
    """
    low, high = claim.range or (-math.inf, math.inf)
    verdicts: dict[tuple[str, str], Verdict] = {}
    for row in rows:
        values = row.values(claim.metric)
        if not system.matches(row) or not values:
            continue
        mean = statistics.fmean(values)
        verdicts[row.experiment, row.params.get("table.trie", "")] = Verdict(
            claim,
            HOLDS if low <= mean <= high else FAILS,
            row.experiment_and_sids,
            f"{mean:.4g}",
            f"{low:g} to {high:g}",
            claim.metric,
            (row,),
        )
    return list(verdicts.values())


def format_size(claim: Claim, size: float) -> str:
    """Format a size in the claim's unit: 8.74x, -2.4%, +1.91 points."""
    if claim.as_ == "times":
        return f"{size:.3f}x" if size < 2 else f"{size:.3g}x"
    return percent(size) if claim.as_ == "change" else f"{100 * size:+.2f} points"


def format_printed(claim: Claim, sizes: tuple[float, float] | None) -> str:
    """Format the smallest and largest printed size; empty if none is printed."""
    if sizes is None or claim.expect == "non_inferior":
        return ""
    if claim.range:
        return f"{sizes[0]:g} to {sizes[1]:g}"
    low, high = (format_size(claim, size) for size in sizes)
    return low if low == high else f"{low} to {high}"


def verdicts_table(verdicts: Sequence[Verdict]) -> Table:
    """Return the table of all claims, with the number of each verdict in a note."""
    cells = [
        [
            decision.verdict,
            decision.claim.source,
            decision.claim.says,
            decision.dataset,
            decision.ours,
            decision.paper,
            decision.why,
        ]
        for decision in verdicts
    ]
    counts = Counter(decision.verdict for decision in verdicts)
    totals = [f"{counts[verdict]} {verdict}" for verdict in (HOLDS, FAILS, OPEN)]
    notes = [
        f"{', '.join(totals)}.",
        f"A claim that one system is above or below another holds where its direction "
        f"does and its size lies within the printed range, {SIZE_FACTOR:g} times "
        f"widened. The rules are in claims.yaml, the figures from kept runs alone. "
        f"Logs with fewer than {MIN_USERS} test users decide nothing.",
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
    """Return the verdicts on all claims."""
    decisive_rows = [row for row in rows if is_decisive(row)]
    decisions = []
    for claim in read_claims(papers):
        decisions += decide(claim, decisive_rows, papers)
    return decisions


def is_decisive(row: Row) -> bool:
    """Return whether a row is of a real log, with enough users if evaluated on test."""
    num_users = row.mean("test/users")
    return not row.simulated and (math.isnan(num_users) or num_users >= MIN_USERS)


@dataclass
class Config:
    """Options of `python -m papers.claims`."""

    results: str = str(kept.RESULTS)
    """File of saved runs, or folder of such files."""
    claims: str = str(CLAIMS)
    """File with systems, published figures and claims."""


def run(config: Config) -> None:
    """Print the table of the claims with their verdicts."""
    papers = load(config.claims)
    runs, timings = kept.read(config.results)
    with kept.store(runs) as uri:
        rows = [*load_rows(kept.select_all(uri)), *to_rows(timings)]
        print(verdicts_table(verdicts(rows, papers)).text())


if __name__ == "__main__":
    cli.main(run, Config)
