"""AtSpeed (Lin et al., 2025) on TIGER: a compact T5 draft proposes beams, the frozen teacher verifies them.

    python -m jobs.train --config jobs/configs/atspeed_s.yaml --tables TABLES --sids SIDS --storage runs \\
        --name atspeed_s --model.teacher runs/tiger

AtSpeed-S recommends what its teacher does, but for the order of scores that tie exactly
(`search/speculative.py`, strict), AtSpeed-R draws beams by the teacher's probabilities
(relaxed); both ask it for fewer passes the better the draft is. Appendix D.2 of SID-MLP
says what is ported: T5 in place of a causal language model, valid codes alone, strict
verification by the teacher's top beams, relaxed by rejection sampling. That the draft
is one T5 decoder layer is from its Section 4.2 ("even our smallest single layer"); it
reads the teacher's encoder and embeddings, which the verification needs anyway. The
losses and the draft's beams are those of the AtSpeed paper, with the codebook of a
digit for the vocabulary and the target's own codes as the sequences learned from.

Shapes: `B` requests, `L` levels (codes of an item), `C_l` codes of level l.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import functional

from models.config import check_least, check_positive
from models.metrics.scores import check_finite
from models.retrieval import metrics
from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch
from models.retrieval.decoders.t5 import T5Decoder, T5Target
from models.retrieval.distillation.student import Student, StudentConfig
from models.retrieval.options import AtSpeedOptions, Scores
from models.retrieval.parts import History, Scorer, real_positions
from models.retrieval.recommend import latest, leave_out, recommender
from models.retrieval.retriever import Retriever
from models.retrieval.search.speculative import (
    Rule,
    Speculation,
    SpeculativeResult,
    mix_bits,
    speculative_search,
)
from models.storage.tables import UserError
from models.training.distributed import global_mean

TOP = 20
"""Codes of the draft that AtSpeed-S aligns (the AtSpeed paper's largest target
beam)."""


@dataclass
class AtSpeedConfig(StudentConfig):
    """Options of strict and relaxed verification: the draft model and its number of
    steps.
    """

    beam: int = 50
    """The target's beams (Appendix D.2 of SID-MLP; 10 or 20 in the AtSpeed paper)."""
    scores: Scores = "codebook"
    """What log-probabilities are normalised over when recommending: `codebook` leaves
    the target's as they are (TIGER's of its whole vocabulary), `children` normalises
    them anew over the valid children of a prefix."""
    draft_beam: int = 100
    """Beams that a step drafts: twice the target's, as the AtSpeed paper's 40 for 20;
    `beam` where that is more."""
    draft_steps: int = 4
    """Steps drafted for one verification, at most (the AtSpeed paper's)."""
    draft_layers: int = 1
    """Decoder blocks of the draft (Sec. 4.2 of SID-MLP: a single layer)."""
    draft_d_ff: int = 512
    """Inner width of the draft's feed-forward layers."""
    draft_heads: int = 4
    """Attention heads of the draft, of the teacher's width each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(
            self, ("draft_beam", "draft_layers", "draft_d_ff", "draft_heads")
        )
        check_least(self, ["draft_steps"], 0)
        if self.m:
            raise ValueError(
                f"m {self.m} is not 0; a draft begins with the first digit, leave m out"
            )


@dataclass
class AtSpeedSConfig(AtSpeedConfig):
    """Options of strict verification, which recommends exactly the teacher's items."""


@dataclass
class AtSpeedRConfig(AtSpeedConfig):
    """Relaxed verification: beams drawn by the teacher's probabilities."""

    rule: Rule = "published"
    """How drafts are accepted: `published`, each by itself, or `exact`, so that beams
    follow the teacher's distribution for any draft (`search/speculative.py`)."""
    seed: int = 0
    """What is drawn for a request follows from this, its user and its history."""


