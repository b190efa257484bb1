"""Top K items for all users, written as a table by Ray Data actors that each hold the model.

A user's history is all that they did. The table `recommendations` has one row per user: `user_id`, the
ranked `item_id`s and their scores.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
import torch

from models import checkpoint, registry
from models.fit import to_device
from models.setup import hashes_of, load_catalogue
from models.tables import Manifest, Part, UserError, join, read_manifest, read_table
from pipelines.data.dataflow import quiet_ray_data
from pipelines.data.tables import check_place, check_writable, commit, fingerprint, up_to_date, write_part, writing
from pipelines.evaluation.ranking import device_of, find_checkpoint, recommend_options, takes_gpu
from pipelines.training.run import absolute
from pipelines.training.worker import threads_per_worker

RECOMMENDATIONS = pa.schema(
    [
        pa.field("user_id", pa.string(), nullable=False),
        pa.field("item_id", pa.list_(pa.field("item", pa.string())), nullable=False),  # best first, at most K
        pa.field("score", pa.list_(pa.field("item", pa.float32())), nullable=False),  # the model's own scale
    ]
)

USERS_PER_PART = 50_000
"""Users per file of the table: a file is one unit of work."""


class Recommender:
    """An actor with the model, that ranks for one part of the users and writes it."""

    def __init__(
        self, uri: str, tables: str, extra: str | None, output: str, k: int, batch_size: int,
        options: dict[str, Any], device: str, threads: int, users_per_part: int,
    ) -> None:  # fmt: skip
        torch.set_num_threads(threads)
        self.device, self.output, self.k = device_of(device), output, k
        self.batch_size, self.options, self.users_per_part = batch_size, options, users_per_part
        about = checkpoint.read(uri)
        entry = registry.find(about.name)
        model, _ = registry.load(uri, load_catalogue(entry, about.name, tables, extra))
        self.model: Any = model.to(self.device)
        history = registry.config_from_dict(about.model).max_history
        sequences = join(tables, "sequences")
        self.examples: Any = entry.family.examples.load(sequences, "next", unit="request", max_history=history)
        self.users = read_table(sequences, "sequences", ["user_id"])["user_id"].combine_chunks()
        self.items = read_table(join(tables, "items"), "items", ["item_id"])["item_id"].combine_chunks()

    def __call__(self, block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        parts = [self.part(int(number)) for number in block["id"]]
        return {"part": np.array([json.dumps(vars(part)) for part in parts], dtype=object), "id": block["id"]}

    def part(self, number: int) -> Part:
        """Ranks for the users of part `number`, in batches of like length, and writes them in table order."""
        begin = number * self.users_per_part
        rows = np.arange(begin, min(begin + self.users_per_part, len(self.examples)))
        rows = rows[np.argsort(self.examples.lengths[rows], kind="stable")]
        users, items, scores = [], [], []
        for start in range(0, len(rows), self.batch_size):
            batch = to_device(self.examples.collate(rows[start : start + self.batch_size]), self.device)
            with torch.no_grad():
                ranked, score = self.model.recommend(batch, self.k, **self.options)
            users.append(batch["user_row"].cpu().numpy())
            items.append(ranked.cpu().numpy())
            scores.append(score.float().cpu().numpy())
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
        return write_part(self.output, table)


def recommend_all(
    uri: str,
    tables: str,
    extra: str | None,
    output: str,
    *,
    k: int = 20,
    batch_size: int = 256,
    actors: int = 1,
    device: str = "auto",
    options: dict[str, Any] | None = None,
    overwrite: bool = False,
    users_per_part: int = USERS_PER_PART,
) -> tuple[Manifest, bool]:
    """Writes the table `recommendations` to `output`; (its manifest, whether it was there already)."""
    uri, tables, extra, output = (
        find_checkpoint(uri),
        absolute(tables),
        absolute(extra) if extra else None,
        absolute(output),
    )
    about = checkpoint.read(uri)
    entry = registry.find(about.name)
    if entry.recommends is None:
        raise UserError(f"the model '{about.name}' ranks no catalogue; give --checkpoint of a model that recommends")
    chosen = recommend_options(about.name, options or {})
    checkpoint.check(about, uri, dict(hashes_of(entry, about.name, tables, extra)))
    users = read_manifest(join(tables, "sequences"), "sequences").rows
    config = {"k": k, "users_per_part": users_per_part, "model": about.model, **chosen}
    inputs = {
        **{name: value for name, value in about.hashes.items() if value},
        "checkpoint": checkpoint.weights_hash(uri),
    }
    if check_place(output, "recommendations") and not overwrite:
        if up_to_date(output, fingerprint(config, inputs)):
            return read_manifest(output, "recommendations"), True
        raise UserError(f"{output} holds other recommendations; choose another folder or replace it with --overwrite")
    check_writable(output)
    gpu = takes_gpu(device, actors)
    arguments = (
        uri, tables, extra, output, k, batch_size, chosen, device, threads_per_worker(0, actors), users_per_part,
    )  # fmt: skip
    quiet_ray_data()
    with writing(output):
        parts = (
            ray.data.range(-(-users // users_per_part), override_num_blocks=-(-users // users_per_part))
            .map_batches(
                Recommender,
                fn_constructor_args=arguments,
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=actors),
                num_cpus=min(1.0, max(0.5, ray.cluster_resources().get("CPU", 1) - 1) / actors),  # one is left to read
                num_gpus=1 if gpu else 0,
            )
            .take_all()
        )
        made = [Part(**json.loads(row["part"])) for row in sorted(parts, key=lambda row: row["id"])]
        info = {"users": users, "k": k, "model": about.name, "checkpoint": uri}
        manifest = commit(output, "recommendations", RECOMMENDATIONS, made, config=config, inputs=inputs, info=info)
    return manifest, False
