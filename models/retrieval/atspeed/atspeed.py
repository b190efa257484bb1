r"""AtSpeed (Lin et al., 2025) on TIGER: a T5 draft whose beams the teacher verifies.

    python -m jobs.train --config jobs/configs/retrieval/atspeed_s.yaml \
        --tables TABLES --sids SIDS --storage runs --name atspeed_s \
        --model.teacher runs/tiger

AtSpeed-S recommends the items of its teacher, up to the order of exactly tied scores
(strict search of `speculative.py`). AtSpeed-R samples beams from the teacher's
probabilities (relaxed search). The better the draft, the fewer passes of the teacher a
search needs.

The port follows Appendix D.2 of SID-MLP: T5 in place of a causal language model, valid
codes only, strict verification by the teacher's top beams, and relaxed verification by
rejection sampling. The draft is one T5 decoder layer (Section 4.2 of SID-MLP: "even our
smallest single layer"). It reads the teacher's encoder and embeddings, which the
verification needs anyway. The losses and the draft's beams are from the AtSpeed paper;
here the vocabulary is the codebook of a level, and the training sequences are the
targets' codes.

Shapes: `B` requests, `L` levels (codes of an item), `C_l` codes of level l.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional

from core.options import STRICT
from models.retrieval import metrics
from models.retrieval.atspeed.speculative import (
    Speculation,
    SpeculativeResult,
    Tree,
    mix_bits,
    speculative_search,
    take_rows,
)
from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch
from models.retrieval.distillation.student import Student, StudentConfig
from models.retrieval.distillation.teacher import require_class
from models.retrieval.options import AtSpeedOptions, Scores
from models.retrieval.recommend import recommender
from models.retrieval.retriever import History, Retriever, real_positions
from models.retrieval.tiger.decoder import T5Decoder
from models.retrieval.tiger.tiger import Tiger
from models.training.distributed import global_mean

TOP_CODES = 20
"""Number K of the draft's likeliest codes that `strict_loss` aligns (the AtSpeed
paper's largest target beam)."""


@dataclass(config=STRICT)
class AtSpeedConfig(StudentConfig):
    """Options of both verifications: sizes of the draft model, beams and steps."""

    beam: PositiveInt = 50
    """Number of beams of the target (Appendix D.2 of SID-MLP; 10 or 20 in the AtSpeed
    paper)."""
    scores: Scores = "codebook"
    """Codes that log-probabilities are normalised over when recommending: `codebook`
    uses the target's log-probabilities unchanged, `children` normalises them again over
    the valid children of a prefix."""
    draft_beam: PositiveInt = 100
    """Number of beams drafted per step: twice the target's, as in the AtSpeed paper (40
    for 20). Raised to `beam` if lower."""
    draft_steps: NonNegativeInt = 4
    """Most steps drafted per verification (AtSpeed paper)."""
    draft_layers: PositiveInt = 1
    """Decoder blocks of the draft (Sec. 4.2 of SID-MLP: a single layer)."""
    draft_d_ff: PositiveInt = 512
    """Inner width of the draft's feed-forward layers."""
    draft_heads: PositiveInt = 4
    """Attention heads of the draft; each has the width of the teacher's heads."""


@dataclass(config=STRICT)
class AtSpeedRConfig(AtSpeedConfig):
    """Options of AtSpeed-R: relaxed verification, with sampled beams."""

    seed: NonNegativeInt = 0
    """Seed of the samples. A request's samples depend on the seed, its user and its
    history only."""


def strict_loss(draft: Tensor, teacher: Tensor) -> Tensor:
    """Return the alignment loss of AtSpeed-S for one level, the mean over the batch.

        KL(q || p) + p_K H(q)

    q is the draft's and p the teacher's distribution over the draft's K = `TOP_CODES`
    likeliest codes, and p_K the teacher's K-th highest probability. The entropy term
    H(q) favours drafts with few likely codes.

    The published divergence sums over the K codes only, so the draft could lower it by
    moving probability to other codes. Here the other codes together are one more class,
    so the divergence is never negative, and 0 if draft and teacher agree.

    Args:
        draft: (B, C_l) logits.
        teacher: (B, C_l) logits.
    """
    top = min(TOP_CODES, draft.shape[1])
    log_q = draft.float().log_softmax(-1)
    log_p = teacher.float().log_softmax(-1)
    kth_probability = log_p.topk(top).values[:, -1].exp()  # (B,)
    log_q, index = log_q.topk(top)  # (B, K)
    log_p = log_p.gather(1, index)
    q, p = log_q.exp(), log_p.exp()
    # probability of all other codes
    other_q = (1 - q.sum(1)).clamp(min=1e-9)
    other_p = (1 - p.sum(1)).clamp(min=1e-9)
    divergence = (q * (log_q - log_p)).sum(1)
    divergence = divergence + other_q * (other_q.log() - other_p.log())
    entropy = -(q * log_q).sum(1)
    return (divergence + kth_probability * entropy).mean()


