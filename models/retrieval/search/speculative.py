"""Speculative beam search (AtSpeed, Lin et al., 2025): a draft proposes beams of several steps, the target verifies all
of them in one pass.

    found = speculative_search(target, draft, trie, requests, k, Speculation(beam=20, draft_beam=40))    # strict
    found = speculative_search(target, draft, trie, requests, k, Speculation(beam=20), keys)             # relaxed

A pass begins at the target's beams of some length. The draft extends them step by step to a tree of prefixes; the
target gives the log-probabilities of the next code after every prefix of the tree. With those the steps are gone
through one after the other, and each ends with the target's own beams of that step: where all of them stand in the
tree, the step is accepted and the next one can be judged by the same pass; else a new pass begins at them. So a pass
always gets one step further than what was accepted of the draft, and a draft that fails costs time, not quality. The
last code needs no draft: the target's log-probabilities of it are there.

Strict: the target's beams are its best ones, as `beam_search` takes them. Items, scores and ties are those of
`beam_search` with the target, whatever the draft says (up to the rounding of the pass over the tree).

Relaxed: the target's beams are drawn. Let p be the softmax over all pairs (beam, next code) of the target's summed
log-probabilities, and q that of the draft's over the same pairs. The drafts are drawn from q without replacement (the
highest of log q + Gumbel noise, in falling order), not by a beam search: min(1, p/q) would compare with a q that
nothing was drawn from. Two rules:

- "published", that of the AtSpeed paper: every draft is accepted with probability min(1, p/q) by itself; of more than
  `beam` accepted ones a random choice stays; if there are fewer, the rest is drawn from max(p - q, 0) without the
  accepted ones (or from p without them where that is empty). One pair drawn for one beam follows p exactly, which is
  speculative sampling. Of more drafts those that stay lean to min(p, q), as no draft knows of the others. (Total
  variation distance to the target's law on the small case of the tests, 4 drafts for 2 beams: 0.21, by the exact rule
  0.01, which is the noise of the sample.) All found are items with the target's own score all the same.
- "exact": the beams are filled one by one, each by recursive rejection over the drafts not yet looked at. With p the
  target's law of this beam (without the pairs taken) and q the draft's of the next draft (without those looked at), a
  draft is taken with probability min(1, p/q); else p becomes max(p - q, 0) / sum and the next draft is tried; after
  the last one the beam is drawn from p. So the beams of every step are exactly `beam` draws without replacement from
  the target's p, whatever the draft. Of a step's drafts only those that extend a beam that stayed count, and later
  steps are drafted anew.

The last code is drawn from p itself under both rules, then items are ranked by the target's score.

Shapes: `B` requests, `R` of them that stand at the same length, `W` beams, `N` drafted beams, `M` children of the
widest node, `P = W * M` pairs of a beam and its next code, `C_l` codes of level l, `L` levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from models.metrics.scores import check_finite
from models.retrieval.parts import Scorer
from models.retrieval.search.beam import pairs_of
from models.retrieval.search.topk import select, top_k
from models.retrieval.search.trie import Trie

Rule = Literal["published", "exact"]

Draft = Callable[[Tensor], Scorer]
"""What proposes: a scorer of some requests, by their numbers (R,)."""


@dataclass(frozen=True)
class Tree:
    """Prefixes of R requests, level by level; the empty one stands before the first level."""

    parents: list[Tensor] = field(default_factory=list)
    """(R, W_l) of level l: which prefix of the level before each extends."""
    codes: list[Tensor] = field(default_factory=list)
    """(R, W_l) of level l: its last code."""

    def add(self, parents: Tensor, codes: Tensor) -> None:
        """One more level."""
        self.parents.append(parents)
        self.codes.append(codes)


class Target(Protocol):
    """What decides."""

    def __call__(self, rows: Tensor, tree: Tree, first: int) -> list[Tensor]:
        """(R, W_l, C_l) for every length l of prefixes from `first` to the longest, in one pass: log-probabilities of
        the next code after each prefix of the tree of the requests `rows` (R,)."""
        ...


@dataclass(frozen=True)
class Speculation:
    """How it is searched."""

    beam: int
    """The target's beams."""
    draft_beam: int = 40
    """Beams that a step drafts; at least `beam` are, fewer could never be accepted."""
    steps: int = 4
    """Steps drafted for one pass, at most; 0 is the target's search by passes of one step."""
    children: bool = False
    """Whether log-probabilities are normalised over the valid children, as in `beam_search`."""
    rule: Rule = "published"
    """Of the relaxed search."""
    allowed: Tensor | None = None
    """Edges of the trie that the search keeps to, as in `beam_search`; draft and target alike."""


