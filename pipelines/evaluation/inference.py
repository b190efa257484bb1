"""Rank for many users, and write the rankings as a table.

    config = EvaluateConfig(checkpoint="runs/sasrec", tables="tables",
                            batch_inference="recommendations", k=20)
    table, existed = infer_all(config)

A model that ranks a catalogue writes `recommendations`: the top K items after all
behaviours of each user, or, for a split, after the history of each request, with the
request's time and targets. A model that ranks candidates writes `scores`: scores and
labels of all candidates of a split's requests. All metrics of an evaluation can be
computed from the table of its split.

A unit of work is a file of `sequences`. A shard ranks its files one after the other.

Shapes: `B` rows of a batch, `K` items of a ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import UserError
from core.files import absolute
from core.ragged import gather_ranges, lengths_to_offsets
from core.schemas import PredictionsInfo
from core.tables import (
    Part,
    Table,
    check_replaceable,
    commit,
    find_table,
    read_parquet,
    write_part,
    writing,
)
from models import registry
from models.dataset.batch import request_index
from models.dataset.dataset import Dataset
from models.loaded_model import LoadedModel
from models.model import check_finite
from models.retrieval.recommend import required_history
from models.training import checkpoint
from pipelines.evaluation.allowed import read_allowed
from pipelines.evaluation.checks import (
    CheckedEvaluation,
    open_evaluation,
    resolve_device,
    run_shards,
)
from pipelines.evaluation.config import EvaluateConfig

ITEM_IDS = pa.field("item_id", pa.list_(pa.field("item", pa.string())), nullable=False)
FLOATS = pa.list_(pa.field("item", pa.float32()))
BOOLEANS = pa.list_(pa.field("item", pa.bool_()))
USER_ID = pa.field("user_id", pa.string(), nullable=False)

RECOMMENDATIONS = pa.schema(
    [
        USER_ID,
        ITEM_IDS,  # best first, at most K
        pa.field("score", FLOATS, nullable=False),  # on the model's scale
    ]
)


def ranked_requests_schema(has_baskets: bool) -> pa.Schema:
    """Return the schema of `recommendations` with a row per request of a split."""
    target = pa.field("target", pa.string(), nullable=False)
    if has_baskets:
        target = ITEM_IDS.with_name("targets")
    return pa.schema(
        [
            USER_ID,
            # index of the request among the `requests` of the user's row in `sequences`
            pa.field("request", pa.int32(), nullable=False),
            pa.field("timestamp_ms", pa.int64()),
            target,
            # whether a target is in the history; metrics under first/ skip the request
            pa.field("target_is_known", pa.bool_(), nullable=False),
            ITEM_IDS,
            RECOMMENDATIONS.field("score"),
        ]
    )


def scores_schema(labels: Sequence[str], has_queries: bool) -> pa.Schema:
    """Return the schema of `scores`: one row per request, ordered as the sequences.

    A request is a search, or the impressions of a user at one time of a feed.
    Candidates are best first by the first label.
    """
    query = [pa.field("query", pa.string())] if has_queries else []
    scores = [pa.field(f"score_{name}", FLOATS, nullable=False) for name in labels]
    values = [pa.field(f"label_{name}", BOOLEANS, nullable=False) for name in labels]
    time = pa.field("timestamp_ms", pa.int64(), nullable=False)
    return pa.schema([USER_ID, time, *query, ITEM_IDS, *scores, *values])


@dataclass
class Inference:
    """A batch inference, whose workers write the parts of a table of rankings."""

    checked: CheckedEvaluation
    """The checkpoint and its tables."""
    config: EvaluateConfig
    """Options of the inference."""
    output: str
    """Folder of the table."""
    schema: pa.Schema
    """Schema of the table."""
    split: str
    """Split whose requests are ranked; `next`: after all behaviours of each user."""
    recommend: dict[str, Any]
    """Options of `recommend`, with the mask of the allowed items."""

    table: ClassVar[str]
    """Kind of the table."""
    count_name: ClassVar[str]
    """Key in the manifest of the sum of the parts' counts."""

    def write_parts(self, rank: int) -> list[tuple[Part, int]]:
        """Return the part and count of each file of `sequences` of one shard."""
        self.load()
        num_files = len(self.tables["sequences"].files)
        return [
            self.write_part(file) for file in range(rank, num_files, self.config.shards)
        ]

    def load(self) -> None:
        """Load the model, the ids of the items and the requests."""
        self.device = resolve_device(self.config.device)
        loaded = LoadedModel.load(self.checked.uri, self.config.inputs, self.device)
        self.model, self.tables = loaded.model, loaded.catalogue.versions
        self.items = self.read_column("items", "item_id")
        max_history = self.model.config.max_history
        self.dataset = Dataset.load(
            self.model,
            loaded.catalogue,
            self.split,
            max_history=required_history(max_history, self.recommend),
        )
        self.examples: Any = self.dataset.examples
        if "allowed" in self.recommend:
            mask = self.recommend["allowed"].to(self.device)
            self.recommend["allowed"] = self.model.encode_allowed(mask)

    def read_column(self, table: str, name: str) -> pa.Array:
        """Read a column of a table, which may be empty."""
        if not self.tables[table].rows:  # an empty table has no files
            return pa.array([], pa.string())
        return self.tables[table].read([name])[name].combine_chunks()

    def write_part(self, file: int) -> tuple[Part, int]:
        """Rank for the users of a file of `sequences`, and write a part of the table.

        Returns:
            The part, and its count for `count_name`.
        """
        sequences = self.tables["sequences"]
        users = read_parquet(sequences.part_uris()[file], ["user_id"])
        self.users = users["user_id"].combine_chunks()
        self.first_user = sum(part.rows for part in sequences.files[:file])
        index = self.examples.user - self.first_user
        rows = np.flatnonzero((index >= 0) & (index < len(self.users)))
        # batches of similar lengths
        ordered = rows[self.examples.take(rows).sort_order()]
        ranked = []
        for batch_rows in self.dataset.cut_batches(ordered, self.config.batch_size):
            batch = self.dataset.collate(batch_rows).to(self.device)
            with torch.no_grad():
                ranked.append([value.cpu().numpy() for value in self.rank(batch)])
        if not ranked:
            return write_part(self.output, self.schema.empty_table()), 0
        arrays = [np.concatenate(batches) for batches in zip(*ranked, strict=True)]
        table, count = self.to_table(*arrays)
        return write_part(self.output, table), count

    def rank(self, batch: Any) -> Sequence[Tensor]:
        """Rank for a batch.

        Returns:
            Tensors of B rows each. The first has the users' rows in `sequences`.
        """
        raise NotImplementedError

    def to_table(self, user: NDArray, *ranked: NDArray) -> tuple[pa.Table, int]:
        """Return a part of the table, and its count for `count_name`.

        Args:
            user: (B,) rows of the users in `sequences`, of all batches of the part.
            ranked: The other arrays that `rank` returned, of B rows each.
        """
        raise NotImplementedError


