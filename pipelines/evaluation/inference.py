"""Top K items for all users, written as a table by Ray Data actors that each hold the model.

A user's history is all that they did. The table `recommendations` has one row per user: `user_id`, the
ranked `item_id`s and their scores. A unit of work is a run of the users of one file of `sequences`; beside the model
and the catalogue an actor holds that file alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
import torch

from models import checkpoint, registry
from models.fit import to_device
from models.inputs import Inputs
from models.retrieval.data import Examples
from models.retrieval.recommend import allow, history_to_give
from models.setup import Loaded, hashes_of, of_training
from models.shares import Shard, Share
from models.tables import (
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
from models.uri import absolute
from pipelines.data.engine import quiet_ray_data
from pipelines.evaluation.allowed import read_allowed
from pipelines.evaluation.ranking import device_of, recommend_options, takes_gpu
from pipelines.training.record import find_checkpoint
from pipelines.training.worker import threads_per_worker

RECOMMENDATIONS = pa.schema(
    [
        pa.field("user_id", pa.string(), nullable=False),
        pa.field("item_id", pa.list_(pa.field("item", pa.string())), nullable=False),  # best first, at most K
        pa.field("score", pa.list_(pa.field("item", pa.float32())), nullable=False),  # the model's own scale
    ]
)

USERS_PER_PART = 50_000
"""Users per file of the table at most."""


class Recommender:
    """An actor with the model, that ranks for users of one file and writes a part."""

    def __init__(
        self, uri: str, inputs: Inputs, output: str, k: int, batch_size: int,
        options: dict[str, Any], device: str, threads: int,
    ) -> None:  # fmt: skip
        torch.set_num_threads(threads)
        self.device, self.output, self.k = device_of(device), output, k
        self.batch_size, self.options = batch_size, options
        loaded = Loaded.of(uri, inputs, self.device)
        self.model = loaded.model
        if "allowed" in options:
            self.options = {**options, "allowed": allow(self.model, options["allowed"].to(self.device))}
        self.family: type[Examples] = loaded.entry.family.examples  # type: ignore[assignment]
        self.max_history = history_to_give(loaded.config.max_history, options)
        self.sequences = inputs.sequences
        self.items = read_table(join(inputs.tables, "items"), "items", ["item_id"])["item_id"].combine_chunks()
        self.file = -1  # the one that is held

    def __call__(self, block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        runs = zip(*(block[name].tolist() for name in ("file", "first", "last")), strict=True)
        made = [self.part(*run) for run in runs]
        parts = np.array([json.dumps(vars(part)) for part, _ in made], dtype=object)
        return {**block, "part": parts, "short": np.array([short for _, short in made])}

    def hold(self, file: int) -> None:
        """Reads a file of `sequences` in place of the one before."""
        if file == self.file:
            return
        manifest = read_manifest(self.sequences, "sequences")
        share = Share(1, (Shard(0, range(file, file + 1), 0, 1),), 0, 1)
        self.examples = self.family.load_share(self.sequences, {"next": "request"}, self.max_history, share)["next"]
        uri, sha256 = part_uris(self.sequences, manifest)[file], manifest.files[file].sha256
        self.users = read_parquet(uri, ["user_id"], sha256)["user_id"].combine_chunks()
        self.first_user = sum(part.rows for part in manifest.files[:file])
        self.file = file

    def part(self, file: int, first: int, last: int) -> tuple[Part, int]:
        """Ranks for users `first` to `last` - 1 of a file, in batches of like length, and writes them in its order; and
        how many of them have fewer than K items."""
        self.hold(file)
        rows = np.arange(len(self.examples))
        place = self.examples.user_rows(rows) - self.first_user
        rows = rows[(first <= place) & (place < last)]
        rows = rows[np.argsort(self.examples.lengths[rows], kind="stable")]
        users, items, scores = [], [], []
        for start in range(0, len(rows), self.batch_size):
            batch = to_device(self.examples.collate(rows[start : start + self.batch_size]), self.device)
            with torch.no_grad():
                ranked, score = self.model.recommend(batch, self.k, **self.options)
            users.append(batch["user_row"].cpu().numpy() - self.first_user)
            items.append(ranked.cpu().numpy())
            scores.append(score.float().cpu().numpy())
        if not users:  # none of them has a history
            return write_part(self.output, RECOMMENDATIONS.empty_table()), 0
        user, item, score = np.concatenate(users), np.concatenate(items), np.concatenate(scores)
        order = np.argsort(user, kind="stable")
        user, item, score = user[order], item[order], score[order]
        real = item >= 0  # where fewer than K items could be ranked, the tail is empty
        offsets = pa.array(np.concatenate([[0], np.cumsum(real.sum(1))]), pa.int32())
        names = pc.take(self.items, pa.array(item[real]))
        table = pa.table(
            [
                pc.take(self.users, pa.array(user)),
                pa.ListArray.from_arrays(offsets, names),
                pa.ListArray.from_arrays(offsets, pa.array(score[real], pa.float32())),
            ],
            schema=RECOMMENDATIONS,
        )
        return write_part(self.output, table), int((real.sum(1) < self.k).sum())


@contextmanager
def python_alone_on_stderr() -> Iterator[None]:
    """Keeps what Ray's C++ writes off the terminal, such as an error for each actor of Ray Data that its restart might
    fail; it stands in Ray's logs too, and failures are raised in Python."""
    sys.stderr.flush()
    before, terminal = sys.stderr, os.dup(2)
    with open(os.devnull, "w") as nothing, os.fdopen(os.dup(2), "w") as ours:
        os.dup2(nothing.fileno(), 2)
        sys.stderr = ours
        try:
            yield
        finally:
            sys.stderr = before
            os.dup2(terminal, 2)
            os.close(terminal)


