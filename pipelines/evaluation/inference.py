"""Batch inference: what a model ranks for many users, as a table.

A model that ranks a catalogue writes `recommendations`: the top K items after all that each user did, or, for a split,
after the history of each of its requests, with the request's time and target. A model that ranks candidates writes
`scores`: the scores and labels of every candidate of a split's requests. So all figures of an evaluation can be
computed again from the table of its split.

A unit of work is a run of the users of one file of `sequences`. Units are ranked one after the other in this process,
or by Ray Data actors that each hold the model; beside that, the catalogue and the user ids of one file are held.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
from models.retrieval.data import RetrievalDataset, request_place
from models.retrieval.recommend import history_to_give
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import (
    Manifest,
    Part,
    UserError,
    check_place,
    commit,
    fingerprint,
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
from models.training.fit import to_device
from pipelines.data.engine import quiet_ray_data
from pipelines.evaluation.allowed import read_allowed
from pipelines.evaluation.ranking import check, device_of, takes_gpu
from pipelines.ray_inside import silence_cpp_log


def listed(value: pa.DataType) -> pa.DataType:
    """A list of these values."""
    return pa.list_(pa.field("item", value))


RECOMMENDATIONS = pa.schema(
    [
        pa.field("user_id", pa.string(), nullable=False),
        pa.field(
            "item_id", listed(pa.string()), nullable=False
        ),  # best first, at most K
        pa.field(
            "score", listed(pa.float32()), nullable=False
        ),  # the model's own scale
    ]
)


RANKED_REQUESTS = pa.schema(
    [
        RECOMMENDATIONS.field("user_id"),
        # place of the request among the `requests` of the user's row in `sequences`
        pa.field("request", pa.int32(), nullable=False),
        pa.field("timestamp_ms", pa.int64()),
        pa.field("target", pa.string(), nullable=False),
        # whether the user did something with the target before: metrics under first/ are of the other requests
        pa.field("target_is_known", pa.bool_(), nullable=False),
        RECOMMENDATIONS.field("item_id"),
        RECOMMENDATIONS.field("score"),
    ]
)


def scores_schema(labels: Sequence[str], queries: bool) -> pa.Schema:
    """scores: one row per request, that is per search, or per user and time of a feed, in the order of the sequences.
    `queries`: whether requests have one."""
    return pa.schema(
        [
            pa.field("user_id", pa.string(), nullable=False),
            pa.field("timestamp_ms", pa.int64(), nullable=False),  # of the request
            *(
                [pa.field("query", pa.string())] if queries else []
            ),  # null where it had none
            pa.field(
                "item_id", listed(pa.string()), nullable=False
            ),  # candidates, best first by the first label
            *(
                pa.field(f"score_{name}", listed(pa.float32()), nullable=False)
                for name in labels
            ),  # chances, 0 to 1
            *(
                pa.field(f"label_{name}", listed(pa.bool_()), nullable=False)
                for name in labels
            ),
        ]
    )


USERS_PER_PART = 50_000
"""Users per file of the table at most."""


class Kernel:
    """Holds the model and one file of users, ranks for some of these and writes a part; an actor of Ray Data too."""

    table: ClassVar[str]
    """Kind of the table that it writes."""
    examples: RequestDataset
    """The requests to rank for."""

    def __init__(
        self,
        uri: str,
        inputs: Inputs,
        output: str,
        schema: pa.Schema,
        ask: dict[str, Any],
        batch_size: int,
        options: dict[str, Any],
        device: str,
        threads: int,
    ) -> None:
        """`ask` has what is asked for: `k` items, or the requests of a `split`; `threads` 0 leaves them."""
        if threads:
            torch.set_num_threads(threads)
        self.device, self.output, self.schema, self.ask = (
            device_of(device),
            output,
            schema,
            ask,
        )
        self.batch_size, self.options, self.inputs = batch_size, options, inputs
        self.loaded = LoadedModel.load(uri, inputs, self.device)
        self.model = self.loaded.model
        if "allowed" in options:
            self.options = {
                **options,
                "allowed": self.model.encode_allowed(
                    options["allowed"].to(self.device)
                ),
            }
        self.items = read_table(join(inputs.tables, "items"), "items", ["item_id"])[
            "item_id"
        ].combine_chunks()
        self.examples = self.load_examples()
        self.user_rows = self.examples.user_rows(self.examples.rows())
        self.file = -1  # the one whose user ids are held

    def __call__(self, block: dict[str, NDArray]) -> dict[str, NDArray]:
        units = zip(
            *(block[name].tolist() for name in ("file", "first", "last")), strict=True
        )
        made = [self.part(*unit) for unit in units]
        parts = np.array([json.dumps(vars(part)) for part, _ in made], dtype=object)
        return {**block, "part": parts, "count": np.array([count for _, count in made])}

    def part(self, file: int, first: int, last: int) -> tuple[Part, int]:
        """Ranks for users `first` to `last` - 1 of a file, in batches of like length, and writes them in its order; and
        what `ranked` counts."""
        if file != self.file:
            self.hold(file)
        place = self.user_rows - self.first_user
        rows = self.examples.rows()[(first <= place) & (place < last)]
        found = []
        ordered = self.examples.sort_for_evaluation(rows)
        for chosen in self.examples.cut_batches(ordered, self.batch_size):
            batch = to_device(self.examples.collate(chosen), self.device)
            with torch.no_grad():
                found.append([value.cpu().numpy() for value in self.rank(batch)])
        if not found:  # none of them has a request
            return write_part(self.output, self.schema.empty_table()), 0
        columns, count = self.columns(*map(np.concatenate, zip(*found, strict=True)))
        return write_part(self.output, pa.table(columns, schema=self.schema)), count

    def hold(self, file: int) -> None:
        """Read the user ids of a file of `sequences` in place of the file before."""
        sequences = self.inputs.sequences
        manifest = read_manifest(sequences, "sequences")
        uri, sha256 = part_uris(sequences, manifest)[file], manifest.files[file].sha256
        self.users = read_parquet(uri, ["user_id"], sha256)["user_id"].combine_chunks()
        self.first_user = sum(part.rows for part in manifest.files[:file])
        self.file = file

    def load_examples(self) -> RequestDataset:
        """Load the requests to rank for."""
        raise NotImplementedError

    def rank(self, batch: dict[str, Tensor]) -> Sequence[Tensor]:
        """What is found for a batch, its users' rows in the table first."""
        raise NotImplementedError

    def columns(self, user: NDArray, *found: NDArray) -> tuple[list[pa.Array], int]:
        """The table's columns of what was found for all batches, and a count that is summed over parts."""
        raise NotImplementedError


