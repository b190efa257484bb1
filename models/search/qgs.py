"""QGS, query-conditioned generative search (Song et al., 2026), and its baseline HSTU.

    python -m jobs.train --config jobs/configs/search/qgs.yaml --tables TABLES
        --text TEXT --storage runs --name qgs

Behaviours are query-item pair tokens (Eq. 1 and 2), read by the Linear HSTU encoder
(Eq. 6-10). The model is trained to predict the next item given the next query
(Eq. 3-5), and to rank candidates. HFG-Attention (Eq. 11-13) adds the candidates'
features to the ranking. The encoder runs once per row of a batch. Each request of a row
takes the state after the last behaviour before the request. The head that predicts the
next item turns this state into the user state of the ranking.

The ablations of Table 3, the sizes of Table 4 and HSTU are configurations of QGS. HLLM
is QGS with an item tower.

Shapes: `B` rows, `T` positions, `R` requests, `N` candidates, `D` encoder width, `E`
width of the reduced text, `F` features, `K` labels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional

from core.options import STRICT
from models.search.catalogue import SearchCatalogue
from models.search.encoders import (
    CausalBert,
    HSTULayer,
    LayerStack,
    LinearHSTULayer,
    copy_pretrained,
    pretrained_sizes,
)
from models.search.ranker import Ranker, RankerConfig
from models.search.requests import SearchBatch
from models.text.pretrained import EncoderPath
from models.training.distributed import global_mean

Encoder = Literal["linear_hstu", "hstu", "transformer"]
BehaviourText = Literal["pair", "item"]
QueryText = Literal["query", "none"]


@dataclass(config=STRICT)
class QGSConfig(RankerConfig):
    """Settings of QGS; the defaults are the paper's."""

    encoder: Encoder = "linear_hstu"
    """Encoder of the behaviours (Table 3 of QGS compares the three)."""
    width: PositiveInt = 512
    """Width of the encoder (d_h, Sec. 3.7 of QGS)."""
    num_layers: PositiveInt = 12
    """Layers of the encoder (N, Sec. 3.7 of QGS)."""
    num_heads: PositiveInt = 8
    """Heads of `hstu` and `transformer` (Sec. 4.1 of QGS); Linear HSTU has none."""
    ffn: PositiveInt = 2048
    """Inner width of the feed-forward blocks of `transformer`; the other encoders have
    none."""
    pretrained: EncoderPath = ""
    """Pretrained BERT whose weights initialise the encoder `transformer`: a folder, a
    name, or `minilm`, a pip package; read in training only."""
    token: BehaviourText = "pair"
    """Text of a behaviour: document and query together (Eq. 1 of QGS), or the document
    alone."""
    context_features: bool = True
    """Whether a behaviour's token has its features f_t (Eq. 1; "contextual feats. in
    pair tok." of Table 3)."""
    query_condition: QueryText = "query"
    """Text of the next query that the prediction head reads (Eq. 3): `query` encodes
    the query alone, since the paper's [SEP] output over query and document has seen the
    document to predict. `none` reads no query."""
    infonce_weight: NonNegativeFloat = 0.1
    """Weight of the InfoNCE loss, which is added to the ranking loss; 0 disables it.
    The paper names no weight."""
    temperature: PositiveFloat = 0.1
    """Temperature of InfoNCE (Sec. 3.7)."""
    negatives: Literal["position", "batch"] = "position"
    """Negatives of InfoNCE: other users' items at the same position (Eq. 5), or at all
    positions of the batch."""
    next_item: Literal["token", "document"] = "token"
    """Target of InfoNCE: the next behaviour's token (Sec. 3.4) or its document alone.
    The token's features and query can identify it among the negatives without the
    history."""
    group_attention: bool = True
    """HFG-Attention over groups of features (Sec. 3.6)."""
    match: bool = False
    """Whether the towers also read the cosine similarity of the predicted next item and
    the candidate's document (not part of the paper); requires `next_item: document`."""

    def __post_init__(self) -> None:
        if self.encoder != "linear_hstu" and self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}"
            )
        if self.pretrained and self.encoder != "transformer":
            raise ValueError(
                f"pretrained is '{self.pretrained}', which encoder '{self.encoder}' "
                "cannot load"
            )
        if self.match and not (self.infonce_weight and self.next_item == "document"):
            raise ValueError(
                "match is true, which needs InfoNCE over documents, but next_item is "
                f"'{self.next_item}' and infonce_weight is {self.infonce_weight:g}"
            )


@dataclass(config=STRICT)
class HSTUConfig(QGSConfig):
    """Settings of HSTU (Zhai et al., 2024) in the comparison of QGS.

    The encoder has quadratic attention, 12 layers, 8 heads and width 768 (Sec. 4.1 of
    QGS). Tokens are items alone, and the prediction head reads no query.
    """

    encoder: Encoder = "hstu"
    """Encoder of the behaviours."""
    width: PositiveInt = 768
    """Width of the encoder."""
    token: BehaviourText = "item"
    """Text of a behaviour: the document alone."""
    query_condition: QueryText = "none"
    """Text of the next query that the prediction head reads: none."""
    group_attention: bool = False
    """HFG-Attention over groups of features; HSTU has none."""