class CatalogueInference(Inference):
    """Inference that ranks the catalogue for each user, or each request of a split."""

    table = "recommendations"
    count_name = "below_k"

    def rank(self, batch: Any) -> Sequence[Tensor]:
        """Return user rows (B,), request numbers (B,), items and scores (B, K)."""
        k = self.config.k
        items, scores = self.model.recommend(batch, k, **self.recommend)
        return batch.user_row, batch.request, items, scores.float()

    def to_table(self, user: NDArray, *ranked: NDArray) -> tuple[pa.Table, int]:
        """Return a part of the table, and the number of short rankings."""
        order = np.argsort(ranked[0], kind="stable")  # by user, then by request
        user = user[order]
        number, items, scores = (values[order] for values in ranked)
        columns = [pc.take(self.users, pa.array(user - self.first_user))]
        if self.split != "next":
            columns += self.describe_requests(user, request_index(number))
        is_item = items >= 0  # (B, K); items are negative after a short ranking's end
        lengths = is_item.sum(1)  # (B,)
        offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
        item_ids = pc.take(self.items, pa.array(items[is_item]))
        item_scores = pa.array(scores[is_item], pa.float32())
        columns += [
            pa.ListArray.from_arrays(offsets, values)
            for values in (item_ids, item_scores)
        ]
        num_short = int((lengths < self.config.k).sum())
        return pa.table(columns, schema=self.schema), num_short

    def describe_requests(self, user: NDArray, index: NDArray) -> list[pa.Array]:
        """Return index, time, targets and whether they are known of requests (B,)."""
        log, first_row = self.examples.columns, self.examples.request_offsets[user]
        row = first_row + index
        target = pc.take(self.items, pa.array(log["target"][row]))
        if "basket" in log:  # with a row per target
            num_baskets = np.cumsum(log["basket"] > 0)
            index = num_baskets[row] - num_baskets[first_row]
            sizes = log["basket"][row]
            items = pa.array(log["target"][gather_ranges(row, sizes)])
            offsets = pa.array(lengths_to_offsets(sizes), pa.int32())
            target = pa.ListArray.from_arrays(offsets, pc.take(self.items, items))
        return [
            pa.array(index, pa.int32()),
            pa.array(log["request_time"][row]),
            target,
            pa.array(log["repeats"][row]),
        ]