def strict_loss(draft: Tensor, teacher: Tensor) -> Tensor:
    """Alignment of AtSpeed-S for one digit, the mean over the batch, of logits (B, C): KL(q || p) of draft q and
    teacher p, plus p_K H(q).

    Both are over the draft's K = 20 likeliest codes. The published divergence is the
    sum over those alone, which is lowest where the draft takes probability away from
    them; here all other codes count as one more, so that it is 0 where the two agree
    and never below. p_K, the teacher's K-th highest probability, weighs the entropy of
    the draft: the flatter the teacher is down to there, the more is won by a draft that
    commits itself.
    """
    top = min(TOP, draft.shape[1])
    log_q, log_p = draft.float().log_softmax(-1), teacher.float().log_softmax(-1)
    kth = log_p.topk(top).values[:, -1].exp()
    log_q, index = log_q.topk(top)
    log_p = log_p.gather(1, index)
    q, p = log_q.exp(), log_p.exp()
    rest_q, rest_p = (1 - q.sum(1)).clamp(min=1e-9), (1 - p.sum(1)).clamp(min=1e-9)
    divergence = (q * (log_q - log_p)).sum(1) + rest_q * (rest_q.log() - rest_p.log())
    return (divergence - kth * (q * log_q).sum(1)).mean()


def relaxed_loss(draft: Tensor, teacher: Tensor) -> Tensor:
    """Alignment of AtSpeed-R for one digit, the mean over the batch, of logits (B, C): the total variation distance,
    which is the chance that a draft is rejected."""
    return (
        0.5
        * (draft.float().softmax(-1) - teacher.float().softmax(-1)).abs().sum(-1).mean()
    )


