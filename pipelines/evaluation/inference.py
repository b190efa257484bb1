"""Rank for many users, and write the rankings as a table.

    options = InferenceOptions(k=20)
    table, existed = infer_all(checkpoint, inputs, "recommendations", options)

A model that ranks a catalogue writes `recommendations`: the top K items after all
behaviours of each user, or, for a split, after the history of each request, with the
request's time and target. A model that ranks candidates writes `scores`: scores and
labels of all candidates of a split's requests. All metrics of an evaluation can be
computed from the table of its split.

A unit of work is a range of users of one file of `sequences`. This process runs one
unit after the other, or Ray Data actors run them in parallel. An actor holds the model,
the catalogue, and the user ids of one file.

Shapes: `B` rows of a batch, `K` items of a ranking.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import UserError
from core.files import absolute
from core.schemas import Inputs, PredictionsInfo, SequencesInfo
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
from models.dataset.dataset import RequestDataset
from models.dataset.encoding import request_index
from models.loaded_model import LoadedModel
from models.metrics.scores import check_finite
from models.retrieval.data import RetrievalDataset
from models.retrieval.recommend import required_history
from models.training import checkpoint
from pipelines import cluster
from pipelines.evaluation.allowed import read_allowed
from pipelines.evaluation.checks import (
    CheckedEvaluation,
    Workers,
    check_evaluation,
    resolve_device,
)
from pipelines.prepare.executor import quiet_ray_data

USERS_PER_PART = 50_000
"""Largest number of users per file of the table."""


def list_type(item_type: pa.DataType) -> pa.DataType:
    """Return the Arrow type of lists whose items have a type."""
    return pa.list_(pa.field("item", item_type))


RECOMMENDATIONS = pa.schema(
    [
        pa.field("user_id", pa.string(), nullable=False),
        # best first, at most K
        pa.field("item_id", list_type(pa.string()), nullable=False),
        # on the model's scale
        pa.field("score", list_type(pa.float32()), nullable=False),
    ]
)

RANKED_REQUESTS = pa.schema(
    [
        RECOMMENDATIONS.field("user_id"),
        # index of the request among the `requests` of the user's row in `sequences`
        pa.field("request", pa.int32(), nullable=False),
        pa.field("timestamp_ms", pa.int64()),
        pa.field("target", pa.string(), nullable=False),
        # whether the target is in the history; metrics under first/ skip the request
        pa.field("target_is_known", pa.bool_(), nullable=False),
        RECOMMENDATIONS.field("item_id"),
        RECOMMENDATIONS.field("score"),
    ]
)


def scores_schema(labels: Sequence[str], has_queries: bool) -> pa.Schema:
    """Return the schema of `scores`: one row per request, ordered as the sequences.

    A request is a search, or the impressions of a user at one time of a feed.

    Args:
        labels: Names of the labels.
        has_queries: Whether requests have a query.
    """
    fields = [
        pa.field("user_id", pa.string(), nullable=False),
        pa.field("timestamp_ms", pa.int64(), nullable=False),
    ]
    if has_queries:
        fields.append(pa.field("query", pa.string()))
    # candidates, best first by the first label
    fields.append(pa.field("item_id", list_type(pa.string()), nullable=False))
    probabilities, booleans = list_type(pa.float32()), list_type(pa.bool_())
    for name in labels:
        fields.append(pa.field(f"score_{name}", probabilities, nullable=False))
    for name in labels:
        fields.append(pa.field(f"label_{name}", booleans, nullable=False))
    return pa.schema(fields)


@dataclass(frozen=True)
class InferenceOptions:
    """Options of a batch inference."""

    k: int = 20
    """Number of items per ranking; models that rank candidates ignore it."""
    split: str | None = None
    """Split whose requests are ranked. None: rank after all behaviours of each user, or
    for a model that ranks candidates the requests of `test`."""
    batch_size: int = 256
    """Requests per batch."""
    recommend: dict[str, Any] = field(default_factory=dict)
    """Options of `recommend`."""
    allowed: str | None = None
    """File with the ids of the items that may be ranked; None: all items."""
    overwrite: bool = False
    """Whether to replace another table in the folder."""
    users_per_part: int = USERS_PER_PART
    """Largest number of users per file of the table."""


@dataclass(frozen=True)
class InferenceTask:
    """Arguments that all workers of a batch inference share."""

    uri: str
    """Folder of the checkpoint."""
    inputs: Inputs
    """Folders of the tables with the users and the catalogue."""
    output: str
    """Folder of the table."""
    schema: pa.Schema
    """Schema of the table."""
    k: int
    """Number of items per ranking."""
    split: str
    """Split whose requests are ranked; `next`: after all behaviours of each user."""
    batch_size: int
    """Requests per batch."""
    recommend: dict[str, Any]
    """Options of `recommend`, with the mask of the allowed items."""
    workers: Workers
    """Processes and devices."""


class Inference:
    """Worker of a batch inference, which Ray Data runs as an actor.

    Args:
        task: Arguments that all workers share.
    """

    table: ClassVar[str]
    """Kind of the table."""
    count_name: ClassVar[str]
    """Key in the manifest of the sum of the parts' counts."""
    examples: RequestDataset
    """The requests to rank."""

    def __init__(self, task: InferenceTask) -> None:
        if task.workers.num_threads:
            torch.set_num_threads(task.workers.num_threads)
        self.task = task
        self.device = resolve_device(task.workers.device)
        self.loaded = LoadedModel.load(task.uri, task.inputs, self.device)
        self.model = self.loaded.model
        self.recommend = dict(task.recommend)
        if "allowed" in self.recommend:
            mask = self.recommend["allowed"].to(self.device)
            self.recommend["allowed"] = self.model.encode_allowed(mask)
        self.tables = self.loaded.catalogue.versions
        items = self.tables["items"].read(["item_id"])
        self.items = items["item_id"].combine_chunks()
        self.examples = self.load_examples()
        self.user_rows = self.examples.user[self.examples.rows()]
        self.file = -1

    def __call__(self, block: dict[str, NDArray]) -> dict[str, NDArray]:
        """Write the parts of a block of units.

        Args:
            block: Columns `file`, `first` and `last`, as `cut_units` returns them.

        Returns:
            The block with the columns `part` (as JSON) and `count`.
        """
        columns = (block[name].tolist() for name in ("file", "first", "last"))
        written = [self.write_unit(*unit) for unit in zip(*columns, strict=True)]
        parts = np.array([json.dumps(vars(part)) for part, _ in written], dtype=object)
        counts = np.array([count for _, count in written])
        return {**block, "part": parts, "count": counts}

    def write_unit(self, file: int, first: int, last: int) -> tuple[Part, int]:
        """Rank for a range of users, and write a part of the table.

        Args:
            file: Number of a file of `sequences`.
            first: First user of the range, counted within the file.
            last: End of the range, exclusive.

        Returns:
            The part, and its count for `count_name`.
        """
        if file != self.file:
            self.load_users(file)
        index = self.user_rows - self.first_user
        rows = self.examples.rows()[(first <= index) & (index < last)]
        ranked = self.rank_rows(rows)
        if not ranked:
            return write_part(self.task.output, self.task.schema.empty_table()), 0
        arrays = [np.concatenate(batches) for batches in zip(*ranked, strict=True)]
        columns, count = self.to_columns(*arrays)
        table = pa.table(columns, schema=self.task.schema)
        return write_part(self.task.output, table), count

    def rank_rows(self, rows: NDArray[np.int64]) -> list[list[NDArray]]:
        """Rank for examples in batches of similar lengths.

        Args:
            rows: Rows of the examples in the dataset.

        Returns:
            The arrays that `rank` returns, for each batch.
        """
        ranked = []
        ordered = self.examples.sort_for_evaluation(rows)
        for batch_rows in self.examples.cut_batches(ordered, self.task.batch_size):
            batch = self.examples.collate(batch_rows).to(self.device)
            with torch.no_grad():
                ranked.append([value.cpu().numpy() for value in self.rank(batch)])
        return ranked

    def load_users(self, file: int) -> None:
        """Load the user ids of a file of `sequences`."""
        sequences = self.tables["sequences"]
        uri = sequences.part_uris()[file]
        self.users = read_parquet(uri, ["user_id"])["user_id"].combine_chunks()
        self.first_user = sum(part.rows for part in sequences.files[:file])
        self.file = file

    def load_examples(self) -> RequestDataset:
        """Load the requests to rank."""
        return self.model.load_examples(self.loaded.catalogue, self.task.split)

    def rank(self, batch: Any) -> Sequence[Tensor]:
        """Rank for a batch.

        Returns:
            Tensors of B rows each. The first has the users' rows in `sequences`.
        """
        raise NotImplementedError

    def to_columns(self, user: NDArray, *ranked: NDArray) -> tuple[list[pa.Array], int]:
        """Return the columns of a part of the table, and its count for `count_name`.

        Args:
            user: (B,) rows of the users in `sequences`, of all batches of the part.
            ranked: The other arrays that `rank` returned, of B rows each.
        """
        raise NotImplementedError


