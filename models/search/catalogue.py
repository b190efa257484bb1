"""The catalogue of search models: items, queries, labels, features and text vectors.

    catalogue = SearchCatalogue.load(Inputs("tables", text="text"))

Vectors of documents are a tensor, which models hold as a buffer. Vectors of queries and
of pairs are memory-mapped files; a batch holds copies of the vectors that its examples
need (`models/search/requests.py`).

Shapes: `I` items, `Q` queries, `P` pairs of item and query, `F` features, `K` labels,
`W` width of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import UserError
from core.files import join
from core.ragged import find_sorted, lengths_to_offsets
from core.schemas import (
    CustomFeatures,
    Inputs,
    SearchInfo,
    TokensInfo,
)
from core.tables import (
    Table,
    find_table,
    read_parquet,
)
from models.custom_features import CUSTOM_KEY, rescale
from models.dataset.dataset import request_columns
from models.text.text_tables import open_vectors, read_vectors, root_mean_square

NO_QUERY = -1
"""`query_index` of a behaviour or request without a query."""


@dataclass(frozen=True)
class DocumentTokens:
    """The tokens of all documents, and how the text encoder pools its states."""

    tokens: Tensor
    """int32 tokens of all documents, end to end, special tokens included."""
    begin: Tensor
    """(I + 1,) int64 index of each document's first token, and the end."""
    pooling: str
    """`cls`: the first token's state; `mean`: the mean over all tokens. It is then
    scaled to length 1."""


