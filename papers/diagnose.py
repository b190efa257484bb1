"""A look inside of a checkpoint with semantic IDs: attention by position, and what decoding without the trie loses.

    python -m papers.diagnose --checkpoint runs/tiger --tables TABLES --sids SIDS --output runs/tiger/inside

Of TIGER, whose encoder a student keeps, the attention that the first and the last three positions receive in each
layer, against the same for all positions (Appendix D.3 of SID-MLP: there is no sink at either end for EARN's
registers to stand on). Of all, which valid codes a search loses whose hash set drops what is no item after the
search, as NEZHA's does. Both on at most 1,280 requests, as in the paper.

Shapes: `B` requests, `S` tokens of a history, `W` beams, `L` levels (codes of an item).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from jobs import cli
from models.config import pluralize
from models.fit import to_device
from models.places import reach
from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.parts import Scorer, padding_mask, real_positions
from models.retrieval.retriever import Retriever
from models.retrieval.search.topk import select
from models.retrieval.search.trie import Trie
from models.tables import UserError, join, open_uri
from models.uri import absolute, write_file
from papers.loaded import Options, load
from pipelines.figures import COLOURS, new_figure, png, say_axes

REQUESTS = 1280
"""Requests looked at, at most, spread evenly over the lengths of histories (Appendix D.3 of SID-MLP)."""

EDGE = 3
"""Positions at either end that are added up (Appendix D.3)."""

SHOWN = 24
"""Positions from either end in the plot."""


@torch.no_grad()
def attention_received(
    backbone: T5Backbone, batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """(layers, B, S): the share of a layer's attention that each position receives, the mean over heads and over all
    positions that ask, 0 at padding; and (B,) how many positions there are (Appendix D.3 of SID-MLP)."""
    tokens, lengths = backbone.inputs(batch)
    real = real_positions(lengths, tokens.shape[1]).unsqueeze(-1)  # (B, S, 1)
    bias = backbone.encoder.position_bias(tokens.shape[1])
    padding = padding_mask(lengths, tokens.shape[1], bias.dtype)
    bias = bias if padding is None else bias + padding
    x, found = functional.embedding(tokens, backbone.table()), []
    for block in backbone.encoder.blocks:
        q, k = block.attention.project(block.norm(0, x), "qk")
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1).mean(1)  # (B, S, S)
        found.append((weights * real).sum(1) / lengths.unsqueeze(1))
        x = block(x, bias, 0.0)
    return torch.stack(found), lengths


@torch.no_grad()
def lost_without_trie(scorer: Scorer, trie: Trie, beam: int) -> Tensor:
    """(B, L) float64: the share of valid codes that a search loses at each level where the catalogue is asked after
    the top `beam` are taken, as by NEZHA's hash set, and not before.

    The beams that stand for a prefix of an item have valid children, of which `beam`, or all where they are fewer,
    could be kept. Those that are not have been displaced by codes that lead to no item. With no such beam left it is 1.
    """
    log_probs = scorer.start().unsqueeze(1)  # (B, W, C_l)
    score = log_probs.new_zeros(log_probs.shape[:2])
    node = torch.zeros_like(
        score, dtype=torch.long
    )  # (B, W): where each beam stands in the trie, -1 outside of it
    lost = []
    for level in range(trie.levels):
        offsets = trie.offsets(level)
        children = (
            (offsets[node.clamp(min=0) + 1] - offsets[node.clamp(min=0)])
            .masked_fill(node < 0, 0)
            .sum(1)
        )
        scores = (score.unsqueeze(-1) + log_probs).flatten(1)
        position = select(scores, min(beam, scores.shape[1]))
        parents, token = position // log_probs.shape[-1], position % log_probs.shape[-1]
        score, node = (
            scores.gather(1, position),
            trie.descend(level, node.gather(1, parents), token),
        )
        could = children.clamp(max=beam).double()
        kept = (node >= 0).sum(1) / could.clamp(min=1)
        lost.append(1 - kept)
        if level < trie.levels - 1:
            log_probs = scorer.step(parents, token)
    return torch.stack(lost, 1)


def shares(rows: list[NDArray[np.float64]]) -> dict[str, Any]:
    """Of the attention that each position of a request receives, (layers, S) each, the share of the first and of the
    last positions by layer, that of as many if all received the same, and the share of requests, by layer, whose most
    attended position is at neither end."""
    top = np.stack(
        [
            (row.argmax(1) >= EDGE) & (row.argmax(1) < row.shape[1] - EDGE)
            for row in rows
        ]
    )
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
        found.append(
            np.mean(
                [
                    row[:, ::step][:, place] * row.shape[1]
                    for row in rows
                    if row.shape[1] > place
                ],
                0,
            )
        )
    return np.stack(found)


def draw(rows: list[NDArray[np.float64]]) -> bytes:
    """The plot of both profiles, as PNG: a line per layer."""
    figure, panels = new_figure(2)
    for axes, step, label in zip(
        panels, (1, -1), ("tokens from the start", "tokens from the end"), strict=True
    ):
        for layer, line in enumerate(profile(rows, step).T):
            axes.plot(
                line,
                color=COLOURS[layer % len(COLOURS)],
                lw=1.4,
                label=f"layer {layer + 1}",
            )
        axes.axhline(1.0, color="#999999", lw=0.8, ls="--")
        say_axes(axes, label, "attention received / uniform")
    panels[1].invert_xaxis()  # the end of the history on the right
    panels[0].legend()
    return png(figure)


@dataclass(kw_only=True)
class Config(Options):
    """Options."""

    output: str
    """Folder for `diagnostics.json` and, of a TIGER, `attention.png`."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made."""
    beam: int | None = None
    """Beams of the search; by default the checkpoint's."""


