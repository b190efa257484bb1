"""Rank for many users and write the rankings as a table.

    manifest, existed = infer_all(checkpoint, inputs, "recommendations", InferenceOptions(k=20))

A model that ranks a catalogue writes `recommendations`: the top K items after all
behaviours of each user, or, for a split, after the history of each request, with its
time and target. A model that ranks candidates writes `scores`: scores and labels of all
candidates of a split's requests. All metrics of an evaluation can be computed again
from the table of its split.

A unit of work is a range of users of one file of `sequences`. Units are processed one
after the other in this process, or by Ray Data actors that each hold the model. An
actor also holds the catalogue and the user ids of one file.
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

from models import registry
from models.dataset.dataset import RequestDataset
from models.loaded_model import LoadedModel
from models.metrics.scores import check_finite
from models.retrieval.data import RetrievalDataset, request_index
from models.retrieval.recommend import required_history
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import (
    Manifest,
    Part,
    UserError,
    commit,
    fingerprint,
    has_earlier_table,
    join,
    part_uris,
    read_manifest,
    read_parquet,
    read_table,
    up_to_date,
    write_part,
    writing,
)
from models.storage.uri import absolute
from pipelines.data.engine import quiet_ray_data
from pipelines.evaluation.allowed import read_allowed
from pipelines.evaluation.checks import (
    CheckedEvaluation,
    Workers,
    check_evaluation,
    resolve_device,
)
from pipelines.ray_inside import silence_cpp_log

USERS_PER_PART = 50_000
"""Users per file of the table, at most."""


def list_of(item_type: pa.DataType) -> pa.DataType:
    """Return the type of lists of values."""
    return pa.list_(pa.field("item", item_type))


RECOMMENDATIONS = pa.schema(
    [
        pa.field("user_id", pa.string(), nullable=False),
        # best first, at most K
        pa.field("item_id", list_of(pa.string()), nullable=False),
        # on the model's own scale
        pa.field("score", list_of(pa.float32()), nullable=False),
    ]
)

RANKED_REQUESTS = pa.schema(
    [
        RECOMMENDATIONS.field("user_id"),
        # index of the request among the `requests` of the user's row in `sequences`
        pa.field("request", pa.int32(), nullable=False),
        pa.field("timestamp_ms", pa.int64()),
        pa.field("target", pa.string(), nullable=False),
        # whether the target is in the history; metrics under first/ leave it out
        pa.field("target_is_known", pa.bool_(), nullable=False),
        RECOMMENDATIONS.field("item_id"),
        RECOMMENDATIONS.field("score"),
    ]
)


def scores_schema(labels: Sequence[str], has_queries: bool) -> pa.Schema:
    """Return the schema of `scores`: one row per request, in the order of the sequences.

    A request is a search, or the impressions of a user at one time of a feed.

    Args:
        labels: names of the labels.
        has_queries: whether requests have a query.
    """
    fields = [
        pa.field("user_id", pa.string(), nullable=False),
        pa.field("timestamp_ms", pa.int64(), nullable=False),
    ]
    if has_queries:
        fields.append(pa.field("query", pa.string()))
    # candidates, best first by the first label
    fields.append(pa.field("item_id", list_of(pa.string()), nullable=False))
    for name in labels:  # probabilities
        fields.append(pa.field(f"score_{name}", list_of(pa.float32()), nullable=False))
    for name in labels:
        fields.append(pa.field(f"label_{name}", list_of(pa.bool_()), nullable=False))
    return pa.schema(fields)


@dataclass(frozen=True)
class InferenceOptions:
    """Options of a batch inference."""

    k: int = 20
    """Items per ranking, of a model that ranks a catalogue."""
    split: str | None = None
    """Rank for the requests of this split; None: after all behaviours of each user, or
    `test` for a model that ranks candidates."""
    batch_size: int = 256
    """Requests per batch."""
    recommend: dict[str, Any] = field(default_factory=dict)
    """Options of `recommend`."""
    allowed: str | None = None
    """File of the only items to rank."""
    overwrite: bool = False
    """Whether to replace another table in the folder."""
    users_per_part: int = USERS_PER_PART
    """Users per file of the table, at most."""


@dataclass(frozen=True)
class InferenceTask:
    """Arguments of every worker of a batch inference."""

    uri: str
    """Folder of the checkpoint."""
    inputs: Inputs
    """The tables."""
    output: str
    """Folder of the table."""
    schema: pa.Schema
    """Schema of the table."""
    k: int
    """Items per ranking."""
    split: str
    """Requests to rank for; `next`: after all behaviours of each user."""
    batch_size: int
    """Requests per batch."""
    recommend: dict[str, Any]
    """Options of `recommend`, with the mask of the allowed items."""
    workers: Workers
    """Processes and devices."""


class Inference:
    """A worker of a batch inference: it holds the model, ranks for users and writes parts.

    Ray Data makes actors of it.
    """

    table: ClassVar[str]
    """Kind of the table."""
    count_name: ClassVar[str]
    """Name of the count that parts add up to, in the manifest."""
    examples: RequestDataset
    """The requests to rank for."""

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
        items = read_table(join(task.inputs.tables, "items"), "items", ["item_id"])
        self.items = items["item_id"].combine_chunks()
        self.examples = self.load_examples()
        self.user_rows = self.examples.user_rows(self.examples.rows())
        self.file = -1

    def __call__(self, block: dict[str, NDArray]) -> dict[str, NDArray]:
        """Write the parts of units of work, as a step of Ray Data."""
        columns = (block[name].tolist() for name in ("file", "first", "last"))
        written = [self.write_unit(*unit) for unit in zip(*columns, strict=True)]
        parts = np.array([json.dumps(vars(part)) for part, _ in written], dtype=object)
        counts = np.array([count for _, count in written])
        return {**block, "part": parts, "count": counts}

    def write_unit(self, file: int, first: int, last: int) -> tuple[Part, int]:
        """Rank for users `first` to `last` - 1 of a file of `sequences`, and write a part.

        Returns:
            The part, and the unit's summand of `count_name`.
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
        """Rank for examples in batches of similar lengths; return the arrays of each batch."""
        ranked = []
        ordered = self.examples.sort_for_evaluation(rows)
        for batch_rows in self.examples.cut_batches(ordered, self.task.batch_size):
            batch = self.examples.collate(batch_rows).to(self.device)
            with torch.no_grad():
                ranked.append([value.cpu().numpy() for value in self.rank(batch)])
        return ranked

    def load_users(self, file: int) -> None:
        """Load the user ids of a file of `sequences`."""
        sequences = self.task.inputs.sequences
        manifest = read_manifest(sequences, "sequences")
        uri, sha256 = part_uris(sequences, manifest)[file], manifest.files[file].sha256
        self.users = read_parquet(uri, ["user_id"], sha256)["user_id"].combine_chunks()
        self.first_user = sum(part.rows for part in manifest.files[:file])
        self.file = file

    def load_examples(self) -> RequestDataset:
        """Load the requests to rank for."""
        return self.loaded.load_examples(self.task.inputs, self.task.split)

    def rank(self, batch: Any) -> Sequence[Tensor]:
        """Rank for a batch; the first tensor has the users' rows of `sequences`."""
        raise NotImplementedError

    def to_columns(self, user: NDArray, *ranked: NDArray) -> tuple[list[pa.Array], int]:
        """Return the columns of the table, and the summand of `count_name`."""
        raise NotImplementedError