def recommend_all(
    uri: str,
    inputs: Inputs,
    output: str,
    *,
    k: int = 20,
    batch_size: int = 256,
    actors: int = 1,
    device: str = "auto",
    options: dict[str, Any] | None = None,
    allowed: str | None = None,
    overwrite: bool = False,
    users_per_part: int = USERS_PER_PART,
    start: Callable[[], None] = lambda: None,
) -> tuple[Manifest, bool]:
    """Writes the table `recommendations` to `output`; (its manifest, whether it was there already). `start` starts Ray
    where there is something to do; `allowed` is a file of the only items that are ranked."""
    uri, output = find_checkpoint(uri), absolute(output)
    about = checkpoint.read(uri)
    entry = registry.find(about.name)
    if entry.recommends is None:
        raise UserError(f"the model '{about.name}' ranks no catalogue; give --checkpoint of a model that recommends")
    chosen = recommend_options(about.name, options or {})
    given = hashes_of(about.name, inputs)
    checkpoint.check(about, uri, dict(of_training(given, about)))
    sequences = read_manifest(inputs.sequences, "sequences")
    config = {"k": k, "users_per_part": users_per_part, "model": about.model, **chosen}
    read = {
        **{name: given[name] for name, value in about.hashes.items() if value},
        "checkpoint": checkpoint.weights_hash(uri),
    }
    if allowed:
        chosen["allowed"], read["allowed"] = read_allowed(allowed, inputs.tables)
    if check_place(output, "recommendations") and not overwrite:
        if up_to_date(output, fingerprint(config, read)):
            return read_manifest(output, "recommendations"), True
        raise UserError(f"{output} holds other recommendations; choose another folder or replace it with --overwrite")
    start()
    gpu = takes_gpu(device, actors)
    arguments = (
        uri, inputs, output, k, batch_size, chosen, device, threads_per_worker(0, actors),
    )  # fmt: skip
    quiet_ray_data()
    runs = [
        {"file": number, "first": first, "last": min(first + users_per_part, file.rows)}
        for number, file in enumerate(sequences.files)
        for first in range(0, file.rows, users_per_part)
    ]
    with writing(output), python_alone_on_stderr():
        parts = (
            ray.data.from_items(runs, override_num_blocks=len(runs))
            .map_batches(
                Recommender,
                fn_constructor_args=arguments,
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors, initial_size=actors),
                num_cpus=min(1.0, max(0.5, ray.cluster_resources().get("CPU", 1) - 1) / actors),  # one is left to read
                num_gpus=1 if gpu else 0,
            )
            .take_all()
        )
        made = [Part(**json.loads(row["part"])) for row in sorted(parts, key=itemgetter("file", "first"))]
        short = sum(int(row["short"]) for row in parts)
        info = {"users": sequences.rows, "k": k, "users_below_k": short, "model": about.name, "checkpoint": uri}
        manifest = commit(output, "recommendations", RECOMMENDATIONS, made, config=config, inputs=read, info=info)
    return manifest, False
