"""A look inside of a checkpoint with semantic IDs: attention by position, and what decoding without the trie loses.

    python -m jobs.evaluate --checkpoint runs/tiger --tables TABLES --sids SIDS --diagnose runs/tiger/inside

Of TIGER, whose encoder a student keeps, the attention that the first and the last three positions receive in each
layer, against the same for all positions (Appendix D.3 of SID-MLP: there is no sink at either end for EARN's
registers to stand on). Of all, which valid codes a search loses whose hash set drops what is no item after the
search, as NEZHA's does. Both on at most 1,280 requests, as in the paper.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models import checkpoint, registry
from models.fit import to_device
from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.diagnostics import attention_received, lost_without_trie
from models.retrieval.retriever import Retriever
from models.setup import load_catalogue
from models.tables import UserError, join, open_uri
from models.uri import absolute, write_file
from models.words import number_of
from pipelines.evaluation.ranking import device_of
from pipelines.figures import COLOURS, new_figure, png, say_axes
from pipelines.training.record import find_checkpoint

REQUESTS = 1280
"""Requests looked at, at most, spread evenly over the lengths of histories (Appendix D.3 of SID-MLP)."""

EDGE = 3
"""Positions at either end that are added up (Appendix D.3)."""

SHOWN = 24
"""Positions from either end in the plot."""


def shares(rows: list[NDArray[np.float64]]) -> dict[str, Any]:
    """Of the attention that each position of a request receives, (layers, S) each, the share of the first and of the
    last positions by layer, that of as many if all received the same, and the share of requests, by layer, whose most
    attended position is at neither end."""
    top = np.stack([(row.argmax(1) >= EDGE) & (row.argmax(1) < row.shape[1] - EDGE) for row in rows])
    return {
        "first": np.mean([row[:, :EDGE].sum(1) for row in rows], 0).tolist(),
        "last": np.mean([row[:, -EDGE:].sum(1) for row in rows], 0).tolist(),
        "uniform": float(np.mean([min(1.0, EDGE / row.shape[1]) for row in rows])),
        "top_between": top.mean(0).tolist(),
    }


def profile(rows: list[NDArray[np.float64]], step: int) -> NDArray[np.float64]:
    """(positions, layers): attention over the request's mean by distance from the start (`step` 1) or the end (-1)."""
    found = []
    for place in range(min(SHOWN, max(row.shape[1] for row in rows))):
        found.append(np.mean([row[:, ::step][:, place] * row.shape[1] for row in rows if row.shape[1] > place], 0))
    return np.stack(found)


def draw(rows: list[NDArray[np.float64]]) -> bytes:
    """The plot of both profiles, as PNG: a line per layer."""
    figure, panels = new_figure(2)
    for axes, step, label in zip(panels, (1, -1), ("tokens from the start", "tokens from the end"), strict=True):
        for layer, line in enumerate(profile(rows, step).T):
            axes.plot(line, color=COLOURS[layer % len(COLOURS)], lw=1.4, label=f"layer {layer + 1}")
        axes.axhline(1.0, color="#999999", lw=0.8, ls="--")
        say_axes(axes, label, "attention received / uniform")
    panels[1].invert_xaxis()  # the end of the history on the right
    panels[0].legend()
    return png(figure)


def diagnose(
    uri: str, tables: str, sids: str | None, folder: str, *, split: str = "test", beam: int | None = None,
    batch_size: int = 256, device: str = "auto",
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """Writes `diagnostics.json`, and of a TIGER `attention.png`, to `folder`; what the former holds, and lines on it.

    Raises UserError for a model that decodes no semantic IDs.
    """
    uri, tables, sids = find_checkpoint(uri), absolute(tables), absolute(sids) if sids else None
    about = checkpoint.read(uri)
    entry = registry.find(about.name)
    loaded, _ = registry.load(uri, load_catalogue(entry, about.name, tables, sids))
    if not isinstance(loaded, Retriever):
        raise UserError(
            f"--diagnose looks into models that decode semantic IDs, and '{about.name}' does not; leave it out"
        )
    where = device_of(device)
    model, beam = loaded.to(where), loaded.config.beam if beam is None else beam
    history = registry.config_from_dict(about.model).max_history
    examples = entry.family.examples.load(
        join(tables, "sequences"), split, unit=entry.family.eval_unit, max_history=history
    )
    if len(examples) == 0:
        raise UserError(f"the split '{split}' of {tables} has no request with a history; choose another --split")
    order = np.argsort(examples.lengths, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(REQUESTS, len(order))).round().astype(np.int64)]
    attention: list[NDArray[np.float64]] = []
    lost = []
    plain = model.backbone if type(model.backbone) is T5Backbone else None
    for begin in range(0, len(chosen), batch_size):
        batch = to_device(examples.collate(chosen[begin : begin + batch_size]), where)
        if plain:
            received, lengths = (x.cpu() for x in attention_received(plain, batch))
            attention += [received[:, i, :n].double().numpy() for i, n in enumerate(lengths.tolist())]
        with torch.no_grad():
            scorer = model.decoder.scorer(model.backbone.infer(batch))
        lost.append(lost_without_trie(scorer, model.trie, beam).cpu())
    found: dict[str, Any] = {
        "checkpoint": uri, "split": split, "requests": len(chosen), "beam": beam,
        "lost_without_trie": torch.cat(lost).mean(0).tolist(),
    }  # fmt: skip
    lines = [f"{about.name} on {number_of(len(chosen), 'request')} of {split}"]
    if plain:
        found["attention"] = shares(attention)
        for key, what in (("first", "the first"), ("last", "the last")):
            parts = "  ".join(f"{share:.1%}" for share in found["attention"][key])
            lines.append(f"  attention to {what} {EDGE} positions by layer  {parts}")
        lines.append(f"  as many of equally attended positions  {found['attention']['uniform']:.1%}")
    parts = "  ".join(f"{share:.1%}" for share in found["lost_without_trie"])
    lines.append(f"  valid codes lost without the trie, by digit, of {beam} beams  {parts}")
    filesystem, path = open_uri(absolute(folder))
    filesystem.create_dir(path, recursive=True)
    if plain:
        write_file(join(absolute(folder), "attention.png"), draw(attention))
    write_file(join(absolute(folder), "diagnostics.json"), json.dumps(found, indent=2).encode())
    return found, [*lines, f"  written to  {folder}"]
