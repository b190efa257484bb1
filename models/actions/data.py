"""Users' sequences as batches for models of actions: what was done before, and what is to be predicted.

    examples = ActionsExamples.load("tables/sequences", "train", unit="user", max_history=1024)
    for rows in examples.batches(64, seed=1, epoch=0, shuffle=True):
        batch = examples.collate(rows)      # as models/actions/batch.py says

Training takes batches of like length and of equally many events, so that little is padding and every step
weighs its events alike. A user with more than `max_history` training events gives several rows, cut from the end, which
overlap by `window_overlap` of it: what two rows share is learned from in the earlier one, and history in the later one.

Shapes: `B` rows, `T` context events, `C` candidates, `A` kinds of action, `K` tasks, `F` features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from models.actions.batch import any_tied
from models.examples import Sharded
from models.gpu.graphs import rung
from models.own_features import OwnFeatures
from models.shares import (
    Shard,
    Share,
    compact,
    equal_parts,
    joined,
    runs,
    spans,
    starts,
)
from models.tables import Manifest, sequences_manifest

JITTER = 1.1
"""Rows of a training batch are neighbours by length times a random factor of 1 to this: other ones each epoch."""

GOLDEN = (5**0.5 - 1) / 2
"""Its multiples lie evenly within 0 to 1, and so do the cuts of a batch's rows."""

MOST_PAIRS = 1 << 24
"""Largest B x C x (T + 1) of an evaluation batch of several rows: its candidates by what they may attend to, which
bounds the scores."""


