"""Speculative beam search (AtSpeed, Lin et al., 2025).

A draft model proposes beams of several steps, and the target model verifies all of them
in one pass.

    options = Speculation(beam=20, draft_beam=40)
    strict = speculative_search(target, draft, trie, requests, k, options)
    relaxed = speculative_search(target, draft, trie, requests, k, options, keys)

A pass starts with the target's beams of some length. The draft extends them step by
step to a tree of prefixes, and the target computes the log-probabilities of the next
code after every prefix of the tree. Then the steps are verified in order. Each step
ends with the target's beams: if all of them are in the tree, the step is accepted, and
the same pass verifies the next step; otherwise a new pass starts with these beams. A
pass always advances one step more than it accepts, so a poor draft costs time but not
quality. The last code needs no draft, as the target has its log-probabilities.

Strict search: the target's beams are the best ones, as in `beam_search`. For any
draft, items, scores and ties equal the result of `beam_search` with the target (up to
rounding in the pass over the tree).

Relaxed search: the target's beams are sampled. Let p be the softmax over all pairs
(beam, next code) of the target's summed log-probabilities, and q the softmax of the
draft's log-probabilities over the same pairs. Drafts are sampled from q without
replacement (the highest log q + Gumbel noise, in descending order) instead of by beam
search, because the test min(1, p/q) is meant for samples of q. By the rule of the
AtSpeed paper, each draft is accepted with probability min(1, p/q), independently. If
more than `beam` are accepted, a random subset is used; if fewer, the other beams are
sampled from max(p - q, 0) over the pairs that were not accepted (or from p if no mass
is left). With one draft for one beam, this is speculative sampling and follows p
exactly. With more drafts, accepted pairs are biased to min(p, q), as drafts are
accepted independently. (In the tests, with 4 drafts for 2 beams, the total variation
distance to the target's distribution is 0.21.) Scores of results are always the
target's.

The last code is sampled from p; then items are ranked by the target's score.

Shapes: `B` requests, `R` of them that are at the same length, `W` beams, `N` drafted
beams, `M` children of the widest node, `P = W * M` pairs of a beam and its next code,
`C_l` codes of level l, `L` levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.model import check_finite
from models.retrieval.search import Scorer, Trie, score_pairs, select, top_k

Draft = Callable[[Tensor], Scorer]
"""Makes the draft's scorer for requests, given by their indices (R,)."""

Tree = list[tuple[Tensor, Tensor]]
"""Prefixes of R requests by length, without the empty prefix: (R, W_l) index of each
prefix's parent among the shorter prefixes, and (R, W_l) last code of each prefix."""

Target = Callable[[Tensor, Tree, int], list[Tensor]]
"""Computes the target's log-probabilities (R, W_l, C_l) of the next code after each
prefix, in one pass, given the indices (R,) of the requests, their prefixes, and the
least length of the prefixes to score."""


@dataclass(frozen=True)
class Speculation:
    """Options of a speculative search."""

    beam: int
    """Number of beams of the target."""
    draft_beam: int = 40
    """Number of drafted beams per step, raised to `beam` if lower."""
    steps: int = 4
    """Most steps drafted per pass; 0 for a search by the target alone."""
    children: bool = False
    """Whether to normalise log-probabilities over the valid children, as in
    `beam_search`."""
    allowed: Tensor | None = None
    """(E,) mask of the edges that lead to allowed items, as in `beam_search`."""


class SpeculativeResult(NamedTuple):
    """Items and scores of a search, and the cost of the search."""

    items: Tensor
    """(B, k) items, best first; -1 if there are fewer than k."""
    scores: Tensor
    """(B, k) scores of the target in descending order, -inf if there are fewer
    items."""
    passes: Tensor
    """(B,) number of passes of the target."""
    drafted: Tensor
    """(B,) number of drafted steps."""
    accepted: Tensor
    """(B,) number of accepted steps."""


class Beams(NamedTuple):
    """The target's beams, of equal length for all R requests."""

    rows: Tensor
    """(R,) indices of the requests."""
    codes: Tensor
    """(R, W, length) codes."""
    node: Tensor
    """(R, W) nodes in the trie."""
    score: Tensor
    """(R, W) sums of log-probabilities, -inf for missing beams."""


class Drafts(NamedTuple):
    """Drafted prefixes of one length; at the start of a pass, the target's beams."""

    node: Tensor
    """(R, N) nodes in the trie."""
    score: Tensor
    """(R, N) sum of the draft's log-probabilities, added to the target's score at the
    start of the pass."""
    log_probs: Tensor
    """(R, N, C) log-probabilities of the draft for the next code; C = 0 for the longest
    prefixes."""