class UserInference(Inference):
    """Inference that ranks the catalogue after all behaviours of each user."""

    table = "recommendations"
    count_name = "below_k"

    def load_examples(self) -> RequestDataset:
        """Load the requests, with histories as long as the options need."""
        max_history = required_history(self.model.config.max_history, self.recommend)
        return self.model.load_examples(
            self.loaded.catalogue, self.task.split, max_history=max_history
        )

    def rank(self, batch: Any) -> Sequence[Tensor]:
        """Return user rows (B,), items (B, K) and scores (B, K)."""
        items, scores = self.model.recommend(batch, self.task.k, **self.recommend)
        return batch.user_row, items, scores.float()

    def to_columns(self, user: NDArray, *ranked: NDArray) -> tuple[list[pa.Array], int]:
        """Return the columns of `RECOMMENDATIONS`, and the number of short rankings."""
        order = np.argsort(user, kind="stable")
        user_ids = pc.take(self.users, pa.array(user[order] - self.first_user))
        items, scores = (values[order] for values in ranked)
        rankings, num_short = self.to_rankings(items, scores)
        return [user_ids, *rankings], num_short

    def to_rankings(
        self, items: NDArray, scores: NDArray
    ) -> tuple[list[pa.Array], int]:
        """Return the columns `item_id` and `score`, and the number of short rankings.

        Args:
            items: (B, K) items, negative after the end of a short ranking.
            scores: (B, K) scores.
        """
        is_item = items >= 0  # (B, K)
        lengths = is_item.sum(1)  # (B,)
        offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
        item_ids = pc.take(self.items, pa.array(items[is_item]))
        item_scores = pa.array(scores[is_item], pa.float32())
        columns = [
            pa.ListArray.from_arrays(offsets, values)
            for values in (item_ids, item_scores)
        ]
        return columns, int((lengths < self.task.k).sum())