def run(config: Config) -> dict[str, Any]:
    """Writes what there is to see and prints it; gives what `diagnostics.json` holds.

    Raises UserError for a model that decodes no semantic IDs.
    """
    reach(checkpoint=config.checkpoint, tables=config.tables, sids=config.sids)
    loaded = load(
        config.checkpoint,
        config.tables,
        sids=config.sids,
        split=config.split,
        device=config.device,
    )
    model, examples = loaded.model, loaded.examples
    if not isinstance(model, Retriever):
        raise UserError(
            f"papers.diagnose looks into models that decode semantic IDs, and '{loaded.name}' does not"
        )
    beam = model.config.beam if config.beam is None else config.beam
    order = np.argsort(examples.lengths, kind="stable")
    chosen = order[
        np.linspace(0, len(order) - 1, min(REQUESTS, len(order)))
        .round()
        .astype(np.int64)
    ]
    attention: list[NDArray[np.float64]] = []
    lost = []
    plain = model.backbone if type(model.backbone) is T5Backbone else None
    for begin in range(0, len(chosen), config.batch_size):
        batch = to_device(
            examples.collate(chosen[begin : begin + config.batch_size]), loaded.device
        )
        if plain:
            received, lengths = (x.cpu() for x in attention_received(plain, batch))
            attention += [
                received[:, i, :n].double().numpy()
                for i, n in enumerate(lengths.tolist())
            ]
        with torch.no_grad():
            scorer = model.decoder.scorer(model.backbone.infer(batch))
        lost.append(lost_without_trie(scorer, model.trie, beam).cpu())
    found: dict[str, Any] = {
        "checkpoint": loaded.uri,
        "split": config.split,
        "requests": len(chosen),
        "beam": beam,
        "lost_without_trie": torch.cat(lost).mean(0).tolist(),
    }
    print(f"{loaded.name} on {pluralize(len(chosen), 'request')} of {config.split}")
    if plain:
        found["attention"] = shares(attention)
        for key, what in (("first", "the first"), ("last", "the last")):
            parts = "  ".join(f"{share:.1%}" for share in found["attention"][key])
            print(f"  attention to {what} {EDGE} positions by layer  {parts}")
        print(
            f"  as many of equally attended positions  {found['attention']['uniform']:.1%}"
        )
    parts = "  ".join(f"{share:.1%}" for share in found["lost_without_trie"])
    print(f"  valid codes lost without the trie, by digit, of {beam} beams  {parts}")
    folder = absolute(config.output)
    filesystem, path = open_uri(folder)
    filesystem.create_dir(path, recursive=True)
    if plain:
        write_file(join(folder, "attention.png"), draw(attention))
    write_file(join(folder, "diagnostics.json"), json.dumps(found, indent=2).encode())
    print(f"  written to  {config.output}")
    return found


if __name__ == "__main__":
    cli.main(run, Config)