def speculative_search(
    target: Target,
    draft: Draft,
    trie: Trie,
    num_requests: int,
    k: int,
    options: Speculation,
    keys: Tensor | None = None,
) -> SpeculativeResult:
    """Search for the items of several requests; see the module's docstring.

    Args:
        target: Model that verifies drafts.
        draft: Model that proposes drafts.
        trie: Trie of the catalogue.
        num_requests: Number B of requests.
        k: Number of items per request.
        options: Options of the search.
        keys: (B,) int64 seeds of the requests for a relaxed search; None for a strict
            search.
    """
    device = trie.leaves.device
    counts = torch.zeros((3, num_requests), dtype=torch.long, device=device)
    result = SpeculativeResult(
        torch.full((num_requests, k), -1, device=device),
        torch.full((num_requests, k), -torch.inf, device=device),
        *counts,
    )
    all_rows = torch.arange(num_requests, device=device)
    root = torch.zeros_like(all_rows).unsqueeze(1)
    # per length: beams from which a pass has to start
    waiting: list[list[Beams]] = [[] for _ in range(trie.levels)]
    waiting[0].append(Beams(all_rows, root[..., None][..., :0], root, root.float()))
    for parts in waiting:
        columns = zip(*(part for part in parts if len(part.rows)), strict=True)
        joined = [torch.cat(column) for column in columns]
        if not joined:
            continue
        # draft, verify, and advance each request as far as its drafts are accepted
        beams = Beams(*joined)
        length = beams.codes.shape[2]
        tree, drafts = _draft(draft, trie, beams, options, keys)
        verified = target(beams.rows, tree, length)
        result.passes[beams.rows] += 1
        result.drafted[beams.rows] += len(drafts) - 1
        # (R,) index of each advancing request among the requests of the pass
        row = torch.arange(len(beams.rows), device=beams.rows.device)
        # (R, W) index of each beam among the tree's prefixes of its length
        beam = torch.arange(beams.node.shape[1], device=row.device)
        prefix = beam.expand(beams.node.shape)
        for step, tree_log_probs in enumerate(verified):
            level = length + step
            noise = None if keys is None else Noise(keys[beams.rows], length, level)
            # pairs of a beam and one of its children, ordered by beam and child: (R, P)
            scores, edge, code = score_pairs(
                trie,
                level,
                beams.node,
                beams.score,
                take_rows(tree_log_probs[row], prefix),
                options.children,
                options.allowed,
            )
            num_beams = beams.node.shape[1]
            per_beam = scores.shape[1] // num_beams
            if level == trie.levels - 1:
                count = max(options.beam, k)
                if noise is not None and count < scores.shape[1]:
                    sampled = select(scores + noise.gumbel(edge), count)
                    others = torch.full_like(scores, -torch.inf)
                    scores = others.scatter_(1, sampled, scores.gather(1, sampled))
                position, score = top_k(scores, k)
                item = trie.leaves[edge.gather(1, position.clamp(min=0))]
                result.items[beams.rows] = torch.where(score == -torch.inf, -1, item)
                result.scores[beams.rows] = score
                break
            width = min(options.beam, trie.edges[level])
            # requests of other passes may have more pairs: one width for all
            missing = (0, max(0, width - scores.shape[1]))
            scores = functional.pad(scores, missing, value=-torch.inf)
            edge, code = functional.pad(edge, missing), functional.pad(code, missing)
            is_drafted = step + 1 < len(drafts)
            if is_drafted:
                following = drafts[step + 1]
                is_missing = following.score[row] == -torch.inf
                drafted = following.node[row].masked_fill(is_missing, -1)  # (R, N)
            if is_drafted and noise is not None:
                current = drafts[step]
                draft_scores, _, _ = score_pairs(
                    trie,
                    level,
                    beams.node,
                    current.score[row].gather(1, prefix),
                    take_rows(current.log_probs[row], prefix),
                    options.children,
                    options.allowed,
                )
                draft_scores = functional.pad(
                    draft_scores, (0, scores.shape[1] - draft_scores.shape[1])
                )
                draft_scores = draft_scores.masked_fill(
                    scores == -torch.inf, -torch.inf
                )
                # the rule of the AtSpeed paper; p and q are (R, P)
                p, q = _softmax(scores), _softmax(draft_scores)
                is_accepted = noise.uniform(edge, "accept") * q < p
                is_accepted &= _find_nodes(drafted, edge) >= 0
                residual = torch.where(is_accepted, 0.0, p - q).clamp(min=0)
                gumbel = noise.gumbel(edge)
                # the order of selection: accepted pairs at random, samples of the
                # residual, samples of p
                order = torch.where(
                    residual > 0, residual.log() + gumbel, p.log() + gumbel - 1e4
                )
                order = torch.where(is_accepted, 1e4 + gumbel, order)
                position = select(order, width)
            elif noise is not None:
                position = select(scores + noise.gumbel(edge), width)
            else:
                position = select(scores, width)
            parent = (position // per_beam).clamp(max=num_beams - 1)
            newest = code.gather(1, position).unsqueeze(-1)
            beams = Beams(
                rows=beams.rows,
                codes=torch.cat([take_rows(beams.codes, parent), newest], -1),
                node=edge.gather(1, position),
                score=scores.gather(1, position),
            )
            if not is_drafted:
                waiting[level + 1].append(beams)
                break
            prefix = _find_nodes(drafted, beams.node)
            accepted = ((prefix >= 0) | (beams.score == -torch.inf)).all(1)
            waiting[level + 1].append(Beams(*(x[~accepted] for x in beams)))
            beams = Beams(*(x[accepted] for x in beams))
            row = row[accepted]
            prefix = prefix[accepted].clamp(min=0)
            result.accepted[beams.rows] += 1
            if not len(row):
                break
    return result


def _draft(
    draft: Draft, trie: Trie, beams: Beams, options: Speculation, keys: Tensor | None
) -> tuple[Tree, list[Drafts]]:
    """Draft a tree from the target's beams."""
    tree: Tree = []
    length = beams.codes.shape[2]
    last = min(length + options.steps, trie.levels - 1)
    node, score = beams.node, beams.score
    drafts = []
    log_probs = score.unsqueeze(-1)
    if last > length:
        scorer = draft(beams.rows)
        log_probs = scorer.start().unsqueeze(1)
    beam = torch.arange(node.shape[1], device=node.device)
    # the first codes of the tree, and of the draft's search, are the target's
    for level in range(length):
        index = beam if level else torch.zeros_like(beam)
        tree.append((index.expand(node.shape), beams.codes[..., level]))
        if last > length:
            log_probs = scorer.step(*tree[-1])
    for level in range(length, last):
        drafts.append(Drafts(node, score, log_probs))
        scores, edge, token = score_pairs(
            trie, level, node, score, log_probs, options.children, options.allowed
        )
        width = max(options.draft_beam, options.beam)
        count = min(width, trie.edges[level], scores.shape[1])
        if keys is None:
            position = select(scores, count)
        else:
            noise = Noise(keys[beams.rows], length, level)
            position, _ = top_k(scores + noise.gumbel(edge, "drafts"), count)
        parent = position // (scores.shape[1] // node.shape[1])
        node = edge.gather(1, position)
        score = scores.gather(1, position)
        tree.append((parent, token.gather(1, position)))
        if level + 1 < last:
            log_probs = scorer.step(*tree[-1])
    # NaN scores of a draft do not show in the results
    check_finite(score, tail=True)
    return tree, [*drafts, Drafts(node, score, log_probs[..., :0])]


def _find_nodes(nodes: Tensor, wanted: Tensor) -> Tensor:
    """Return the index in `nodes` (R, N) of each wanted node (R, P), -1 for none."""
    ascending, order = nodes.sort(1)
    index = torch.searchsorted(ascending, wanted).clamp(max=nodes.shape[1] - 1)
    is_found = ascending.gather(1, index) == wanted
    return torch.where(is_found, order.gather(1, index), -1)


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows `index` (R, W) of `values` (R, N, C): (R, W, C)."""
    return values.gather(1, index.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def _softmax(scores: Tensor) -> Tensor:
    """Return the softmax of `scores` (R, P) in float64, 0 in rows without a pair."""
    return scores.double().softmax(1).nan_to_num(0.0)


class Noise:
    """Random numbers by hashing, equal in every batch and on every device.

    A number is a hash of the request's key, the length at the start of the pass, the
    level, the use of the number, and an id.
    """

    SALTS: ClassVar = {"drafts": 1, "accept": 2, "beams": 4}
    """Uses of numbers, which have independent numbers, and their salts up to 4."""

    def __init__(self, keys: Tensor, length: int, level: int) -> None:
        """Start the numbers of a level.

        Args:
            keys: (R,) int64 keys of the requests.
            length: Length of the beams at the start of the pass.
            level: Level of the children.
        """
        self.keys = mix_bits(keys)
        self.salt = (length * 64 + level) * 4

    def uniform(self, ids: Tensor, use: str) -> Tensor:
        """Return uniform numbers (R, P) in (0, 1), float64.

        Args:
            ids: (R, P) ids, such as edges; equal ids of a request have equal numbers.
            use: A key of `SALTS`.
        """
        request = mix_bits(self.keys + self.salt + self.SALTS[use]).unsqueeze(1)
        bits = mix_bits(request + (ids + 1) * GOLDEN_RATIO)
        # the highest 53 bits, as a float64 has
        return ((bits >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53

    def gumbel(self, ids: Tensor, use: str = "beams") -> Tensor:
        """Return standard Gumbel noise (R, P), float64; arguments as in `uniform`."""
        return -(-self.uniform(ids, use).log()).log()


GOLDEN_RATIO = 0x9E3779B97F4A7C15 - (1 << 64)
"""The increment of SplitMix64 as int64."""


def mix_bits(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 to int64 values."""
    first, second = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
    x = (x ^ _logical_shift(x, 30)) * first
    x = (x ^ _logical_shift(x, 27)) * second
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 values to the right by `bits`, filled with zeros."""
    return x >> bits & (1 << 64 - bits) - 1
