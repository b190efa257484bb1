"""What is kept of users between requests: keys and values of the events so far, of AttnMVP and AttnLFA.

    state = model.new_state(users)
    model.append(state, batch)                  # what happened since: the context of a batch; changes the state
    logits = model.score_state(state, batch)    # its candidates, after all that is kept and strictly earlier

A model's pass over a history is the sum of its passes over the parts, as an event never reads a later one: so scores
are those of `model.score` with all kept events as the context, at the cost of the new events and candidates alone.

At most `max_history` events are kept. Where more come, the oldest go, and what remains is encoded again, as with
several layers the states of later events have read them, and a pass over the latest events alone would not. That costs
a pass, so half of `max_history` goes at a time. Scores are always those of `model.score` on the `count` latest events.

Shapes: as in models/actions/base.py; `M` max_history, `P` attentions of the model, `H` heads, `d` = D / H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.actions.base import SHOWN, ActionsModel, new_items
from models.actions.batch import Batch
from models.layers.causal_attention import CachedLayout, rotary

NEVER = torch.iinfo(torch.int64).max


@dataclass
class ActionsState:
    """What is kept of B users. Tensors have a place more than M, where padding goes."""

    count: Tensor
    """(B,) int64: events that are kept."""
    time: Tensor
    """(B, M + 1) int64: their times, ascending; NEVER behind them."""
    items: Tensor
    """(B, M + 1, D): what the item network made of each, for when the state slides."""
    actions: Tensor
    """(B, M + 1, D): the same of what was done."""
    keys: Tensor
    """(B, P, H, M + 1, d), turned to their places."""
    values: Tensor
    """(B, P, H, M + 1, d)."""


class StatefulModel(ActionsModel):
    """A model of one token to an event, whose `encode` reads events through attentions alone; it sets `caches`."""

    caches: int
    """P: attentions whose keys and values are kept."""

    def new_state(self, users: int) -> ActionsState:
        """The state of users before any event."""
        config, like = self.config, next(self.parameters())
        places, width = config.max_history + 1, config.width
        embedded = like.new_zeros(users, places, width)
        kept = like.new_zeros(
            users, self.caches, config.num_heads, places, width // config.num_heads
        )
        count = torch.zeros(users, dtype=torch.int64, device=like.device)
        time = torch.full((users, places), NEVER, device=like.device)
        return ActionsState(count, time, embedded, embedded.clone(), kept, kept.clone())

    @torch.no_grad()
    def append(self, state: ActionsState, batch: Batch) -> ActionsState:
        """The state, changed, after the context of `batch` (B, T), whose events are not before those that are kept.
        ValueError for events that are out of order, and for more at once than `max_history`."""
        most, new = self.config.max_history, batch["valid"].sum(1)
        latest = torch.where(state.time == NEVER, -NEVER, state.time).amax(1)
        if bool((batch["valid"] & (batch["time"] < latest[:, None])).any()):
            raise ValueError(
                "an event is before one that is kept; give events in order of time, each once"
            )
        if bool((new > most).any()):
            raise ValueError(
                f"{int(new.max())} events at once exceed max_history {most}; give the latest, or fewer"
            )
        over = state.count + new - most
        rows = (over > 0).nonzero()[:, 0]
        if len(rows):
            gone = torch.maximum(
                over[rows], torch.full_like(rows, -(-most // 2))
            ).clamp(max=state.count[rows])
            _slide(self, state, rows, gone)
        items = self.items(*(batch.get(name) for name in SHOWN), new=new_items(batch))
        _read(
            self,
            state,
            items,
            self.actions(batch["action"]),
            batch["time"],
            batch["valid"],
        )
        return state

    @torch.no_grad()
    def score_state(self, state: ActionsState, batch: Batch) -> Tensor:
        """(N, K) logits of the candidates of `batch`, as `model.score`; its context is not read and may be missing."""
        items = self.items(
            *(batch.get(f"candidate_{name}") for name in SHOWN), new=new_items(batch)
        )
        nothing = items[:, :0]
        states = self.encode(
            items,
            nothing,
            _layout(state, batch["candidate_time"], state.count[:, None][:, :0]),
        )
        logits = self.head(
            torch.cat([states, self.features(batch["candidate_feature"])], 2)
        )
        return logits[batch["candidate_valid"]] + self.correction


def _layout(state: ActionsState, time: Tensor, slot: Tensor) -> CachedLayout:
    """Of events or candidates at `time` (B, N), of which those of `slot` are kept."""
    earlier = torch.searchsorted(state.time, time)
    used = int(state.count.max()) + 1
    caches = zip(
        state.keys[..., :used, :].unbind(1),
        state.values[..., :used, :].unbind(1),
        strict=True,
    )
    rope = rotary(earlier, state.keys.shape[-1])
    return CachedLayout(slot.shape[1], earlier, True, rope, caches=caches, slot=slot)


def _read(
    model: ActionsModel,
    state: ActionsState,
    items: Tensor,
    actions: Tensor,
    time: Tensor,
    valid: Tensor,
) -> None:
    """Keeps the `valid` of these events (B, T)."""
    slot = state.count[:, None] + valid.cumsum(1) - 1
    state.count += valid.sum(1)
    slot = slot.masked_fill(~valid, int(state.count.max()))
    for kept, given in ((state.items, items), (state.actions, actions)):
        kept.scatter_(1, slot[..., None].expand_as(given), given)
    time = time.masked_fill(~valid, NEVER)
    state.time.scatter_(1, slot, time)
    model.encode(items, actions, _layout(state, time.masked_fill(~valid, 0), slot))


def _slide(
    model: StatefulModel, state: ActionsState, rows: Tensor, gone: Tensor
) -> None:
    """Drops the oldest `gone` events of each of these rows, and encodes what remains anew."""
    most = state.time.shape[1] - 1
    place = torch.arange(most, device=rows.device) + gone[:, None]
    valid = place < state.count[rows, None]
    place = place.clamp(max=most)
    items, actions = (
        table[rows].gather(1, place[..., None].expand(-1, -1, table.shape[2]))
        for table in (state.items, state.actions)
    )
    fresh = model.new_state(len(rows))
    _read(model, fresh, items, actions, state.time[rows].gather(1, place), valid)
    for name, value in vars(fresh).items():
        getattr(state, name)[rows] = value