class UserInference(Inference):
    """Rank the catalogue after all behaviours of each user."""

    table = "recommendations"
    count_name = "users_below_k"

    def load_examples(self) -> RequestDataset:
        """Load the requests, with as much history as the options need."""
        longest = required_history(self.model.config.max_history, self.recommend)
        return self.loaded.load_examples(
            self.task.inputs, self.task.split, max_history=longest
        )

    def rank(self, batch: Any) -> Sequence[Tensor]:
        items, scores = self.model.recommend(batch, self.task.k, **self.recommend)
        return batch.user_row, items, scores.float()

    def to_columns(self, user: NDArray, *ranked: NDArray) -> tuple[list[pa.Array], int]:
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
        is_real = items >= 0
        lengths = is_real.sum(1)
        offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
        names = pc.take(self.items, pa.array(items[is_real]))
        values = pa.array(scores[is_real], pa.float32())
        columns = [pa.ListArray.from_arrays(offsets, each) for each in (names, values)]
        return columns, int((lengths < self.task.k).sum())


class RequestInference(UserInference):
    """Rank the catalogue after the history of each request of a split."""

    count_name = "requests_below_k"
    examples: RetrievalDataset

    def rank(self, batch: Any) -> Sequence[Tensor]:
        user, items, scores = super().rank(batch)
        return user, batch.request, batch.target, batch.repeats, items, scores

    def to_columns(self, user: NDArray, *ranked: NDArray) -> tuple[list[pa.Array], int]:
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
    """Score all candidates of a split's requests."""

    table = "scores"
    count_name = "candidates"

    def __init__(self, task: InferenceTask) -> None:
        super().__init__(task)
        self.has_queries = "query" in task.schema.names
        if self.has_queries:
            self.queries = read_queries(task.inputs.tables)

    def rank(self, batch: Any) -> Sequence[Tensor]:
        keys = self.examples.candidate_keys(batch)
        scores = torch.sigmoid(check_finite(self.model.score(batch).float()))
        labels = keys["labels"][:, : scores.shape[1]]  # some models learn the first
        names = ("user_row", "request", "time", "query", "item")
        return *(keys[name] for name in names), labels, scores

    def to_columns(self, user: NDArray, *ranked: NDArray) -> tuple[list[pa.Array], int]:
        by_first_label = -ranked[-1][:, 0]
        order = np.lexsort((by_first_label, ranked[0], user))
        user = user[order]
        request, time, query, item, labels, scores = (each[order] for each in ranked)
        is_first = np.append(True, (np.diff(user) != 0) | (np.diff(request) != 0))
        first = np.flatnonzero(is_first)
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