class Recommender(Kernel):
    """Rank the catalogue after all that each user did; count the users who get fewer than K items."""

    table = "recommendations"

    def load_examples(self) -> RequestDataset:
        """Load the requests of the split, by default those after all behaviours, with as much history as is read."""
        longest = history_to_give(self.model.config.max_history, self.options)
        split = self.ask.get("split", "next")
        return self.loaded.load_examples(self.inputs, split, max_history=longest)

    def rank(self, batch: dict[str, Tensor]) -> Sequence[Tensor]:
        items, scores = self.model.recommend(batch, self.ask["k"], **self.options)
        return batch["user_row"], items, scores.float()

    def columns(self, user: NDArray, *found: NDArray) -> tuple[list[pa.Array], int]:
        order = np.argsort(user, kind="stable")
        user_ids = pc.take(self.users, pa.array(user[order] - self.first_user))
        item, score = (values[order] for values in found)
        rankings, short = self.rankings(item, score)
        return [user_ids, *rankings], short

    def rankings(self, item: NDArray, score: NDArray) -> tuple[list[pa.Array], int]:
        """Return the columns `item_id` and `score` of rankings (B, K), and how many have fewer than K items."""
        real = item >= 0  # where fewer than K items could be ranked, the tail is empty
        offsets = pa.array(np.concatenate([[0], np.cumsum(real.sum(1))]), pa.int32())
        names = pc.take(self.items, pa.array(item[real]))
        columns = [
            pa.ListArray.from_arrays(offsets, names),
            pa.ListArray.from_arrays(offsets, pa.array(score[real], pa.float32())),
        ]
        return columns, int((real.sum(1) < self.ask["k"]).sum())