class RequestInference(UserInference):
    """Inference that ranks the catalogue for each request of a split."""

    count_name = "below_k"
    examples: RetrievalDataset

    def rank(self, batch: Any) -> Sequence[Tensor]:
        """Return user rows, request numbers, targets, repeats, items and scores.

        Items and scores are (B, K), the other tensors (B,).
        """
        user, items, scores = super().rank(batch)
        return user, batch.request, batch.target, batch.repeats, items, scores

    def to_columns(self, user: NDArray, *ranked: NDArray) -> tuple[list[pa.Array], int]:
        """Return the columns of `RANKED_REQUESTS`, and the number of short rankings."""
        order = np.argsort(ranked[0], kind="stable")  # by user, then by request
        user = user[order]
        number, target, repeats, items, scores = (values[order] for values in ranked)
        index = request_index(number)
        request = self.examples.request_offsets[user] + index
        rankings, num_short = self.to_rankings(items, scores)
        columns = [
            pc.take(self.users, pa.array(user - self.first_user)),
            pa.array(index, pa.int32()),
            pa.array(self.examples.columns["request_time"][request]),
            pc.take(self.items, pa.array(target)),
            pa.array(repeats.astype(bool)),
        ]
        return [*columns, *rankings], num_short


class CandidateInference(Inference):
    """Inference that scores all candidates of a split's requests.

    Shapes: `C` candidates of a batch, `T` labels.
    """

    table = "scores"
    count_name = "candidates"

    def __init__(self, task: InferenceTask) -> None:
        super().__init__(task)
        self.has_queries = "query" in task.schema.names
        if self.has_queries:
            self.queries = pa.array([], pa.string())
            if self.tables["queries"].rows:  # an empty table has no files
                queries = self.tables["queries"].read(["query"])
                self.queries = queries["query"].combine_chunks()

    def rank(self, batch: Any) -> Sequence[Tensor]:
        """Return user rows, requests, times, queries, items, labels and scores.

        Labels and scores are (C, T), the other tensors (C,).
        """
        keys = self.examples.candidate_keys(batch)
        scores = torch.sigmoid(check_finite(self.model.score(batch).float()))
        labels = keys["labels"][:, : scores.shape[1]]  # some models learn the first
        names = ("user_row", "request", "time", "query", "item")
        return *(keys[name] for name in names), labels, scores

    def to_columns(self, user: NDArray, *ranked: NDArray) -> tuple[list[pa.Array], int]:
        """Return the columns of `scores_schema`, and the number of candidates."""
        first_scores = ranked[-1][:, 0]  # (C,) by the first label
        order = np.lexsort((-first_scores, ranked[0], user))
        user = user[order]
        request, time, query, item, labels, scores = (
            values[order] for values in ranked
        )
        is_first = np.append(True, (np.diff(user) != 0) | (np.diff(request) != 0))
        first = np.flatnonzero(is_first)  # first candidate of each request
        offsets = pa.array(np.append(first, len(user)), pa.int32())
        user_index = pa.array(user[first] - self.first_user)
        columns = [pc.take(self.users, user_index), pa.array(time[first])]
        if self.has_queries:
            query_index = pa.array(query[first], mask=query[first] < 0)
            columns.append(pc.take(self.queries, query_index))
        lists = [pc.take(self.items, pa.array(item))]
        lists += [pa.array(values, pa.float32()) for values in scores.T]
        lists += [pa.array(values > 0) for values in labels.T]
        columns += [pa.ListArray.from_arrays(offsets, values) for values in lists]
        return columns, len(user)


