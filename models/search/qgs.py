"""QGS: query-conditioned generative search (Song et al., 2026), and HSTU as the paper compares with it.

    python -m jobs.train --config jobs/configs/qgs.yaml --tables TABLES --text TEXT --storage runs --name qgs

Behaviours are query-item pair tokens (Eq. 1 and 2), read by the Linear HSTU encoder
(Eq. 6-10). Trained to predict the next item given the next query (Eq. 3-5) together
with ranking, where HFG-Attention (Eq. 11-13) brings in the candidate's features. The
encoder runs once per row of a batch; every request of the row takes the state after its
own past, and the head that predicts the next item in training gives the sequence's part
of the ranking too.

The ablations of Table 3, the sizes of Table 4 and HSTU are settings of this; so is
HLLM, but for its item tower.

Shapes: `B` rows, `T` positions, `R` requests, `N` candidates, `D` encoder width, `E`
reduced text, `F` features.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import check_least, check_positive
from models.label_loss import label_loss
from models.search.catalogue import SearchCatalogue
from models.search.data import SearchBatch
from models.search.encoders import (
    CausalBert,
    HSTUEncoder,
    LinearHSTUEncoder,
    copy_pretrained,
    pretrained_sizes,
)
from models.search.ranker import Ranker, RankerConfig
from models.storage.tables import UserError
from models.training.distributed import global_mean


@dataclass
class QGSConfig(RankerConfig):
    """Settings of QGS; the defaults are the paper's."""

    encoder: Literal["linear_hstu", "hstu", "transformer"] = "linear_hstu"
    """How behaviours are read (Table 3 of QGS compares the three)."""
    width: int = 512
    """Width of the encoder (d_h, Sec. 3.7 of QGS)."""
    num_layers: int = 12
    """Layers of the encoder (N, Sec. 3.7 of QGS)."""
    num_heads: int = 8
    """Heads of `hstu` and `transformer` (Sec. 4.1 of QGS); Linear HSTU has none."""
    ffn: int = 2048
    """Inner width of the transformer's feed-forward blocks; the others have none."""
    pretrained: str = field(default="", metadata={"names": "encoder"})
    """Encoder `transformer`: folder or name of the pretrained BERT that it starts from,
    or `minilm`, a pip package; read in training only."""
    token: Literal["pair", "item"] = "pair"
    """Text of a behaviour: document and query together (Eq. 1 of QGS), or the document
    alone."""
    context_features: bool = True
    """Whether a behaviour's token has its features f_t (Eq. 1; "contextual feats. in
    pair tok." of Table 3)."""
    query_condition: Literal["query", "joint", "none"] = "query"
    """What the prediction head knows of the next query (Eq. 3): its own text, the
    paper's literal [SEP] output, which has seen the document that is to be predicted,
    or nothing."""
    infonce_weight: float = 0.1
    """Weight of the InfoNCE loss beside the ranking loss; the paper gives none. 0
    leaves it out."""
    temperature: float = 0.1
    """Temperature of InfoNCE (Sec. 3.7)."""
    negatives: Literal["position", "batch"] = "position"
    """InfoNCE's negatives: other users' items at the same position (Eq. 5), or at all
    positions of the batch."""
    next_item: Literal["token", "document"] = "token"
    """What InfoNCE compares predictions with: the next behaviour's token (Sec. 3.4),
    whose features and query tell it from its negatives without the history, or its
    document alone."""
    group_attention: bool = True
    """HFG-Attention over groups of features (Sec. 3.6)."""
    match: bool = False
    """Whether the towers also read how similar the predicted next item and a
    candidate's document are, as InfoNCE compares them (not of the paper); with
    `next_item: document` alone."""

    @property
    def reads_times(self) -> bool:
        return self.encoder == "hstu"

    @property
    def reads_history_queries(self) -> bool:
        return self.token == "pair" or self.query_condition != "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("width", "num_layers", "num_heads", "ffn"))
        if self.encoder != "linear_hstu" and self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}; change either"
            )
        check_least(self, ("infonce_weight",), 0)
        if not self.temperature > 0:
            raise ValueError(
                f"temperature {self.temperature} is not above 0; the paper's is 0.1"
            )
        if self.pretrained and self.encoder != "transformer":
            raise ValueError(
                f"pretrained is '{self.pretrained}', which encoder '{self.encoder}' cannot start from"
            )
        if self.match and not (self.infonce_weight and self.next_item == "document"):
            raise ValueError(
                f"match is true, which compares documents as InfoNCE does, but next_item is '{self.next_item}' and "
                f"infonce_weight {self.infonce_weight:g}; use next_item document and a weight above 0"
            )