@dataclass(frozen=True)
class Found:
    """What a search found, and what it took."""

    items: Tensor
    """(B, k), -1 where there are fewer."""
    scores: Tensor
    """(B, k): the target's, falling; -inf where there are fewer."""
    passes: Tensor
    """(B,) passes of the target."""
    drafted: Tensor
    """(B,) steps drafted."""
    accepted: Tensor
    """(B,) steps among them that were accepted."""


@dataclass(frozen=True)
class Beams:
    """The target's beams of requests that stand at the same length."""

    rows: Tensor
    """(R,) which requests."""
    codes: Tensor
    """(R, W, length)"""
    node: Tensor
    """(R, W): where each stands in the trie."""
    score: Tensor
    """(R, W): sum of log-probabilities; -inf for one that is not there."""

    def of(self, kept: Tensor) -> Beams:
        """Those of some requests, by place or as a mask."""
        return Beams(
            self.rows[kept], self.codes[kept], self.node[kept], self.score[kept]
        )


@dataclass(frozen=True)
class Drafts:
    """One level of the drafted tree."""

    node: Tensor
    """(R, N): where each prefix stands in the trie."""
    parent: Tensor
    """(R, N): which prefix of the level before it extends; of the first level, which is the target's, unused."""
    score: Tensor
    """(R, N): the draft's sums, on top of the target's up to where the pass began."""
    log_probs: Tensor
    """(R, N, C): the draft's, of the next code; of the last level nothing (C = 0)."""


def speculative_search(
    target: Target,
    draft: Draft,
    trie: Trie,
    requests: int,
    k: int,
    how: Speculation,
    keys: Tensor | None = None,
) -> Found:
    """The search of the module's docstring for `requests` requests. With `keys` (B,) int64, which all that is drawn
    for a request follows from, it is relaxed, else strict."""
    if k < 1 or how.beam < 1 or how.draft_beam < 1 or how.steps < 0:
        raise ValueError(
            f"k {k}, beam {how.beam} and draft_beam {how.draft_beam} need to be at least 1, "
            f"steps {how.steps} at least 0"
        )
    device = trie.leaves.device
    found = Found(
        torch.full((requests, k), -1, device=device),
        torch.full((requests, k), -torch.inf, device=device),
        *(torch.zeros(requests, dtype=torch.long, device=device) for _ in range(3)),
    )
    zero = torch.zeros((requests, 1), dtype=torch.long, device=device)
    everyone = Beams(
        torch.arange(requests, device=device),
        zero[..., None][..., :0],
        zero,
        zero.float(),
    )
    waiting: list[list[Beams]] = [[everyone], *([] for _ in range(trie.levels - 1))]
    for length in range(
        trie.levels
    ):  # requests that a pass left at one length go on together
        parts = [beams for beams in waiting[length] if len(beams.rows)]
        if not parts:
            continue
        names = ("rows", "codes", "node", "score")
        beams = Beams(
            *(torch.cat([getattr(part, name) for part in parts]) for name in names)
        )
        noise = None if keys is None else Noise(keys[beams.rows], length)
        _one_pass(target, draft, trie, beams, how, noise, waiting, found)
    return found