class QGS(Ranker):
    """A ranker with a causal encoder, trained to predict the next item too."""

    name = "qgs"
    config_class = QGSConfig
    config: QGSConfig

    def __init__(self, config: QGSConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(
            config, catalogue, sequence_width=config.width, match=config.match
        )
        self.reads_times = config.encoder == "hstu"  # biases by time difference
        self.reads_history_queries = (
            config.token == "pair" or config.query_condition != "none"
        )
        num_features = len(self.scale.columns) if config.context_features else 0
        token_width = num_features + config.text_width
        self.project = nn.Linear(token_width, config.width)  # W_proj of Eq. 2
        self.position = nn.Embedding(config.max_history, config.width)  # p_t of Eq. 2
        nn.init.normal_(self.position.weight, std=0.02)
        self.behaviour_type = None
        if catalogue.session_types:
            self.behaviour_type = nn.Embedding(
                1 + len(catalogue.session_types), config.width
            )
        # state of requests without behaviours
        self.start = nn.Parameter(torch.zeros(config.width))
        self.encoder: nn.Module = build_encoder(config)
        reads_query = self.text.has_text and config.query_condition != "none"
        query_width = config.text_width if reads_query else 0
        self.head = nn.Sequential(
            nn.Linear(config.width + query_width, config.width),
            nn.ReLU(),
            nn.Linear(config.width, config.width),
        )
        if config.infonce_weight:
            target_width = token_width
            if config.next_item == "document":
                target_width = config.text_width
            # W_tgt of Sec. 3.4
            self.target = nn.Linear(target_width, config.width, bias=False)

    @classmethod
    def resolve_config(cls, config: Any, catalogue: Any) -> Any:
        """Return the config with the sizes of the pretrained encoder that it names."""
        if not config.pretrained:
            return config
        return replace(config, **pretrained_sizes(config.pretrained))

    def prepare_training(self, catalogue: Any) -> list[str]:
        """Load the pretrained weights that the config names into the encoder."""
        if self.config.pretrained:
            copy_pretrained(cast(CausalBert, self.encoder), self.config.pretrained)
        return super().prepare_training(catalogue)

    def embed_documents(self, item: Tensor) -> Tensor:
        """Return the reduced vectors (..., E) of documents.

        Args:
            item: (...) items; the vectors of padding have no meaning.
        """
        return self.text.project_item(item)

    def history_tokens(self, batch: SearchBatch) -> Tensor:
        """Return the tokens x_t = [f_t, e_t] (Eq. 1) of all behaviours.

        Returns:
            (B, T, F + E), or (B, T, E) without `context_features`.
        """
        if self.config.token == "pair":
            text = self.text.project_pair(
                batch.history, batch.pair_text, batch.history_pair_text
            )
        else:
            text = self.embed_documents(batch.history)
        if not self.config.context_features:
            return text
        return torch.cat([self.scale(batch.history_features), text], -1)

    def encode_history(self, batch: SearchBatch, tokens: Tensor) -> Tensor:
        """Encode the behaviours (Eq. 2 and 6-10).

        Args:
            batch: Batch of requests.
            tokens: Tokens from `history_tokens`.

        Returns:
            (B, T, D) states h_t. Each depends on its behaviour and earlier ones alone.
        """
        position = self.position.weight[: tokens.shape[1]]  # (T, D)
        inputs = self.project(tokens) + position
        if self.behaviour_type is not None:
            inputs = inputs + self.behaviour_type(batch.history_type)
        return self.encoder(inputs, batch.history_time)

    def predict_next(self, states: Tensor, text: Tensor, row: Tensor) -> Tensor:
        """Predict the next item, z of Eq. 3.

        Args:
            states: (..., D) states before the item.
            text: (n, W) vectors of queries.
            row: (...) row of the next item's query in `text`.

        Returns:
            (..., D) predictions.
        """
        if self.config.query_condition == "none":
            return self.head(states)
        return self.head(torch.cat([states, self.text.project_query(text, row)], -1))

    def rank_from_states(self, request_states: Tensor, batch: SearchBatch) -> Tensor:
        """Return (N, K) logits of the candidates.

        Args:
            request_states: (R, D) state before each request.
            batch: Batch of requests.
        """
        request = batch.candidate_request
        predictions = self.predict_next(
            request_states, batch.query_text, batch.request_query_text
        )  # (R, D)
        sequence = functional.embedding(request, predictions)
        if not self.config.match:
            return self.rank(batch, sequence)
        document = self.target(self.embed_documents(batch.candidate))
        # in float32, since bfloat16 is too coarse
        cosine = functional.cosine_similarity(
            sequence.float(), document.float(), dim=-1
        )
        match = cosine[:, None] / self.config.temperature  # (N, 1)
        return self.rank(batch, sequence, match)

    def request_states(self, states: Tensor, batch: SearchBatch) -> Tensor:
        """Return the state (R, D) after the last behaviour before each request.

        Args:
            states: (B, T, D) states of all behaviours.
            batch: Batch of requests.
        """
        end = batch.request_end
        last = batch.request_row * states.shape[1] + (end - 1).clamp(min=0)
        before = functional.embedding(last, states.flatten(0, 1))
        return torch.where((end > 0)[:, None], before, self.start)

    def score(self, batch: SearchBatch) -> Tensor:
        """Return (N, K) logits, from one encoder pass per row."""
        states = self.encode_history(batch, self.history_tokens(batch))
        request_states = self.request_states(states, batch)
        return self.rank_from_states(request_states, batch)

    def forward(self, batch: SearchBatch) -> dict[str, Tensor]:
        """Return the losses of a batch.

        Returns:
            `loss`, which is `ranking` + `infonce_weight` * `infonce`, and both terms.
        """
        tokens = self.history_tokens(batch)
        states = self.encode_history(batch, tokens)
        request_states = self.request_states(states, batch)
        logits = self.rank_from_states(request_states, batch)
        ranking = self.ranking_loss(logits, batch)
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
        """Return the InfoNCE loss of the next items (Eq. 3-5).

        Each behaviour is predicted from the state before it and from its query. The
        first behaviour of a user is no target. A behaviour in several rows is a target
        in one of them.

        Args:
            states: (B, T, D) states of all behaviours.
            tokens: Tokens from `history_tokens`.
            batch: Batch of requests.
        """
        item = batch.history[:, 1:]
        position = torch.arange(1, batch.history.shape[1], device=item.device)
        is_target = (item >= 0) & (position >= batch.history_new[:, None])
        query_row = batch.history_query_text[:, 1:]
        z = self.predict_next(states[:, :-1], batch.query_text, query_row)
        if self.config.next_item == "document":
            v = self.target(self.embed_documents(item))
        else:
            v = self.target(tokens[:, 1:])
        return info_nce(
            z, v, item, is_target, self.config.temperature, self.config.negatives
        )


def build_encoder(config: QGSConfig) -> nn.Module:
    """Build the encoder of behaviours that the config selects."""
    width, heads, dropout = config.width, config.num_heads, config.dropout
    length = config.max_history
    if config.encoder == "transformer":
        return CausalBert(width, config.num_layers, heads, config.ffn, length, dropout)
    return LayerStack(
        LinearHSTULayer(width, dropout)
        if config.encoder == "linear_hstu"
        else HSTULayer(width, heads, length, relative=True, dropout=dropout)
        for _ in range(config.num_layers)
    )


def masked_logits(
    z: Tensor, v: Tensor, items: Tensor, valid: Tensor, temperature: float
) -> Tensor:
    """Return the logits s_t^(b, c) of Eq. 4, (T, B, B) float32.

    The diagonal holds the positives. A negative is -inf if it is padding or the same
    item as the positive.

    Args:
        z: (B, T, D) predictions.
        v: (B, T, D) targets.
        items: (B, T) `item_index` of the targets.
        valid: (B, T) bool, true where the position has a target.
        temperature: Divisor of the cosine similarities.
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
    """Return the mean cross-entropy of the positives over valid positions (Eq. 5).

    The loss is 0 if no position is valid.

    Args:
        z: (B, T, D) predictions.
        v: (B, T, D) targets.
        items: (B, T) `item_index` of the targets.
        valid: (B, T) bool, true where the position has a target.
        temperature: Divisor of the cosine similarities.
        negatives: `position` for other users' targets at the same position, as in the
            paper, or `batch` for the targets at all valid positions, whose logits take
            memory quadratic in their number.
    """
    if negatives == "batch":
        # all M valid positions become M rows of one position: (M, 1, D) and (M, 1)
        z = z[valid][:, None]
        v = v[valid][:, None]
        items = items[valid][:, None]
        valid = torch.ones_like(items, dtype=torch.bool)
    count = valid.sum()
    if not z.numel():
        return global_mean((z + v).sum(), 0)  # 0, but part of the graph for DDP
    logits = masked_logits(z, v, items, valid, temperature)
    loss = torch.logsumexp(logits, -1) - logits.diagonal(dim1=1, dim2=2)  # (T, B)
    total = torch.where(valid.T, loss, 0).sum()
    return global_mean(total / count.clamp(min=1), count)


class HSTU(QGS):
    """HSTU, a baseline of the QGS paper: QGS with the settings of `HSTUConfig`."""

    name = "hstu"
    config_class = HSTUConfig