@dataclass
class HSTUConfig(QGSConfig):
    """HSTU (Zhai et al., 2024) as QGS compares with it: item tokens, quadratic attention, no query condition; 12
    layers, 8 heads, 768 (Sec. 4.1 of QGS)."""

    encoder: Literal["linear_hstu", "hstu", "transformer"] = "hstu"
    """How behaviours are read."""
    width: int = 768
    """Width of the encoder."""
    token: Literal["pair", "item"] = "item"
    """Text of a behaviour: the document alone."""
    query_condition: Literal["query", "joint", "none"] = "none"
    """The next item is predicted from the past alone."""
    group_attention: bool = False
    """No HFG-Attention."""


class QGS(Ranker):
    """See the module."""

    name = "qgs"
    config_class = QGSConfig
    config: QGSConfig

    def __init__(self, config: QGSConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(
            config, catalogue, sequence_width=config.width, match=config.match
        )
        if config.query_condition == "joint":
            if not catalogue.text.joint.shape[1]:
                raise UserError(
                    "query_condition is joint, but the text has no joint form; jobs.encode can make it"
                )
            warnings.warn(
                "query_condition 'joint' has seen the document to predict: a leak, as in the paper",
                stacklevel=2,
            )
        features = len(self.scale.columns) if config.context_features else 0
        self.project = nn.Linear(
            features + config.text_width, config.width
        )  # W_proj of Eq. 2
        self.position = nn.Embedding(config.max_history, config.width)  # p_t of Eq. 2
        nn.init.normal_(self.position.weight, std=0.02)
        self.start = nn.Parameter(
            torch.zeros(config.width)
        )  # the state before any behaviour
        self.encoder: nn.Module = make_encoder(config)
        query_width = 0 if config.query_condition == "none" else config.text_width
        self.head = nn.Sequential(
            nn.Linear(config.width + query_width, config.width),
            nn.ReLU(),
            nn.Linear(config.width, config.width),
        )
        if config.infonce_weight:
            known = (
                config.text_width
                if config.next_item == "document"
                else features + config.text_width
            )
            self.target = nn.Linear(
                known, config.width, bias=False
            )  # W_tgt of Sec. 3.4

    @classmethod
    def resolve_config(cls, config: Any, catalogue: Any) -> Any:
        """Return the config with the sizes of the pretrained encoder that it names."""
        if not config.pretrained:
            return config
        return replace(config, **pretrained_sizes(config.pretrained))

    def prepare_training(
        self, catalogue: Any, datasets: Mapping[str, Any]
    ) -> list[str]:
        """Load the pretrained weights that the config names into the encoder."""
        if self.config.pretrained:
            copy_pretrained(cast(CausalBert, self.encoder), self.config.pretrained)
        return []

    def document(self, item: Tensor) -> Tensor:
        """(..., E): the text of behaviours alone; that of padding means nothing."""
        return self.text.project_item(item)

    def history_tokens(self, batch: SearchBatch) -> Tensor:
        """Return (B, T, F + E): x_t = [f_t, e_t] of Eq. 1 for every behaviour."""
        if self.config.token == "pair":
            text = self.text.project_pair(
                batch.history, batch.pair_text, batch.history_pair_text
            )
        else:
            text = self.document(batch.history)
        if not self.config.context_features:
            return text
        return torch.cat([self.scale(batch.history_features), text], -1)

    def states(self, batch: SearchBatch, tokens: Tensor) -> Tensor:
        """(B, T, D): h_t of every behaviour, from it and earlier ones alone."""
        place = self.position.weight[: tokens.shape[1]]
        return self.encoder(self.project(tokens) + place, batch.history_time)

    def predict_head(self, states: Tensor, text: Tensor, row: Tensor) -> Tensor:
        """Return z of Eq. 3 (..., D), the prediction of the next item.

        Args:
            states: (..., D) states before the item.
            text: (n, W) vectors of queries, or joint ones of queries and items.
            row: (...) row of the next item's query in `text`.
        """
        if self.config.query_condition == "none":
            return self.head(states)
        return self.head(torch.cat([states, self.text.project_query(text, row)], -1))

    def rank_after(
        self, past: Tensor, batch: SearchBatch, shown: bool = False
    ) -> Tensor:
        """(N, K) logits, where `past` (R, D) is the state before each request."""
        owner = batch.candidate_request
        if self.config.query_condition == "joint":  # another one for each candidate
            sequence = self.predict_head(
                past[owner], batch.joint_text, batch.candidate_pair_text
            )
        else:
            of_request = self.predict_head(
                past, batch.query_text, batch.request_query_text
            )
            sequence = of_request[owner]
        if not self.config.match:
            return self.rank(batch, sequence, shown)
        document = self.target(self.document(batch.candidate))
        cosine = functional.cosine_similarity(
            sequence.float(), document.float(), dim=-1
        )  # bfloat16 is too coarse
        return self.rank(
            batch, sequence, shown, match=cosine[:, None] / self.config.temperature
        )

    def past(self, states: Tensor, batch: SearchBatch) -> Tensor:
        """(R, D): the state after the last behaviour before each request."""
        end = batch.request_end
        return torch.where(
            (end > 0)[:, None],
            states[batch.request_row, (end - 1).clamp(min=0)],
            self.start,
        )

    def score(self, batch: SearchBatch, shown: bool = False) -> Tensor:
        """(N, K) logits, from one encoder pass per row."""
        past = self.past(self.states(batch, self.history_tokens(batch)), batch)
        return self.rank_after(past, batch, shown) + self.config.correction

    def forward(self, batch: SearchBatch) -> dict[str, Tensor]:
        """`loss`: ranking loss plus `infonce_weight` times the loss of the next item, and both apart."""
        batch, kept = self.sample(batch)
        tokens = self.history_tokens(batch)
        states = self.states(batch, tokens)
        logits = self.rank_after(self.past(states, batch), batch, shown=True)
        ranking = label_loss(logits, batch.labels, self.weights, kept)
        if not self.config.infonce_weight:
            return {"loss": ranking}
        next_item = self.next_item_loss(states, tokens, batch)
        return {
            "loss": ranking + self.config.infonce_weight * next_item,
            "ranking": ranking,
            "infonce": next_item,
        }

    def next_item_loss(
        self, states: Tensor, tokens: Tensor, batch: SearchBatch
    ) -> Tensor:
        """Compute Eq. 3-5: predict each behaviour from the state before it and its
        query.

        A behaviour without predecessors is no target; one in several rows is a target
        in one of them.
        """
        item = batch.history[:, 1:]
        new = (
            torch.arange(1, batch.history.shape[1], device=item.device)
            >= batch.history_new[:, None]
        )
        text, row = batch.query_text, batch.history_query_text
        if self.config.query_condition == "joint":
            text, row = batch.joint_text, batch.history_pair_text
        z = self.predict_head(states[:, :-1], text, row[:, 1:])
        v = self.target(
            self.document(item)
            if self.config.next_item == "document"
            else tokens[:, 1:]
        )
        return info_nce(
            z,
            v,
            item,
            (item >= 0) & new,
            self.config.temperature,
            self.config.negatives,
        )


def make_encoder(config: QGSConfig) -> nn.Module:
    if config.encoder == "linear_hstu":
        return LinearHSTUEncoder(config.width, config.num_layers, config.dropout)
    if config.encoder == "hstu":
        return HSTUEncoder(
            config.width,
            config.num_layers,
            config.num_heads,
            config.max_history,
            config.dropout,
        )
    return CausalBert(
        config.width,
        config.num_layers,
        config.num_heads,
        config.ffn,
        config.max_history,
        config.dropout,
    )


def masked_logits(
    z: Tensor, v: Tensor, items: Tensor, valid: Tensor, temperature: float
) -> Tensor:
    """Return (T, B, B) float32 s_t^(b, c) of Eq. 4, -inf where c is no negative for b.

    A negative that is padding, or is the same item as the positive, is masked; the
    positive, on the diagonal, is not.

    Args:
        z: (B, T, D) predictions.
        v: (B, T, D) targets.
        items: (B, T) `item_index` of the targets.
        valid: (B, T) whether there is a target.
        temperature: Divisor of the cosines.
    """
    z = functional.normalize(z.float(), dim=-1).transpose(0, 1)  # (T, B, D)
    v = functional.normalize(v.float(), dim=-1).transpose(0, 1)
    with torch.autocast(z.device.type, enabled=False):  # bfloat16 is too coarse
        logits = z @ v.transpose(1, 2) / temperature
    items, valid = items.T, valid.T  # (T, B)
    same_item = items[:, :, None] == items[:, None]
    is_positive = torch.eye(z.shape[1], dtype=torch.bool, device=z.device)
    is_masked = (same_item | ~valid[:, None]) & ~is_positive
    return logits.masked_fill(is_masked, -torch.inf)


def info_nce(
    z: Tensor,
    v: Tensor,
    items: Tensor,
    valid: Tensor,
    temperature: float = 0.1,
    negatives: str = "position",
) -> Tensor:
    """Return the mean over valid positions of the cross-entropy of the positive (Eq. 5).

    The loss is 0 if no position is valid. Shapes are those of `masked_logits`.
    `negatives` are other users' targets at the same `position`, as in the paper, or at
    all positions of the `batch`, which takes memory for the square of their number.
    """
    if negatives == "batch":  # (M, 1, D): M users of one position
        z, v, items = z[valid][:, None], v[valid][:, None], items[valid][:, None]
        valid = torch.ones_like(items, dtype=torch.bool)
    count = valid.sum()
    if not z.numel():
        return global_mean((z + v).sum(), 0)  # 0, and part of the graph
    logits = masked_logits(z, v, items, valid, temperature)
    loss = torch.logsumexp(logits, -1) - logits.diagonal(dim1=1, dim2=2)  # (T, B)
    total = torch.where(valid.T, loss, 0).sum()
    return global_mean(total / count.clamp(min=1), count)


class HSTU(QGS):
    """HSTU as QGS compares with it: QGS with other defaults."""

    name = "hstu"
    config_class = HSTUConfig