def relaxed_loss(draft: Tensor, teacher: Tensor) -> Tensor:
    """Return the alignment loss of AtSpeed-R for one level, the mean over the batch.

    The loss is the total variation distance, the probability that a draft is rejected.

    Args:
        draft: (B, C_l) logits.
        teacher: (B, C_l) logits.
    """
    difference = draft.float().softmax(-1) - teacher.float().softmax(-1)
    return 0.5 * difference.abs().sum(-1).mean()


@torch.no_grad()
def score_tree(
    decoder: T5Decoder, history: History, tree: Tree, first: int
) -> list[Tensor]:
    """Compute log-probabilities of the next code after each prefix, in one pass.

    All prefixes of a user are positions of one sequence. A mask restricts the attention
    of each prefix to itself and its ancestors, and the relative position bias depends
    on the prefix's length instead of its position.

    Args:
        decoder: The target, a TIGER's decoder.
        history: Histories of R users.
        tree: Prefixes of the users; with the empty prefix they are T positions.
        first: Least length of the prefixes to score.

    Returns:
        (R, W_l, C_l) for every length l from `first` to the longest.
    """
    tokens, num_users = decoder.tokens, len(history.lengths)
    device = history.lengths.device
    widths = [1, *(codes.shape[1] for _, codes in tree)]
    # T5's start token is padding, 0
    inputs = [torch.zeros_like(history.lengths).unsqueeze(1)]
    inputs += [codes + tokens.first[level] for level, (_, codes) in enumerate(tree)]
    # (T,) number of codes of each prefix
    length = torch.cat(
        [
            torch.full((width,), level, device=device)
            for level, width in enumerate(widths)
        ]
    )
    itself = torch.eye(len(length), dtype=torch.bool, device=device)
    is_ancestor = list(itself.repeat(num_users, 1, 1).split(widths, 1))
    for level, (parents, _) in enumerate(tree):
        is_ancestor[level + 1] |= take_rows(is_ancestor[level], parents)
    length_bias = decoder.stack.position_bias(len(widths))[0]
    bias = length_bias[:, length[:, None], length]  # (H, T, T)
    mask = ~torch.cat(is_ancestor, 1).unsqueeze(1)  # (R, 1, T, T)
    bias = bias.masked_fill(mask, -torch.inf)
    embedded = decoder.embedding(torch.cat(inputs, 1))  # (R, T, D)
    states = decoder.stack(embedded, bias, 0.0, history.states, history.padding)
    scale = decoder.stack.sizes.d_model**-0.5  # as in T5 with tied embeddings
    by_length = (states * scale).split(widths, 1)
    log_probs = []
    for level in range(first, len(widths)):
        logits = functional.linear(by_length[level], decoder.embedding.weight).float()
        codebook = tokens.first[level], tokens.sizes[level]
        log_probs.append(logits.log_softmax(-1).narrow(-1, *codebook))
    return log_probs


