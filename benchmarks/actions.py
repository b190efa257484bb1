"""Paired timings of the models of actions, with PyTorch alone.

    python -m benchmarks actions

`train` is one training step on full sequences of `length` events: forward, backward,
clipped AdamW. GenRank's sequences are split in the middle, as it learns from candidates
only. `forward` scores `candidates` events after a context of `length`. Every row has
`attention_flops`, the arithmetic of all attention in a forward pass: two operations per
product, counted for the attended positions only.

Items, weights and actions are random, which does not change the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.harness import (
    Call,
    Row,
    device,
    device_name,
    in_fresh_process,
    peak_memory,
    time_in_turns,
)
from models import build
from models.actions.base import FusionModel
from models.actions.batch import ActionsBatch
from models.actions.catalogue import ActionsCatalogue
from models.layers.causal_product import causal_product, prefix_product
from models.training.fit import autocast

MODES = ("train", "forward")
LENGTHS = (128, 512, 1024)
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("interleaved", "attn_lfa", "attn_mvp")},
    "attn_mvp_no_lfa": {"name": "attn_mvp", "late_fusion": False},
    **{name: {"name": name} for name in ("attn_dhn", "lac", "genrank")},
}
"""The models of actions, and AttnMVP without late fusion."""

ITEMS, TASKS, ACTIONS, FEATURES = 10_000, 12, 12, 24
"""Sizes of the catalogue; twelve tasks as in Sec. 3 of AttnMVP."""


class AttentionCount(TorchFunctionMode):
    """Context that counts the operations of attention.

    A pair of a query and a key takes 4 operations per number of a head: a
    multiplication and an addition for the score, and both again for the weighted value.
    """

    operations = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (
            causal_product,
            prefix_product,
            nn.functional.scaled_dot_product_attention,
        ):
            q, k = args[:2]
            rows, heads, queries, width = q.shape
            if function is prefix_product:
                bound, group, self_kv = (*args[3:], None)[:3]
                # a group attends to itself causally
                per_query = (group + 1) / 2 if group else float(self_kv is not None)
                pairs = int(bound.sum() + rows * queries * per_query)
            elif function is causal_product:
                pairs = rows * queries * (queries + 1) // 2
            elif kwargs.get("attn_mask") is not None:
                mask = kwargs["attn_mask"].expand(rows, 1, queries, k.shape[2])
                pairs = int(mask.sum())
            else:
                pairs = rows * queries * k.shape[2]
            self.operations += 4 * heads * pairs * width
        return function(*args, **kwargs)


def random_catalogue() -> ActionsCatalogue:
    """Return a catalogue of random items with two categories."""
    names = {"actions": ACTIONS, "labels": TASKS, "features": FEATURES}
    return ActionsCatalogue(
        num_items=ITEMS,
        **{
            kind: tuple(f"{kind}_{i}" for i in range(count))
            for kind, count in names.items()
        },  # type: ignore[arg-type]
        feature_mean=torch.zeros(FEATURES),
        feature_std=torch.ones(FEATURES),
        categories=torch.stack(
            [torch.arange(ITEMS) % 1000, torch.arange(ITEMS) % 20], 1
        ),
    )


def random_batch(rows: int, context: int, candidates: int) -> ActionsBatch:
    """Return a batch of random sequences without padding.

    Args:
        rows: Number of sequences.
        context: Events per sequence before the candidates.
        candidates: Candidates per sequence.
    """
    length = context + candidates
    fields: dict[str, Any] = {
        "item": torch.randint(ITEMS, (rows, length)),
        # all candidates share one time, directly after the context
        "time": torch.arange(length).clamp(max=context).repeat(rows, 1),
        "label": torch.randint(2, (rows, length, TASKS)).float(),
        "feature": torch.randn(rows, length, FEATURES),
        "valid": torch.ones(rows, length, dtype=torch.bool),
    }
    context_fields = {name: value[:, :context] for name, value in fields.items()}
    candidate_fields = {
        f"candidate_{name}": value[:, context:] for name, value in fields.items()
    }
    return ActionsBatch(
        user_row=torch.arange(rows),
        action=torch.randint(2, (rows, context, ACTIONS)).float(),
        learn=context_fields["valid"],
        **context_fields,
        **candidate_fields,
    )


def build_model(variant: str, params: Row) -> FusionModel:
    """Build the model of a variant, with random weights, for a random catalogue."""
    sizes = {
        "width": params["width"],
        "num_layers": params["layers"],
        "num_heads": params["heads"],
    }
    options = {**VARIANTS[variant], "ffn": 4 * params["width"], "dropout": 0.0}
    return cast(
        FusionModel, build.build_model({**options, **sizes}, random_catalogue())
    )


def make(variant: str, params: Row) -> Call:
    """Return a warmed-up call: one training step, or scoring the candidates of a batch.

    Args:
        variant: Name in `VARIANTS`.
        params: Settings of the benchmark, among them `mode` and sizes.
    """
    torch.set_num_threads(params["threads"])
    torch.manual_seed(params["seed"])
    model = build_model(variant, params).to(device())
    rows, length = params["batch"], params["length"]
    if params["mode"] == "train":
        candidates = 0 if model.history_targets else length // 2
        batch = random_batch(rows, length - candidates, candidates).to(device())
    else:
        batch = random_batch(rows, length, params["candidates"]).to(device())
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def forward(run: int) -> None:
        with torch.no_grad(), autocast("auto", device()):
            model.score(batch)

    def train(run: int) -> None:
        with autocast("auto", device()):
            loss = model(batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    call = train if params["mode"] == "train" else forward
    model.train(params["mode"] == "train")
    call(0)
    return call


def count_attention(call: Call) -> int:
    """Return the number of operations of all attention in one call."""
    with AttentionCount() as count:
        call(0)
    return count.operations


def actions(
    runs: int = 5,
    threads: int = 2,
    events: int = 4096,
    candidates: int = 32,
    width: int = 128,
    layers: int = 12,
    heads: int = 4,
    seed: int = 0,
    modes: Iterable[str] = MODES,
    lengths: Iterable[int] = LENGTHS,
    variants: Iterable[str] = VARIANTS,
) -> Iterator[Row]:
    """Yield a row per variant, mode and length; items per second are users.

    Args:
        runs: Timings per variant.
        threads: CPU threads.
        events: Events per batch, so that a batch has `events / length` users.
        candidates: Candidates per user in mode `forward`.
        width: Width of the models.
        layers: Number of layers.
        heads: Number of attention heads.
        seed: Seed of weights and batches.
        modes: Subset of `MODES`.
        lengths: Lengths of the users' sequences.
        variants: Subset of `VARIANTS`.
    """
    variants = list(variants)
    for mode, length in itertools.product(modes, lengths):
        params: Row = {
            "mode": mode,
            "length": length,
            "batch": max(1, events // length),
            "width": width,
            "layers": layers,
            "heads": heads,
            "candidates": candidates,
            "threads": threads,
            "seed": seed,
            "runs": runs,
            "device": device_name(),
        }
        small = params | {"length": 2, "candidates": 1}
        memory = {
            variant: in_fresh_process(
                peak_memory, make, (variant, small), variant, [params]
            )[0]
            for variant in variants
        }
        calls = {variant: make(variant, params) for variant in variants}
        operations = {variant: count_attention(call) for variant, call in calls.items()}
        for row in time_in_turns("actions", calls, params, params["batch"], memory):
            yield row | {"attention_flops": operations[row["variant"]]}