def read_queries(tables: str) -> pa.Array:
    """Return the texts of the table of queries, which is empty for a log without queries."""
    uri = join(tables, "queries")
    if not read_manifest(uri, "queries").rows:
        return pa.array([], pa.string())
    return read_table(uri, "queries", ["query"])["query"].combine_chunks()


def infer_all(
    uri: str,
    inputs: Inputs,
    output: str,
    options: InferenceOptions | None = None,
    workers: Workers | None = None,
    start_ray: Callable[[], None] = lambda: None,
) -> tuple[Manifest, bool]:
    """Write the rankings of a checkpoint for many users to a table.

    Args:
        uri: folder of a checkpoint, or of a run, whose best checkpoint is taken.
        inputs: the tables.
        output: folder of the table.
        options: what is ranked.
        workers: processes and devices, by default this process.
        start_ray: called before Ray is needed.

    Returns:
        The manifest of the table, and whether the table existed already.

    Raises:
        UserError: if the model ranks nothing, does not fit the tables or the options,
            or
            another table is in the folder.
    """
    output = absolute(output)
    options, workers = options or InferenceOptions(), workers or Workers()
    checked = check_evaluation(uri, inputs, options.recommend)
    kind = choose_kind(checked, options)
    about, recommend = checked.about, dict(checked.options)
    sequences = read_manifest(inputs.sequences, "sequences")
    if kind is CandidateInference:
        asked: dict[str, Any] = {"split": options.split or "test"}
    else:
        asked = {"k": options.k}
        if options.split:
            asked["split"] = options.split
    config = {
        **asked,
        "users_per_part": options.users_per_part,
        "model": about.model,
        **recommend,
    }
    hashes = {
        **{name: checked.hashes[name] for name, value in about.hashes.items() if value},
        "checkpoint": checkpoint.weights_hash(checked.uri),
    }
    if options.allowed:
        recommend["allowed"], hashes["allowed"] = read_allowed(
            options.allowed, inputs.tables
        )
    if has_earlier_table(output, kind.table) and not options.overwrite:
        if up_to_date(output, fingerprint(config, hashes)):
            return read_manifest(output, kind.table), True
        raise UserError(
            f"{output} holds other {kind.table}; choose another folder or replace it with "
            f"--overwrite"
        )
    task = InferenceTask(
        checked.uri,
        inputs,
        output,
        choose_schema(kind, about.name, sequences),
        options.k,
        asked.get("split", "next"),
        options.batch_size,
        recommend,
        workers,
    )
    if workers.use_ray:
        start_ray()
    with writing(output):
        written = write_units(kind, task, cut_units(sequences, options.users_per_part))
        info = {
            "users": sequences.rows,
            **asked,
            kind.count_name: sum(count for _, count in written),
            "model": about.name,
            "checkpoint": checked.uri,
        }
        parts = [part for part, _ in written]
        manifest = commit(
            output,
            kind.table,
            task.schema,
            parts,
            config=config,
            inputs=hashes,
            info=info,
        )
    return manifest, False


def choose_kind(
    checked: CheckedEvaluation, options: InferenceOptions
) -> type[Inference]:
    """Return the inference class for the options.

    Raises:
        UserError: if the model ranks nothing, or refuses the options.
    """
    name = checked.about.name
    model_class = registry.find(name)
    reason = model_class.reason_not_served()
    if reason:
        raise UserError(
            f"the model '{name}' is not served: {reason}; give --checkpoint of another model"
        )
    if model_class.ranks == "catalogue":
        return RequestInference if options.split else UserInference
    if options.allowed:
        raise UserError(
            f"--allowed is {options.allowed}, but the model '{name}' scores what is given; "
            f"leave it out"
        )
    return CandidateInference


def choose_schema(kind: type[Inference], name: str, sequences: Manifest) -> pa.Schema:
    """Return the schema of the table that a kind of inference writes for a model."""
    if kind is UserInference:
        return RECOMMENDATIONS
    if kind is RequestInference:
        return RANKED_REQUESTS
    model_class = registry.find(name)
    labels = model_class.describe_requests(sequences.info)["labels"]
    return scores_schema(labels, "queries" in model_class.catalogue_tables["tables"])


def cut_units(sequences: Manifest, users_per_part: int) -> list[dict[str, int]]:
    """Return units of work: ranges of at most `users_per_part` users of one file."""
    return [
        {"file": number, "first": first, "last": min(first + users_per_part, file.rows)}
        for number, file in enumerate(sequences.files)
        for first in range(0, file.rows, users_per_part)
    ]


def write_units(
    kind: type[Inference], task: InferenceTask, units: list[dict[str, int]]
) -> list[tuple[Part, int]]:
    """Return part and count of each unit, written by this process or by Ray Data actors."""
    if not task.workers.use_ray:
        worker = kind(task)
        return [worker.write_unit(**unit) for unit in units]
    num_actors = task.workers.shards
    needs_gpu = task.workers.needs_gpu(num_actors)
    quiet_ray_data()
    pool = ray.data.ActorPoolStrategy(
        min_size=1, max_size=num_actors, initial_size=num_actors
    )
    with silence_cpp_log():
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