@dataclass(frozen=True)
class SearchText:
    """Text vectors of documents, queries and pairs, made by a frozen encoder."""

    items: Tensor
    """(I, W) float32 vectors of documents alone."""
    queries: NDArray[np.float32]
    """(Q, W) vectors of queries alone."""
    pair_keys: NDArray[np.int64]
    """(P,) the `pair_key` of each pair, ascending."""
    pairs: NDArray[np.float32]
    """(P, W) vectors of document and query together."""
    documents: DocumentTokens | None = None
    """Tokens of the documents; None for TF-IDF."""

    @classmethod
    def empty(cls, num_items: int, num_queries: int) -> Self:
        """Return text of width 0, for models that read no text."""
        return cls(
            items=torch.zeros(num_items, 0),
            queries=np.zeros((num_queries, 0), np.float32),
            pair_keys=np.zeros(0, np.int64),
            pairs=np.zeros((0, 0), np.float32),
        )

    @classmethod
    def load(cls, uri: str, versions: Mapping[str, Table[Any]]) -> Self:
        """Load the tables of jobs.encode.

        Args:
            uri: Folder of the tables.
            versions: Tables of the log and of its texts, by name.
        """
        texts = [versions[f"text_{name}"] for name in SearchCatalogue.tables["text"]]
        tokens = find_table(join(uri, "tokens"), TokensInfo)
        settings = [
            (table.inputs.get("encoder"), table.config)
            for table in (*texts, tokens)
            if table
        ]
        if tokens and tokens.inputs.get("items") != versions["items"].hash:
            raise UserError(f"{tokens.uri} was made from other items")
        if any(table_settings != settings[0] for table_settings in settings):
            raise UserError(f"the tables of {uri} were encoded with different settings")
        token_lists = None
        if tokens:
            lists = tokens.read()["tokens"].combine_chunks()
            begin = lengths_to_offsets(pc.list_value_length(lists).to_numpy())
            token_lists = DocumentTokens(
                torch.from_numpy(lists.flatten().to_numpy().copy()),
                torch.from_numpy(begin),
                tokens.info.pooling,
            )
        documents = read_vectors(versions["text_items"].read(), "embedding")
        width, num_queries = documents.shape[1], versions["queries"].rows
        queries = np.zeros((0, width), np.float32)
        if num_queries:
            queries = open_vectors(versions["text_queries"])["embedding"]
        pairs = open_vectors(versions["text_pairs"])
        no_index = np.zeros(0, np.int64)
        pair_keys = pair_key(
            pairs.get("item_index", no_index),
            pairs.get("query_index", no_index),
            num_queries,
        )
        return cls(
            items=documents,
            queries=queries,
            pair_keys=pair_keys,
            pairs=pairs.get("embedding", np.zeros((0, width), np.float32)),
            documents=token_lists,
        )

    @property
    def width(self) -> int:
        """Width W of the vectors; 0 if models read no text."""
        return self.items.shape[1]

    @property
    def num_queries(self) -> int:
        """Number Q of encoded queries."""
        return len(self.queries)

    def read_queries(self, query: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors (q, W) of queries."""
        return self.queries[query]

    def read_pairs(
        self, item: NDArray[np.int64], query: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return the vectors (n, W) of pairs."""
        keys = pair_key(item, query, self.num_queries)
        row, is_encoded = find_sorted(self.pair_keys, keys)
        if not is_encoded.all():
            index = np.argmin(is_encoded)
            raise UserError(
                f"the text has no embedding of item {item[index]} with query "
                f"{query[index]}"
            )
        return self.pairs[row]


@dataclass(frozen=True)
class SearchCatalogue:
    """Items, queries, labels, features and text vectors of a search log."""

    tables: ClassVar[Mapping[str, Sequence[str]]] = {
        "tables": ("items", "queries", "sequences"),
        "text": ("items", "queries", "pairs"),
    }
    """Tables from which a catalogue is loaded, by folder of `Inputs`."""

    num_items: int
    """Number of items; `item_index` is dense from 0."""
    num_queries: int
    """Number of queries; `query_index` is dense from 0."""
    labels: tuple[str, ...]
    """Names of the K labels; plain metrics refer to the first one."""
    features: tuple[str, ...]
    """Names of the F features of a candidate and of a behaviour: built-in features
    (counts, position and time), then the log's custom features."""
    text: SearchText
    """Text vectors; of width 0 for models that read no text."""
    text_size: float = 0.0
    """Root mean square of the documents' vectors, or the value in a checkpoint."""
    feature_mean: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Means of the built-in features over train candidates."""
    feature_std: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Standard deviations of the built-in features over train candidates; 0 for a
    constant."""
    custom_features: CustomFeatures = field(default_factory=CustomFeatures)
    """The log's custom features, which are the last names of `features`."""
    session_types: tuple[str, ...] = ()
    """Types of the behaviours that are no clicks, such as views of items."""
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Features of each group of HFG-Attention, in order."""
    versions: dict[str, Table[Any]] = field(default_factory=dict)
    """Versions of the catalogue's tables, by name."""
    unknown_when_ranking: tuple[str, ...] = ("position", "page")
    """Features that are unknown until a candidate is shown; models do not read them of
    candidates."""

    def __post_init__(self) -> None:
        if not self.text_size:
            object.__setattr__(self, "text_size", root_mean_square(self.text.items))

    def readable_features(self) -> tuple[list[str], list[str]]:
        """Return the categories and the numbers that are known when ranking."""
        categories = {category.name for category in self.custom_features.categories}
        known = [n for n in self.features if n not in self.unknown_when_ranking]
        return (
            [name for name in known if name in categories],
            [name for name in known if name not in categories],
        )

    def scales(self) -> dict[str, Any]:
        """Return the scales of text and numbers, which a checkpoint stores."""
        return {
            "feature_mean": self.feature_mean.tolist(),
            CUSTOM_KEY: [asdict(number) for number in self.custom_features.numbers],
            "text_size": self.text_size,
        }

    @classmethod
    def load(
        cls,
        inputs: Inputs,
        scales: Mapping[str, Any] | None = None,
        manifest_only: bool = False,
    ) -> Self:
        """Load the catalogue of a search log.

        Args:
            inputs: Folders of the tables, and of texts; without it text has width 0.
            scales: Result of `scales()` stored in a checkpoint: the text size and the
                scales of custom numbers, in place of those of these tables.
            manifest_only: Whether the means of the built-in features are those of the
                checkpoint; they are computed from the train split otherwise.
        """
        versions = inputs.versions(cls.tables, SearchInfo)
        info: SearchInfo = versions["sequences"].info
        items, num_queries = versions["items"], versions["queries"].rows
        scales = scales or {}
        custom_features = rescale(info.custom, scales)
        num_features = len(info.features)
        if manifest_only:
            mean, std = torch.tensor(scales["feature_mean"]), torch.ones(num_features)
        else:
            mean, std = _feature_scale(versions["sequences"], num_features)
        search_text = (
            SearchText.load(inputs.text, versions)
            if inputs.text
            else SearchText.empty(items.rows, num_queries)
        )
        return cls(
            num_items=items.rows,
            num_queries=num_queries,
            labels=tuple(info.labels),
            features=(*info.features, *custom_features.names),
            text=search_text,
            text_size=scales.get("text_size", 0.0),
            feature_mean=mean,
            feature_std=std,
            custom_features=custom_features,
            session_types=tuple(info.sessions),
            unknown_when_ranking=tuple(info.unknown_when_ranking),
            groups={group.name: tuple(group.features) for group in info.groups},
            versions=versions,
        )


def pair_key(item: Any, query: Any, num_queries: int) -> Any:
    """Return an integer that identifies a pair of item and query.

    Args:
        item: `item_index`, an integer, array or tensor.
        query: `query_index` in the same form; NO_QUERY is allowed.
        num_queries: Number of queries.
    """
    return item * (num_queries + 1) + query + 1


def _feature_scale(
    sequences: Table[SearchInfo], num_features: int
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (F,) of features over train candidates.

    They are those of the first part that has any: a user's part is a hash of the id, so
    a part is a random sample.
    """
    for uri in sequences.part_uris():
        table = read_parquet(uri, request_columns("split", "features"))
        requests = table["requests"].combine_chunks().flatten()
        train = requests.filter(pc.equal(pc.struct_field(requests, "split"), "train"))
        vectors = pc.struct_field(train, "features").flatten().to_numpy()
        values = vectors.reshape(-1, max(1, num_features))[:, :num_features]
        if len(values):
            features = torch.from_numpy(values.astype(np.float64))
            std = features.std(0, correction=0)
            std = torch.where(std > 1e-6, std, 0.0)
            return features.mean(0).float(), std.float()
    raise UserError(f"{sequences.uri} has no train request")