class AtSpeed(Student):
    """A student that drafts, and the teacher's frozen decoder, which verifies."""

    verifies = True
    options_class = AtSpeedOptions
    config: AtSpeedConfig
    decoder: T5Decoder
    """Decoder of the draft."""
    reused: T5Decoder
    """The teacher's decoder, which is the target."""

    @staticmethod
    def build_decoder(config: AtSpeedConfig, teacher: Retriever) -> T5Decoder:
        """Return the decoder of the draft."""
        backbone = require_class(teacher, Tiger).backbone
        sizes = replace(
            backbone.sizes,
            num_decoder_layers=config.draft_layers,
            d_ff=config.draft_d_ff,
            num_heads=config.draft_heads,
        )
        return T5Decoder(backbone, sizes, codebooks=True)

    def forward(self, batch: RequestBatch) -> dict[str, Tensor]:
        """Return (1 - alpha) CE + alpha times the alignment loss, summed over levels.

        Each level is conditioned on the target's codes before it.
        """
        config = self.config
        codes = self.tokens.codes(batch.target)
        history = self.encode(batch)
        logits = self.decoder.teacher_forced(history, codes)
        losses = []
        for level, draft in enumerate(logits):
            loss = functional.cross_entropy(draft.float(), codes[:, level])
            losses.append((1 - config.alpha) * loss)
        if config.alpha > 0:
            align = relaxed_loss if isinstance(config, AtSpeedRConfig) else strict_loss
            teacher_logits = self.teacher_logits(batch, history)
            for draft, teacher in zip(logits, teacher_logits, strict=True):
                loss = align(draft / config.tau, teacher / config.tau)
                losses.append(config.alpha * loss)
        return {"loss": global_mean(torch.stack(losses).sum(), len(codes))}

    @recommender
    def speculate(
        self, batch: HistoryBatch, k: int, **options: Any
    ) -> SpeculativeResult:
        """Search speculatively.

        Args:
            batch: Histories of B requests.
            k: Number of items to return.
            options: Options of the config that are replaced.

        Returns:
            Items and scores, and counts of target passes, drafted steps and accepted
            steps per request.
        """
        config = replace(self.config, **options)
        keys = None
        if isinstance(config, AtSpeedRConfig):
            keys = mix_bits(batch.user + config.seed)  # (B,)
            is_real = real_positions(batch.history_length, batch.history.shape[1])
            # position by position
            pairs = zip(batch.history.unbind(1), is_real.unbind(1), strict=True)
            for items, mask in pairs:
                keys = torch.where(mask, mix_bits(keys ^ items), keys)
        history = self.backbone.infer(batch)
        return speculative_search(
            lambda rows, tree, first: score_tree(
                self.reused, history.rows(rows), tree, first
            ),
            lambda rows: self.decoder.scorer(history.rows(rows)),
            self.trie,
            len(history.lengths),
            k,
            Speculation(
                config.beam,
                config.draft_beam,
                config.draft_steps,
                config.scores == "children",
                batch.allowed,
            ),
            keys,
        )

    def recommend(
        self, batch: HistoryBatch, k: int, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Rank items by the target's log-probability of their codes.

        Args:
            batch: Histories of B requests.
            k: Number of items to return.
            options: Options of `speculate`.

        Returns:
            Items and scores, (B, k) both, best first. If fewer than k items are found,
            the tail is item -1 with score -inf.
        """
        items, scores, *_ = self.speculate(batch, k, **options)
        return items, scores

    def measure(
        self,
        batch: RequestBatch,
        by_user: int = 0,
        shown: Tensor | None = None,
        trained: Tensor | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the sums of the kind's metrics, and of target passes and steps.

        The arguments are those of `RetrievalModel.measure`.
        """
        items, _, *counts = self.speculate(batch, max(metrics.CUTOFFS), **options)
        sums = metrics.measure_ranking(items, batch, by_user, shown, trained)
        counts = counts or [items.new_zeros(0)] * 3  # of an empty batch
        names = ("target_passes", "drafted", "accepted")
        totals = zip(names, (float(count.sum()) for count in counts), strict=True)
        return sums | dict(totals)

    @classmethod
    def metric_means(cls, sums: dict[str, Any]) -> dict[str, float]:
        """Return the kind's metrics, `acceptance` and `target_passes`.

        `acceptance` is the share of drafted steps that were accepted. `target_passes`
        is the mean number of target passes per request; beam search needs one per
        level.
        """
        drafted, accepted = sums["drafted"], sums["accepted"]
        means = super().metric_means(sums)
        del means["drafted"], means["accepted"]
        return means | {"acceptance": float(accepted / drafted) if drafted else 0.0}

    @classmethod
    def metric_names(cls, catalogue: Catalogue) -> list[str]:
        """Return the names of the metrics of `metric_means`."""
        return [*super().metric_names(catalogue), "target_passes", "acceptance"]

    @classmethod
    def shown_metrics(cls) -> tuple[str, ...]:
        """Return the metrics of the best epoch that are printed after a training."""
        return (*super().shown_metrics(), "acceptance")

    @classmethod
    def format_metrics(cls, metrics_: dict[str, float]) -> list[str]:
        """Return the lines of retrieval, and one with acceptance rate and passes."""
        return [
            *super().format_metrics(metrics_),
            f"  {metrics_['acceptance']:.1%} of the drafted steps accepted, "
            f"{metrics_['target_passes']:.2f} passes of the target per request",
        ]


class AtSpeedS(AtSpeed):
    """AtSpeed with strict verification, which recommends the teacher's items."""

    name = "atspeed_s"
    config_class = AtSpeedConfig


class AtSpeedR(AtSpeed):
    """AtSpeed with relaxed verification, which samples beams by the teacher."""

    name = "atspeed_r"
    config_class = AtSpeedRConfig
