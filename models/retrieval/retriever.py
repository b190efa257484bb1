"""A retriever of semantic IDs put together: a backbone, a decoder, and beam search in the catalogue's trie.

Shapes: `B` requests.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from models.retrieval.data import Catalogue
from models.retrieval.parts import Backbone, Decoder, History
from models.retrieval.search.beam import beam_search, unconstrained_beam_search
from models.tables import UserError


class Retriever(nn.Module):
    """A module with these parts; a subclass has a loss and `recommend`. Any of them can be a student's teacher."""

    def __init__(self, config: Any, catalogue: Catalogue, backbone: Backbone, decoder: Decoder) -> None:
        super().__init__()
        if catalogue.trie is None:
            raise UserError("the model needs semantic IDs; give --sids with what jobs.tokenize made")
        self.config, self.trie, self.tokens = config, catalogue.trie, backbone.tokens
        self.backbone, self.decoder = backbone, decoder

    def encode(self, batch: dict[str, Tensor]) -> History:
        """What the backbone reads of the requests' histories."""
        return self.backbone.encode(batch)

    def find(
        self, history: History, k: int, beam: int | None, constrained: bool, children: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(items, scores), each (B, k): the search of `beam_search`, by default with the config's beams, within the
        trie or, with `constrained` False, looking at it only in the end."""
        beam = self.config.beam if beam is None else beam
        scorer = self.decoder.scorer(history)
        if constrained:
            return beam_search(scorer, self.trie, k, beam, children=children)
        return unconstrained_beam_search(scorer, self.trie, k, beam)
