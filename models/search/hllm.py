"""HLLM (Chen et al., 2024) as the QGS paper compares with it: a tower over the text of items, a tower over users.

    python -m jobs.train --config jobs/configs/qgs.yaml --config jobs/configs/search/hllm.yaml ...

The item tower is the pretrained text encoder and a trained projection. The paper trains the encoder too: so it is
with `item_tower`; without, it is frozen, and its output comes with the catalogue. The user tower is a causal BERT
that starts from `pretrained` where that is given. A token carries text alone, no features. What the head reads of
a candidate is the text of jobs.encode, as in every model here; `match` takes its document from the item tower.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from torch import Tensor

from models.search import qgs
from models.search.data import SearchCatalogue
from models.search.item_tower import ItemTower, encoder_model
from models.search.qgs import QGS, QGSConfig
from models.text_encoder import load_encoder


@dataclass
class HLLMConfig(QGSConfig):
    """Settings of HLLM (Sec. 4.1 of QGS: 12 layers, 12 heads, 768)."""

    encoder: Literal["linear_hstu", "hstu", "transformer"] = "transformer"
    """The user tower."""
    width: int = 768
    """Width of the user tower."""
    num_heads: int = 12
    """Heads of the user tower."""
    ffn: int = 3072
    """Inner width of its feed-forward blocks."""
    token: Literal["pair", "item"] = "item"
    """Text of a behaviour: the document alone."""
    context_features: bool = False
    """No features in a token."""
    group_attention: bool = False
    """No HFG-Attention."""
    query_condition: Literal["query", "joint", "none"] = "none"
    """The next item is predicted from the past alone."""
    item_tower: str = field(default="", metadata={"names": "encoder"})
    """The encoder of jobs.encode (folder, name, or `minilm`), to be trained further as item tower; read in training
    only. Empty: documents keep the embeddings that it gave them."""
    item_model: dict[str, Any] = field(default_factory=dict)
    """Sizes of the item tower, taken from it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.item_tower and self.token != "item":
            raise ValueError(f"item_tower is '{self.item_tower}', which token '{self.token}' does not read; use item")


class HLLM(QGS):
    """See the module."""

    def __init__(self, config: HLLMConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(config, catalogue)
        self.item_tower = ItemTower(config.item_model, catalogue) if config.item_model else None

    def document(self, item: Tensor) -> Tensor:
        if self.item_tower is None:
            return super().document(item)
        return self.text.document(self.text.gain * self.item_tower(item.clamp(min=0)))


def resolve(config: Any, catalogue: Any) -> Any:
    """The config with the sizes of the pretrained encoders that it names."""
    config = qgs.resolve(config, catalogue)
    return replace(config, item_model=encoder_model(config.item_tower)) if config.item_tower else config


def teach(module: Any, config: Any, catalogue: Any) -> None:
    """Before training: fills the towers with the pretrained weights that the config names."""
    qgs.teach(module, config, catalogue)
    if config.item_tower:
        cast(ItemTower, module.item_tower).encoder.load_state_dict(load_encoder(config.item_tower).state_dict())