def infer_all(
    uri: str,
    inputs: Inputs,
    output: str,
    options: InferenceOptions | None = None,
    workers: Workers | None = None,
    start_ray: Callable[[], None] = lambda: None,
) -> tuple[Table[PredictionsInfo], bool]:
    """Write the rankings of a checkpoint for many users to a table.

    Args:
        uri: Folder of a checkpoint, or of a run, whose best checkpoint is used.
        inputs: Folders of the tables, semantic IDs and text embeddings.
        output: Folder of the table.
        options: Options of the inference.
        workers: Processes and devices; by default this process.
        start_ray: Start Ray; called only if the workers need it.

    Returns:
        The table, and whether an equal table existed already.
    """
    output = absolute(output)
    options, workers = options or InferenceOptions(), workers or Workers()
    checked = check_evaluation(uri, inputs, options.recommend)
    kind = choose_kind(checked, options)
    ranked = describe_ranked(kind, options)
    recommend = dict(checked.options)
    config = {
        **ranked,
        "users_per_part": options.users_per_part,
        "model": checked.checkpoint.model,
        **recommend,
    }
    hashes = hash_inputs(checked)
    if options.allowed:
        recommend["allowed"], hashes["allowed"] = read_allowed(
            options.allowed, checked.versions["items"]
        )
    check_replaceable(output, kind.table)
    finished = None if options.overwrite else find_table(output, PredictionsInfo)
    if finished:
        finished.check_made_with(config, hashes)
        return finished, True
    sequences = checked.versions["sequences"]
    name = checked.checkpoint.name
    task = InferenceTask(
        uri=checked.uri,
        inputs=inputs,
        output=output,
        schema=choose_schema(kind, name, sequences),
        k=options.k,
        split=ranked.get("split", "next"),
        batch_size=options.batch_size,
        recommend=recommend,
        workers=workers,
    )
    if workers.use_ray:
        start_ray()
    with writing(output):
        written = write_units(kind, task, cut_units(sequences, options.users_per_part))
        counted = {kind.count_name: sum(count for _, count in written)}
        info = PredictionsInfo(
            model=name, checkpoint=checked.uri, split=ranked.get("split", ""), **counted
        )
        parts = [part for part, _ in written]
        table = commit(
            output,
            kind.table,
            task.schema,
            parts,
            config=config,
            inputs=hashes,
            info=info,
        )
    return table, False