class CandidateInference(Inference):
    """Inference that scores all candidates of a split's requests.

    Shapes: `C` candidates of a batch, `T` labels.
    """

    table = "scores"
    count_name = "candidates"

    def rank(self, batch: Any) -> Sequence[Tensor]:
        """Return user rows, requests, times, queries, items, labels and scores.

        Labels and scores are (C, T), the other tensors (C,).
        """
        keys = batch.candidate_keys()
        scores = torch.sigmoid(check_finite(self.model.score(batch).float()))
        labels = keys["labels"][:, : scores.shape[1]]  # some models learn the first
        names = ("user_row", "request", "time", "query", "item")
        return *(keys[name] for name in names), labels, scores

    def to_table(self, user: NDArray, *ranked: NDArray) -> tuple[pa.Table, int]:
        """Return the table of `scores_schema`, and the number of candidates."""
        request, time, query, item, labels, scores = ranked
        names = self.schema.names[-2 * scores.shape[1] :]
        values = [*scores.T, *(labels.T > 0)]
        requests = (
            pl.DataFrame(
                {
                    "user": user - self.first_user,
                    "request": request,
                    "timestamp_ms": time,
                    "query": query,
                    "item_id": pl.Series(pc.take(self.items, pa.array(item))),
                    **dict(zip(names, values, strict=True)),
                }
            )
            .sort("user", "request", -pl.col(names[0]), maintain_order=True)
            .group_by("user", "request", "timestamp_ms", "query", maintain_order=True)
            .agg(pl.all())
            .with_columns(user_id=pl.lit(pl.Series(self.users)).gather("user"))
        )
        if "query" in self.schema.names:
            queries = pl.Series(self.read_column("queries", "query"), dtype=pl.String)
            index = requests["query"].replace(-1, None)
            requests = requests.with_columns(query=queries.gather(index))
        table = requests.select(self.schema.names).to_arrow().cast(self.schema)
        return table, len(user)


def infer_all(
    config: EvaluateConfig, in_ray: bool = False
) -> tuple[Table[PredictionsInfo], bool]:
    """Write the rankings of a checkpoint for many users to a table.

    Args:
        config: Options, with `batch_inference`.
        in_ray: Whether to run even a single shard in a Ray actor.

    Returns:
        The table, and whether an equal table existed already.
    """
    output = absolute(str(config.batch_inference))
    checked = open_evaluation(config)
    saved, recommend = checked.checkpoint, config.recommend_options()
    model_class = registry.find(saved.name)
    model_class.check_served()
    sequences = checked.versions["sequences"]
    kind: type[Inference] = CatalogueInference
    ranked: dict[str, Any] = {"k": config.k}
    if model_class.ranks != "catalogue":
        if config.allowed:
            raise UserError(
                f"allowed is {config.allowed}, but the model '{saved.name}' scores "
                "given candidates"
            )
        kind, ranked = CandidateInference, {"split": config.split or "test"}
        labels = model_class.describe_requests(sequences.info)["labels"]
        has_queries = "queries" in model_class.catalogue_class.tables["tables"]
        schema = scores_schema(labels, has_queries)
    elif config.split:
        ranked["split"] = config.split
        schema = ranked_requests_schema(sequences.info.baskets is not None)
    else:
        schema = RECOMMENDATIONS
    settings = {**ranked, "model": saved.model, **recommend}
    hashes = {
        name: checked.versions[name].hash
        for name, trained in saved.hashes.items()
        if trained
    }
    hashes["checkpoint"] = checkpoint.weights_hash(checked.uri)
    if config.allowed:
        recommend["allowed"], hashes["allowed"] = read_allowed(
            config.allowed, checked.versions["items"]
        )
    check_replaceable(output, kind.table)
    finished = None if config.overwrite else find_table(output, PredictionsInfo)
    if finished:
        finished.check_made_with(settings, hashes)
        return finished, True
    split = ranked.get("split", "")
    inference = kind(checked, config, output, schema, split or "next", recommend)
    num_files = len(sequences.files)
    with writing(output):
        shards = run_shards(inference.write_parts, config, in_ray)
        # shard `rank` has the files rank, rank + shards, rank + 2 * shards, ...
        written = [
            shards[file % config.shards][file // config.shards]
            for file in range(num_files)
        ]
        counted = {kind.count_name: sum(count for _, count in written)}
        table = commit(
            output,
            kind.table,
            schema,
            [part for part, _ in written],
            config=settings,
            inputs=hashes,
            info=PredictionsInfo(
                model=saved.name, checkpoint=checked.uri, split=split, **counted
            ),
        )
    return table, False