class ActionsExamples(Sharded):
    """The events of one split, in rows of one user.

    Training, `user`: a row is a sequence of training events, all context, each learned from in one row.
    Training, `cut`, for models that learn from candidates only: the sequence is cut in two, context and candidates.
    The share of the context is another one for each row, drawn anew in each epoch, uniformly, and evenly over the rows
    of a batch, which so learns from about half of its events; at least one event is a candidate, and none of those
    that another row learns from.
    Validation and test: the context is the latest `max_history` events before the split's time, the
    candidates are all of the user's events in it, also of users without a context.

    Only events of the split and before it are held, of users who have a row, from its first event on.
    """

    events: dict[str, NDArray[Any]]
    """Of this rank's users, flat: item, time, action, label, feature, viewer and own where the log has some; and an
    event of zeros at the end."""
    begin: NDArray[np.int64]
    """Of each row, its first event."""
    context: NDArray[np.int64]
    """Of each row, events of the context."""
    candidates: NDArray[np.int64]
    """Of each row, its candidates after the context; 0 in training."""
    shared: NDArray[np.int64]
    """Of each row, first events of the context that another row learns from."""
    lengths: NDArray[np.int64]
    """Of each row, context and candidates together."""
    user: NDArray[np.int64]
    """Of each row, the row of its user in the table."""
    kind = "actions"
    unit = "user"
    counted = "sequences of events"
    learned_unit = "events"
    max_history = 1024
    window_overlap: ClassVar[float] = 0.5
    """Share of `max_history` by which rows of a user overlap in training, as a model's config says."""

    def __init__(self, split: str, unit: str, max_history: int, share: Share) -> None:
        super().__init__(split, unit, max_history, share)
        self._events: list[dict[str, NDArray]] = []
        self._rows: list[dict[str, NDArray]] = []
        self._held = 0

    @classmethod
    def of_model(cls, config: Any) -> type[Self]:
        return type(cls.__name__, (cls,), {"window_overlap": config.window_overlap})

    @classmethod
    def _open(cls, uri: str) -> tuple[Manifest, list[str]]:
        manifest = sequences_manifest(uri, "actions")
        carried = [f"cat_{name}" for name in manifest.info.get("viewers", {})]
        carried += OwnFeatures.of(manifest.info).names
        vectors = ("actions", "tasks", "features")
        return manifest, [
            "item_index",
            "timestamp_ms",
            *carried,
            *vectors,
            "train_end",
            "val_end",
        ]

    @classmethod
    def _read(cls, table: pa.Table, manifest: Manifest, uri: str) -> dict[str, Any]:
        widths = {
            name: len(manifest.info[name]) for name in ("actions", "tasks", "features")
        }
        lengths = (
            pc.list_value_length(table["item_index"].combine_chunks())
            .to_numpy()
            .astype(np.int64)
        )
        ends = {
            name: table[f"{name}_end"].to_numpy().astype(np.int64)
            for name in ("train", "val")
        }
        events = read_part(
            table,
            widths,
            manifest.info.get("viewers", {}),
            OwnFeatures.of(manifest.info),
        )
        return {"events": events, "lengths": lengths, "ends": ends | {"test": lengths}}

    def _add(self, part: dict[str, Any], first_user: int, shard: Shard) -> int:
        lengths, ends = part["lengths"], part["ends"]
        begin, context, candidates, shared, owner = self._windows(ends)
        if (
            self.split == "train" and self.since
        ):  # of a row learn the new events, unless all are to be
            time, at = part["events"]["time"], starts(lengths)[owner] + begin
            old = np.append(0, np.cumsum(time < self.since))
            known = np.maximum(shared, old[at + context] - old[at])
            again = self.left(np.full(len(owner), self.since - 1), first_user)
            shared = np.where(again, shared, known)
            some = np.flatnonzero(shared < context)
            begin, context, candidates, shared, owner = (
                x[some] for x in (begin, context, candidates, shared, owner)
            )
        users, local, low, count = spans(owner, begin, begin + context + candidates)
        kept = runs(starts(lengths)[users] + low, count)
        self._events.append(
            {name: value[kept] for name, value in part["events"].items()}
        )
        self._rows.append(
            {
                "begin": self._held + (starts(count) - low)[local] + begin,
                "context": context.astype(np.int32),
                "candidates": candidates.astype(np.int32),
                "shared": shared.astype(np.int32),
                "user": first_user + owner,
            }
        )
        self._held += len(kept)
        self.requests += len(owner)
        self.learned += int((context - shared).sum())
        return len(owner)

    def _close(self) -> None:
        self._take(joined(self._events), **joined(self._rows))
        del self._events, self._rows

    @classmethod
    def of(
        cls, events: dict[str, NDArray], context: NDArray, candidates: NDArray
    ) -> Self:
        """Requests in memory: of each the `context` (B,) events before it and then its `candidates` (B,), end to end
        in `events` as `read_part` gives them."""
        sizes = context + candidates
        self = cls.in_memory(
            "test", "user", max(1, int(context.max(initial=1))), len(sizes)
        )
        self._take(
            dict(events),
            starts(sizes),
            context,
            candidates,
            context,
            np.arange(len(sizes)),
        )
        return self

    def _take(
        self,
        events: dict[str, NDArray],
        begin: NDArray,
        context: NDArray,
        candidates: NDArray,
        shared: NDArray,
        user: NDArray,
    ) -> None:
        """Takes `events` over; one column at a time is there twice."""
        self.events = events
        for name in list(
            events
        ):  # padding is gathered from an event of zeros behind the last one
            values = events.pop(name)
            events[name] = np.concatenate(
                [values, np.zeros((1, *values.shape[1:]), values.dtype)]
            )
        self.begin, self.context, self.candidates, self.shared, self.user = (
            begin,
            context,
            candidates,
            shared,
            user,
        )
        self.lengths = self.context + self.candidates

    def _windows(self, ends: dict[str, NDArray]) -> tuple[NDArray, ...]:
        """(first event within the user, events of the context, candidates, events of the context that are not learned
        from, user within the part) of the part's rows.

        `ends` has, by split, how many events of each user are in it or before it."""
        known = ends[self.split]
        if self.split == "train":
            stride = max(
                1, self.max_history - int(self.window_overlap * self.max_history)
            )
            windows = np.where(
                known > 0, 1 - (-np.maximum(known - self.max_history, 0) // stride), 0
            )
            owner = np.repeat(np.arange(len(known)), windows)
            place = np.arange(len(owner)) - np.repeat(starts(windows), windows)
            end = known[owner] - (windows[owner] - 1 - place) * stride
            begin = np.maximum(end - self.max_history, 0)
            return (
                begin,
                end - begin,
                np.zeros_like(end),
                np.where(place > 0, end - begin - stride, 0),
                owner,
            )
        past = ends["train" if self.split == "val" else "val"]
        owner = np.flatnonzero(known > past)
        begin = np.maximum(past[owner] - self.max_history, 0)
        return (
            begin,
            past[owner] - begin,
            (known - past)[owner],
            past[owner] - begin,
            owner,
        )

    def user_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.user[rows]

    def _arrange(
        self,
        rows: NDArray[np.int64],
        shard: int,
        batch_size: int,
        steps: int,
        rng: np.random.Generator,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """By length times a random factor, in steps of equally many events and `batch_size` rows in the mean."""
        order = rows[rng.permutation(len(rows))]
        order = order[
            np.argsort(
                self.lengths[order] * rng.uniform(1, JITTER, len(order)), kind="stable"
            )
        ]
        return order, equal_parts(self.lengths[order], steps)

    def drawn(
        self,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        rng: np.random.Generator,
    ) -> NDArray[np.int64]:
        """Of unit `cut` (B, 2): row, size of the context."""
        if self.unit != "cut":
            return rows
        share = (rng.random() + places * GOLDEN) % 1
        shared = self.shared[rows]
        return np.stack(
            [rows, shared + (share * (self.lengths[rows] - shared)).astype(np.int64)], 1
        )

    def ordered(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Contexts within a factor of two together, and of those like numbers of candidates."""
        octave = np.log2(self.context[rows] + 1).astype(np.int64)
        return rows[np.lexsort((self.context[rows], self.candidates[rows], octave))]

    def bounded(
        self, order: NDArray[np.int64], batch_size: int
    ) -> Iterator[NDArray[np.int64]]:
        """The rows of `order` in batches of at most `batch_size` rows and, unless of one row, MOST_PAIRS."""
        first, longest, most = 0, 1, 0
        for i, row in enumerate(order):
            context, candidates = (
                max(1, int(self.context[row])),
                int(self.candidates[row]),
            )
            longest, most = max(longest, context), max(most, candidates)
            if i > first and (
                i - first == batch_size
                or (i - first + 1) * most * (longest + 1) > MOST_PAIRS
            ):
                yield order[first:i]
                first, longest, most = i, context, candidates
        if len(order):
            yield order[first:]

    def collate(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """The rows as the tensors of `models/actions/batch.py`; and `user_row` (B,), the row in the table."""
        row, context = (
            (rows[:, 0], rows[:, 1]) if rows.ndim == 2 else (rows, self.context[rows])
        )
        candidates = self.lengths[row] - context
        batch = {"user_row": torch.from_numpy(self.user[row])}
        past, batch["valid"] = padded(self.begin[row], context, 1)
        asked, batch["candidate_valid"] = padded(
            self.begin[row] + context, candidates, 0
        )
        for name, values in self.events.items():
            for prefix, index in (("", past), ("candidate_", asked)):
                if prefix + name != "candidate_action":
                    found = torch.from_numpy(values[index])
                    batch[prefix + name] = found.to(KINDS.get(name, torch.float32))
        batch["learn"] = batch["valid"] & torch.from_numpy(
            np.arange(past.shape[1]) >= self.shared[row, None]
        )
        if not any_tied(batch):
            batch["untied"] = torch.zeros(0)
        return batch

    def asked(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A request is what a user was shown at one time."""
        valid = batch["candidate_valid"]
        time = batch["candidate_time"][valid]
        return {
            "user_row": batch["user_row"][:, None].expand_as(valid)[valid],
            "request": time,
            "time": time,
            "query": torch.full_like(time, -1),
            "item": batch["candidate_item"][valid],
            "labels": batch["candidate_label"][valid],
        }

    def filled(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """With more rows, and positions of context and candidates, that hold no event."""
        rows, context = batch["item"].shape
        candidates = batch["candidate_item"].shape[1]
        more = rung(rows) - rows
        wide = {
            True: rung(candidates) - candidates if candidates else 0,
            False: min(rung(context), max(context, self.max_history)) - context,
        }

        def padded(name: str, value: Tensor) -> Tensor:
            beside = () if value.ndim == 1 else (0, wide[name.startswith("candidate_")])
            return functional.pad(value, (*(0, 0) * (value.ndim - 2), *beside, 0, more))

        return {
            name: value if name == "untied" else padded(name, value)
            for name, value in batch.items()
        }


KINDS = {"item": torch.int64, "time": torch.int64, "viewer": torch.int64}
"""Types of a batch's tensors that are not float32."""


def padded(
    begin: NDArray, count: NDArray, least: int
) -> tuple[NDArray[np.int64], Tensor]:
    """(index, valid), each (B, width of the largest `count`, at least `least`): begin, begin + 1, ... and -1 behind."""
    place = np.arange(max(least, int(count.max(initial=0))))
    inside = place < count[:, None]
    return np.where(inside, begin[:, None] + place, -1), torch.from_numpy(inside)


def read_part(
    table: pa.Table,
    widths: dict[str, int],
    viewers: dict[str, list[str]],
    own: OwnFeatures | None = None,
) -> dict[str, NDArray]:
    """Flat arrays over the events of one part. `viewer` (E, V): the number of each value in `viewers`, from 1, or 0."""
    own = own or OwnFeatures()

    def flat(name: str) -> pa.Array:
        return table[name].combine_chunks().flatten()

    def vectors(name: str) -> NDArray:
        values = flat(name).flatten().to_numpy(zero_copy_only=False)
        return values.reshape(-1, max(1, widths[name]))[:, : widths[name]]

    item = flat("item_index").to_numpy().astype(np.int32)
    feature = (
        vectors("features")
        if widths["features"]
        else np.zeros((len(item), 0), np.float32)
    )
    known = {
        name: pc.index_in(flat(f"cat_{name}"), pa.array(values, pa.string()))
        for name, values in viewers.items()
    }
    codes = [
        pc.fill_null(place, -1).to_numpy(zero_copy_only=False) + 1
        for place in known.values()
    ]
    return {
        **({"viewer": np.stack(codes, 1).astype(np.int32)} if codes else {}),
        **(
            {"own": own.matrix({name: flat(name) for name in own.names}, len(item))}
            if own.names
            else {}
        ),
        "item": item,
        "time": flat("timestamp_ms").to_numpy(),
        "action": compact(vectors("actions")),
        "label": compact(vectors("tasks")),
        "feature": compact(feature),
    }