def describe_ranked(kind: type[Inference], options: InferenceOptions) -> dict[str, Any]:
    """Return the number of items per ranking and the split, for the manifest.

    Scores of candidates have no number of items, and rankings of users no split.
    """
    if kind is CandidateInference:
        return {"split": options.split or "test"}
    if options.split:
        return {"k": options.k, "split": options.split}
    return {"k": options.k}


def hash_inputs(checked: CheckedEvaluation) -> dict[str, str]:
    """Return the hashes of the tables that the model reads, and of its weights."""
    hashes = {
        name: checked.versions[name].hash
        for name, trained in checked.checkpoint.hashes.items()
        if trained
    }
    return {**hashes, "checkpoint": checkpoint.weights_hash(checked.uri)}


def choose_kind(
    checked: CheckedEvaluation, options: InferenceOptions
) -> type[Inference]:
    """Return the inference class for a checkpoint and options."""
    name = checked.checkpoint.name
    model_class = registry.find(name)
    reason = model_class.reason_not_served()
    if reason:
        raise UserError(f"the model '{name}' is not served: {reason}")
    if model_class.ranks == "catalogue":
        return RequestInference if options.split else UserInference
    if options.allowed:
        raise UserError(
            f"allowed is {options.allowed}, but the model '{name}' scores given "
            "candidates"
        )
    return CandidateInference


def choose_schema(
    kind: type[Inference], name: str, sequences: Table[SequencesInfo]
) -> pa.Schema:
    """Return the schema of the table that an inference writes.

    Args:
        kind: Class of the inference.
        name: Name of the model.
        sequences: Table of the sequences.
    """
    if kind is UserInference:
        return RECOMMENDATIONS
    if kind is RequestInference:
        return RANKED_REQUESTS
    model_class = registry.find(name)
    labels = model_class.describe_requests(sequences.info)["labels"]
    return scores_schema(
        labels, "queries" in model_class.catalogue_class.tables["tables"]
    )


def cut_units(
    sequences: Table[SequencesInfo], users_per_part: int
) -> list[dict[str, int]]:
    """Cut the files of `sequences` into units of at most `users_per_part` users.

    Returns:
        Units with the index of the file, and first (inclusive) and last (exclusive)
        user, counted within the file.
    """
    units = []
    for file_index, file in enumerate(sequences.files):
        for first in range(0, file.rows, users_per_part):
            last = min(first + users_per_part, file.rows)
            units.append({"file": file_index, "first": first, "last": last})
    return units


def write_units(
    kind: type[Inference], task: InferenceTask, units: list[dict[str, int]]
) -> list[tuple[Part, int]]:
    """Write the parts of all units, in this process or by Ray Data actors.

    Args:
        kind: Class of the inference.
        task: Arguments that all workers share.
        units: Units, as `cut_units` returns them.

    Returns:
        Part and count of each unit, in the order of the units.
    """
    if not task.workers.use_ray:
        worker = kind(task)
        return [worker.write_unit(**unit) for unit in units]
    num_actors = task.workers.shards
    needs_gpu = task.workers.needs_gpu(num_actors)
    quiet_ray_data()
    pool = ray.data.ActorPoolStrategy(
        min_size=1, max_size=num_actors, initial_size=num_actors
    )
    with cluster.silence_cpp_log():
        written = (
            ray.data.from_items(units, override_num_blocks=len(units))
            .map_batches(
                kind,
                fn_constructor_args=(task,),
                batch_size=1,
                compute=pool,
                num_cpus=1,
                num_gpus=1 if needs_gpu else 0,
            )
            .take_all()
        )
    written = sorted(written, key=itemgetter("file", "first"))
    return [(Part(**json.loads(row["part"])), int(row["count"])) for row in written]