class RequestRecommender(Recommender):
    """Rank the catalogue after the history of each request of a split, as an evaluation does."""

    examples: RetrievalDataset

    def rank(self, batch: dict[str, Tensor]) -> Sequence[Tensor]:
        of_request = (batch[name] for name in ("request", "target", "repeats"))
        user, items, scores = super().rank(batch)
        return user, *of_request, items, scores

    def columns(self, user: NDArray, *found: NDArray) -> tuple[list[pa.Array], int]:
        order = np.argsort(found[0], kind="stable")  # by user, then by place
        user = user[order]
        number, target, repeats, item, score = (values[order] for values in found)
        place = request_place(number)
        request = self.examples.request_offsets[user] + place
        rankings, short = self.rankings(item, score)
        of_request = [
            pc.take(self.users, pa.array(user - self.first_user)),
            pa.array(place, pa.int32()),
            pa.array(self.examples.columns["request_time"][request]),
            pc.take(self.items, pa.array(target)),
            pa.array(repeats.astype(bool)),
        ]
        return [*of_request, *rankings], short


class Scorer(Kernel):
    """The chances of every label for all candidates of a split's requests; counts the candidates."""

    table = "scores"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if "query" in self.schema.names:
            self.queries = read_queries(self.inputs.tables)

    def load_examples(self) -> RequestDataset:
        return self.loaded.load_examples(self.inputs, self.ask["split"])

    def rank(self, batch: dict[str, Tensor]) -> Sequence[Tensor]:
        asked = self.examples.candidate_keys(batch)
        chances = torch.sigmoid(check_finite(self.model.score(batch).float()))
        labels = asked["labels"][:, : chances.shape[1]]  # some models learn the first
        names = ("user_row", "request", "time", "query", "item")
        return *(asked[name] for name in names), labels, chances

    def columns(self, user: NDArray, *found: NDArray) -> tuple[list[pa.Array], int]:
        order = np.lexsort((-found[-1][:, 0], found[0], user))
        user, (request, time, query, item, labels, chances) = (
            user[order],
            (values[order] for values in found),
        )
        first = np.flatnonzero(
            np.append(True, (user[1:] != user[:-1]) | (request[1:] != request[:-1]))
        )
        offsets = pa.array(np.append(first, len(user)), pa.int32())
        columns = [
            pc.take(self.users, pa.array(user[first] - self.first_user)),
            pa.array(time[first]),
        ]
        if "query" in self.schema.names:
            columns.append(
                pc.take(self.queries, pa.array(query[first], mask=query[first] < 0))
            )
        columns.append(
            pa.ListArray.from_arrays(offsets, pc.take(self.items, pa.array(item)))
        )
        columns += [
            pa.ListArray.from_arrays(offsets, pa.array(of, pa.float32()))
            for of in chances.T
        ]
        columns += [
            pa.ListArray.from_arrays(offsets, pa.array(of > 0)) for of in labels.T
        ]
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
    *,
    k: int = 20,
    split: str | None = None,
    batch_size: int = 256,
    actors: int = 1,
    device: str = "auto",
    options: dict[str, Any] | None = None,
    allowed: str | None = None,
    overwrite: bool = False,
    users_per_part: int = USERS_PER_PART,
    start: Callable[[], None] = lambda: None,
    remote: bool = False,
) -> tuple[Manifest, bool]:
    """Writes to `output` the table `recommendations` of the top `k` of all users, or of the requests of a `split`; of a
    model that ranks candidates `scores` of a `split`, by default of test; (its manifest, whether it was there already).
    It works in this process, or with `remote` or
    more than one of the `actors` by Ray Data; `start` starts Ray where that has something to do. `allowed` is a file of
    the only items that are ranked."""
    output = absolute(output)
    uri, about, chosen, given = check(uri, inputs, options or {})
    model_class = registry.find(about.name)
    if reason := model_class.reason_not_served():
        raise UserError(
            f"the model '{about.name}' is not served: {reason}; give --checkpoint of another model"
        )
    sequences = read_manifest(inputs.sequences, "sequences")
    kernel: type[Kernel]
    ask: dict[str, Any]
    if model_class.ranks == "candidates":
        kernel, ask = Scorer, {"split": split or "test"}
    elif split:
        kernel, ask = RequestRecommender, {"k": k, "split": split}
        schema, counts = RANKED_REQUESTS, "requests_below_k"
    else:
        kernel, ask = Recommender, {"k": k}
        schema, counts = RECOMMENDATIONS, "users_below_k"
    if kernel is Scorer:
        labels = model_class.describe_requests(sequences.info)["labels"]
        schema, counts = (
            scores_schema(labels, "queries" in model_class.catalogue_tables["tables"]),
            "candidates",
        )
    config = {**ask, "users_per_part": users_per_part, "model": about.model, **chosen}
    read = {
        **{name: given[name] for name, value in about.hashes.items() if value},
        "checkpoint": checkpoint.weights_hash(uri),
    }
    if allowed:
        if kernel is Scorer:
            raise UserError(
                f"--allowed is {allowed}, but the model '{about.name}' scores what is given; leave it out"
            )
        chosen["allowed"], read["allowed"] = read_allowed(allowed, inputs.tables)
    if check_place(output, kernel.table) and not overwrite:
        if up_to_date(output, fingerprint(config, read)):
            return read_manifest(output, kernel.table), True
        raise UserError(
            f"{output} holds other {kernel.table}; choose another folder or replace it with --overwrite"
        )
    units = [
        {"file": number, "first": first, "last": min(first + users_per_part, file.rows)}
        for number, file in enumerate(sequences.files)
        for first in range(0, file.rows, users_per_part)
    ]
    remote = remote or actors > 1
    if remote:
        start()
    threads = 1 if remote else 0  # an actor has one CPU
    arguments = (uri, inputs, output, schema, ask, batch_size, chosen, device, threads)
    with writing(output):
        if remote:
            made = by_ray(kernel, arguments, units, actors, device)
        else:
            here = kernel(*arguments)
            made = [here.part(**unit) for unit in units]
        info = {"users": sequences.rows, **ask, counts: sum(count for _, count in made)}
        info |= {"model": about.name, "checkpoint": uri}
        parts = [part for part, _ in made]
        manifest = commit(
            output, kernel.table, schema, parts, config=config, inputs=read, info=info
        )
    return manifest, False


def by_ray(
    kernel: type[Kernel],
    arguments: tuple[Any, ...],
    units: list[dict[str, int]],
    actors: int,
    device: str,
) -> list[tuple[Part, int]]:
    """The part and the count of each unit, made by actors of Ray Data."""
    gpu = takes_gpu(device, actors)
    quiet_ray_data()
    with silence_cpp_log():
        made = (
            ray.data.from_items(units, override_num_blocks=len(units))
            .map_batches(
                kernel,
                fn_constructor_args=arguments,
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(
                    min_size=1, max_size=actors, initial_size=actors
                ),
                num_cpus=1,
                num_gpus=1 if gpu else 0,
            )
            .take_all()
        )
    made = sorted(made, key=itemgetter("file", "first"))
    return [(Part(**json.loads(row["part"])), int(row["count"])) for row in made]