class AtSpeed(Student):
    """A draft as student, and its teacher's decoder as the target, frozen but part of the weights."""

    can_teach = False
    options_class = AtSpeedOptions
    has_own_metrics = True
    shown_metrics = (*metrics.SHOWN, "acceptance")
    config: AtSpeedConfig
    decoder: T5Decoder
    target: T5Decoder

    @staticmethod
    def build_decoder(config: AtSpeedConfig, teacher: Retriever) -> T5Decoder:
        backbone, target = teacher.backbone, teacher.decoder
        if not isinstance(backbone, T5Backbone) or not isinstance(target, T5Decoder):
            raise UserError(
                "AtSpeed verifies with its teacher's T5 decoder; give a TIGER as model.teacher"
            )
        sizes = replace(
            backbone.sizes,
            num_decoder_layers=config.draft_layers,
            d_ff=config.draft_d_ff,
            num_heads=config.draft_heads,
        )
        return T5Decoder(
            backbone.tokens,
            sizes,
            backbone.embedding,
            codebook_logits=True,
            codebook_scores=True,
        )

    def keep_parts(self, teacher: Retriever) -> None:
        self.target = cast(T5Decoder, teacher.decoder.requires_grad_(False).eval())

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.target.eval()
        return self

    def set_teacher(self, teacher: Retriever) -> None:
        super().set_teacher(teacher)
        self.target.load_state_dict(teacher.decoder.state_dict())

    def forward(self, batch: RequestBatch) -> dict[str, Tensor]:
        """(1 - alpha) CE + alpha times the alignment, summed over the digits (unit `request`)."""
        config, codes = self.config, self.tokens.codes(batch.target)
        history = self.encode(batch)
        logits = self.decoder.teacher_forced(history, codes)
        losses = [
            (1 - config.alpha)
            * functional.cross_entropy(draft.float(), codes[:, level])
            for level, draft in enumerate(logits)
        ]
        if config.alpha > 0:
            align = relaxed_loss if isinstance(config, AtSpeedRConfig) else strict_loss
            taught = self.teacher_logits(batch, history)
            pairs = zip(logits, taught, strict=True)
            losses += [
                config.alpha * align(draft / config.tau, teacher / config.tau)
                for draft, teacher in pairs
            ]
        return {"loss": global_mean(torch.stack(losses).sum(), len(codes))}

    @torch.no_grad()
    def speculate(
        self,
        batch: HistoryBatch,
        k: int,
        beam: int | None = None,
        draft_beam: int | None = None,
        draft_steps: int | None = None,
        scores: Scores | None = None,
        seed: int | None = None,
    ) -> SpeculativeResult:
        """Recommend, and count target passes, drafted steps and accepted steps per
        request.
        """
        config, batch = self.config, latest(batch, self.config.max_history)
        how = Speculation(
            beam=config.beam if beam is None else beam,
            draft_beam=config.draft_beam if draft_beam is None else draft_beam,
            steps=config.draft_steps if draft_steps is None else draft_steps,
            children=self.among_children(scores),
            allowed=batch.allowed,
        )
        keys = None
        if isinstance(config, AtSpeedRConfig):
            how = replace(how, rule=config.rule)
            keys = request_keys(batch, config.seed if seed is None else seed)
        elif seed is not None:
            raise ValueError(
                f"seed {seed} is for what is drawn; AtSpeed-S draws nothing, leave it out"
            )
        history = self.teacher_outputs("encoder", batch) or self.backbone.infer(batch)

        def draft(rows: Tensor) -> Scorer:
            return self.decoder.scorer(
                History(history.states[rows], history.lengths[rows])
            )

        target = T5Target(self.target, history)
        found = speculative_search(
            target, draft, self.trie, len(history.lengths), k, how, keys
        )
        check_finite(found.scores, tail=True)
        return found

    @recommender
    def recommend(  # type: ignore[override]  # no search without the trie
        self,
        batch: HistoryBatch,
        k: int,
        beam: int | None = None,
        draft_beam: int | None = None,
        draft_steps: int | None = None,
        scores: Scores | None = None,
        seed: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(items, scores), each (B, k), by falling score of the target; options left out are the config's.

        Where fewer than k items are found the tail is item -1 with score -inf. `seed`
        is of AtSpeed-R alone.
        """
        found = self.speculate(batch, k, beam, draft_beam, draft_steps, scores, seed)
        return found.items, found.scores

    def measure(
        self,
        batch: RequestBatch,
        by_user: int = 0,
        shown: Tensor | None = None,
        unseen: bool | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Sum the family's metrics, target passes and drafted steps."""
        k = max(metrics.CUTOFFS)
        more = batch.history.shape[1] if unseen else 0
        found = self.speculate(batch, k + more, **options)
        items = found.items
        if unseen:
            items = leave_out(items, found.scores, batch, k)[0]
        sums = metrics.measure_ranking(items, batch, by_user, shown)
        steps = {
            "drafted": found.drafted,
            "accepted": found.accepted,
            "target_passes": found.passes,
        }
        return sums | {name: float(count.sum()) for name, count in steps.items()}

    @classmethod
    def metric_means(cls, sums: dict[str, Any]) -> dict[str, float]:
        """Return the family's metrics, `acceptance` and `target_passes`.

        `acceptance` is the share of the drafted steps that was accepted;
        `target_passes` is per request, of which a beam search needs one per digit.
        """
        ranking = dict(sums)
        drafted, accepted = ranking.pop("drafted"), ranking.pop("accepted")
        acceptance = float(accepted / drafted) if drafted else 0.0
        return super().metric_means(ranking) | {"acceptance": acceptance}

    @classmethod
    def metric_names(cls, catalogue: Catalogue) -> list[str]:
        return [*super().metric_names(catalogue), "target_passes", "acceptance"]

    @classmethod
    def format_metrics(cls, metrics_: dict[str, float]) -> list[str]:
        """Return the family's lines, and one on the verification."""
        return [
            *super().format_metrics(metrics_),
            f"  {metrics_['acceptance']:.1%} of the drafted steps accepted, "
            f"{metrics_['target_passes']:.2f} passes of the target per request",
        ]


class AtSpeedS(AtSpeed):
    """AtSpeed with strict verification: it recommends the teacher's items."""

    name = "atspeed_s"
    config_class = AtSpeedSConfig


class AtSpeedR(AtSpeed):
    """AtSpeed with relaxed verification: beams drawn by the teacher's probabilities."""

    name = "atspeed_r"
    config_class = AtSpeedRConfig


def request_keys(batch: HistoryBatch, seed: int) -> Tensor:
    """Return (B,) int64 seeds of the requests' random draws, independent of padding."""
    keys = mix_bits(batch.user + seed)
    real = real_positions(batch.history_length, batch.history.shape[1])
    for items, mask in zip(batch.history.unbind(1), real.unbind(1), strict=True):
        keys = torch.where(mask, mix_bits(keys ^ items), keys)
    return keys