def _one_pass(
    target: Target,
    draft: Draft,
    trie: Trie,
    beams: Beams,
    how: Speculation,
    noise: Noise | None,
    waiting: list[list[Beams]],
    found: Found,
) -> None:
    """Drafts, verifies, and goes on with each request as far as its drafts are accepted: to `found`, or to `waiting`
    at the length that it has come to."""
    length = beams.codes.shape[2]
    tree, drafts = _draft(draft, trie, beams, how, noise)
    verified = target(beams.rows, tree, length)
    found.passes[beams.rows] += 1
    found.drafted[beams.rows] += len(drafts) - 1
    row = torch.arange(
        len(beams.rows), device=beams.rows.device
    )  # (R,): which of the pass's requests go on
    at = torch.arange(beams.node.shape[1], device=row.device).expand(
        beams.node.shape
    )  # (R, W): each beam in the tree
    for step, of_tree in enumerate(verified):
        level, now = length + step, drafts[step]
        log_probs = _pick(of_tree[row], at)
        scores, edge, token = pairs_of(
            trie, level, beams.node, beams.score, log_probs, how.children, how.allowed
        )
        mine = None if noise is None else noise.of(row, level)
        if level == trie.levels - 1:
            _finish(trie, scores, edge, beams.rows, how, mine, found)
            return
        width, widest = min(how.beam, trie.edges[level]), scores.shape[1] // at.shape[1]
        missing = max(
            0, width - scores.shape[1]
        )  # requests of other passes may have more pairs: one width for all
        scores = functional.pad(scores, (0, missing), value=-torch.inf)
        edge, token = (
            functional.pad(edge, (0, missing)),
            functional.pad(token, (0, missing)),
        )
        drafted = place = None
        if step + 1 < len(drafts):
            drafted = drafts[step + 1]
            place = _places(
                trie, level, now, drafted, row, at, beams.score, widest, scores.shape[1]
            )
        if mine is None:
            position = select(scores, width)
        elif place is None or drafted is None:
            position = select(scores + mine.gumbel(edge), width)
        else:
            score, log_probs = (
                now.score[row].gather(1, at),
                _pick(now.log_probs[row], at),
            )
            of_draft, _, _ = pairs_of(
                trie, level, beams.node, score, log_probs, how.children, how.allowed
            )
            of_draft = functional.pad(of_draft, (0, missing)).masked_fill(
                scores == -torch.inf, -torch.inf
            )
            rule = published if how.rule == "published" else exact
            position = rule(
                _softmax(scores), _softmax(of_draft), place, width, mine, edge
            )
        parent = (position // widest).clamp(max=beams.node.shape[1] - 1)
        beams = Beams(
            beams.rows,
            torch.cat(
                [
                    beams.codes.gather(1, _like(parent, beams.codes)),
                    token.gather(1, position).unsqueeze(-1),
                ],
                -1,
            ),
            edge.gather(1, position),
            scores.gather(1, position),
        )
        if place is None:
            waiting[level + 1].append(beams)
            return
        number = torch.arange(place.shape[1], device=row.device).expand(place.shape)
        where = position.new_full((len(row), scores.shape[1] + 1), -1).scatter_(
            1, place, number
        )
        at = where[:, :-1].gather(1, position)
        accepted = ((at >= 0) | (beams.score == -torch.inf)).all(1)
        waiting[level + 1].append(beams.of(~accepted))
        beams, row, at = beams.of(accepted), row[accepted], at[accepted].clamp(min=0)
        found.accepted[beams.rows] += 1
        if not len(row):
            return


def _finish(
    trie: Trie,
    scores: Tensor,
    edge: Tensor,
    rows: Tensor,
    how: Speculation,
    noise: Noise | None,
    found: Found,
) -> None:
    """The items of the last code's pairs, by the target's score; relaxed, of as many as are drawn."""
    k = found.items.shape[1]
    if noise is not None and (count := max(how.beam, k)) < scores.shape[1]:
        drawn = select(scores + noise.gumbel(edge), count)
        scores = torch.full_like(scores, -torch.inf).scatter_(
            1, drawn, scores.gather(1, drawn)
        )
    position, score = top_k(scores, k)
    item = trie.leaves[edge.gather(1, position.clamp(min=0))]
    found.items[rows] = torch.where(score == -torch.inf, -1, item)
    found.scores[rows] = score


def _draft(
    draft: Draft, trie: Trie, beams: Beams, how: Speculation, noise: Noise | None
) -> tuple[Tree, list[Drafts]]:
    """The tree, from the empty prefix on, and its levels from that of the target's beams on."""
    tree, length = Tree(), beams.codes.shape[2]
    last = min(length + how.steps, trie.levels - 1)
    node, parent, score, drafts = beams.node, beams.node, beams.score, []
    log_probs = score.unsqueeze(-1)
    if last > length:
        scorer = draft(beams.rows)
        log_probs = scorer.start().unsqueeze(1)
    width = torch.arange(node.shape[1], device=node.device)
    for level in range(length):  # the tree and the draft follow the target's beams
        tree.add(
            (width if level else torch.zeros_like(width)).expand(node.shape),
            beams.codes[..., level],
        )
        if last > length:
            log_probs = scorer.step(tree.parents[-1], tree.codes[-1])
    for level in range(length, last):
        drafts.append(Drafts(node, parent, score, log_probs))
        scores, edge, token = pairs_of(
            trie, level, node, score, log_probs, how.children, how.allowed
        )
        count = min(max(how.draft_beam, how.beam), trie.edges[level], scores.shape[1])
        if noise is None:
            position = select(scores, count)
        else:
            position, _ = top_k(
                scores + noise.of(None, level).gumbel(edge, "drafts"), count
            )
        parent = position // (scores.shape[1] // node.shape[1])
        node, score, code = (x.gather(1, position) for x in (edge, scores, token))
        tree.add(parent, code)
        if level + 1 < last:
            log_probs = scorer.step(parent, code)
    check_finite(score, tail=True)  # a draft of NaN would show in nothing that is found
    return tree, [*drafts, Drafts(node, parent, score, log_probs[..., :0])]


def _places(
    trie: Trie,
    level: int,
    now: Drafts,
    drafted: Drafts,
    row: Tensor,
    at: Tensor,
    score: Tensor,
    widest: int,
    pairs: int,
) -> Tensor:
    """(R, N): the pair (beam, child) that each drafted prefix is; `pairs`, one past the last, for those that extend
    none of the target's beams."""
    count, width = now.node.shape[1], at.shape[1]
    slot = at.new_full(
        (len(row), count + 1), -1
    )  # of each prefix of the tree: which of the target's beams it is
    beam = torch.arange(width, device=at.device).expand(at.shape)
    slot = slot.scatter_(1, torch.where(score > -torch.inf, at, count), beam)[:, :-1]
    parent = drafted.parent[row]
    slot, begin = (
        slot.gather(1, parent),
        trie.offsets(level)[now.node[row].gather(1, parent)],
    )
    place = slot * widest + drafted.node[row] - begin
    return torch.where((slot >= 0) & (drafted.score[row] > -torch.inf), place, pairs)


def _pick(of_tree: Tensor, at: Tensor) -> Tensor:
    """(R, W, C) of the prefixes `at` (R, W), from (R, N, C)."""
    return of_tree.gather(1, _like(at, of_tree))


def _like(index: Tensor, values: Tensor) -> Tensor:
    """`index` (R, W) for a gather of whole rows of `values` (R, N, C)."""
    return index.unsqueeze(-1).expand(-1, -1, values.shape[-1])


def _softmax(scores: Tensor) -> Tensor:
    """(R, P) float64; 0 in a row without a pair."""
    return scores.double().softmax(1).nan_to_num(0.0)


def published(
    p: Tensor, q: Tensor, place: Tensor, beam: int, noise: Noise, edge: Tensor
) -> Tensor:
    """(R, beam) rising positions of the pairs kept by the rule of the AtSpeed paper.

    `p` and `q` (R, P) are the distributions of target and draft, `place` (R, N) the pairs drafted (P: none) and `edge`
    (R, P) what noise is drawn by.
    """
    drafted = (
        torch.zeros_like(functional.pad(p, (0, 1))).scatter_(1, place, 1.0)[:, :-1] > 0
    )
    accepted = drafted & (noise.uniform(edge, "accept") * q < p)
    rest = torch.where(accepted, 0.0, p - q).clamp(min=0)
    gumbel = noise.gumbel(edge)
    keys = torch.where(
        rest > 0, rest.log() + gumbel, p.log() + gumbel - 1e4
    )  # what is out of reach but for need
    keys = torch.where(
        accepted, 1e4 + gumbel, keys
    )  # all accepted first, in random order
    return select(keys, beam)


def exact(
    p: Tensor, q: Tensor, place: Tensor, beam: int, noise: Noise, edge: Tensor
) -> Tensor:
    """As `published`, by recursive rejection: the kept ones are `beam` draws from p without replacement."""
    rows, pairs = torch.arange(len(p), device=p.device), p.shape[1]
    chance = noise.uniform(
        torch.arange(place.shape[1], device=p.device).expand(place.shape), "accept"
    )
    p, q, now = (
        functional.pad(x, (0, 1)) for x in (p, q, p)
    )  # a last pair that is none
    taken = torch.zeros_like(p, dtype=torch.bool)
    filled = torch.zeros_like(rows)
    for draft in range(place.shape[1]):
        pair = place[:, draft]
        looked_at = (pair < pairs) & (filled < beam)
        total = q.sum(1, keepdim=True)
        share = torch.where(total > 0, q / total, 0.0)  # of the next draft
        taking = looked_at & (chance[:, draft] * share[rows, pair] < now[rows, pair])
        rejecting = (looked_at & ~taking).unsqueeze(1)
        taken[rows, pair] |= taking
        filled += taking
        left = (now - share).clamp(min=0)
        now = torch.where(rejecting, _normalised(left, now), now)
        now = torch.where(
            taking.unsqueeze(1), _normalised(p.masked_fill(taken, 0.0), now), now
        )
        q = q.scatter(1, torch.where(looked_at, pair, pairs).unsqueeze(1), 0.0)
    p, now, taken = p[:, :-1], now[:, :-1], taken[:, :-1]
    one = select(
        now.masked_fill(taken, 0.0).log() + noise.gumbel(edge, "one"), 1
    )  # for the beam that is being filled
    taken = taken | torch.zeros_like(taken).scatter_(
        1, one, (filled < beam).unsqueeze(1)
    )
    keys = torch.where(taken, torch.inf, p.log() + noise.gumbel(edge))
    return select(keys, beam)


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Rows that sum to 1; `otherwise` where one is all 0."""
    total = weights.sum(1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


class Noise:
    """Random numbers as hashes of what they are for, so that a request draws the same ones in any batch, on any
    device: (request's key, length that the pass began at, level, use, pair)."""

    USES = ("drafts", "accept", "one", "keep")

    def __init__(self, keys: Tensor, length: int, level: int = 0) -> None:
        self.keys, self.length, self.level = keys, length, level

    def of(self, row: Tensor | None, level: int) -> Noise:
        """That of the requests `row` (all: None) at a level."""
        return Noise(self.keys if row is None else self.keys[row], self.length, level)

    def uniform(self, what: Tensor, use: str) -> Tensor:
        """(R, P) float64 in (0, 1), of `what` (R, P)."""
        salt = (
            (self.length * 64 + self.level) * len(self.USES) + self.USES.index(use) + 1
        )
        bits = mixed(
            mixed(mixed(self.keys) + salt).unsqueeze(1) + (what + 1) * GOLDEN_RATIO
        )
        return ((bits >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53

    def gumbel(self, what: Tensor, use: str = "keep") -> Tensor:
        """(R, P) float64, of the standard Gumbel distribution."""
        return -(-self.uniform(what, use).log()).log()


GOLDEN_RATIO = 0x9E3779B97F4A7C15 - (1 << 64)
"""The step of SplitMix64 as int64."""


def mixed(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64: every bit of the result depends on every bit of `x`."""
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9 - (1 << 64)),
        (27, 0x94D049BB133111EB - (1 << 64)),
    ):
        x = (
            x ^ (x >> shift & (1 << 64 - shift) - 1)
        ) * factor  # a shift that brings in zeros
    return x ^ (x >> 31 & (1 << 33) - 1)
