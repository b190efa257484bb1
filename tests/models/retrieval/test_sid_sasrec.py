"""SID-SASRec is its equations, computed by loops over paths; new items are sums."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from models.loaded_model import build_model
from models.retrieval.data import Catalogue
from models.retrieval.sasrec import SASRec, SASRecConfig
from models.training import checkpoint
from models.warm_start import collect_row_names, load_extended_weights
from tests.fixtures.small_retrieval import (
    ITEMS,
    build_catalogue,
    make_requests,
    make_windows,
)
from tests.fixtures.trainings import CASES

# item 3 is alone in its branch from the first code on; items 0 to 2 share two codes
BRANCHES = [[0, 1, 0], [0, 1, 1], [0, 1, 4], [5, 4, 2], [2, 0, 3], [2, 3, 3]]
CATALOGUES = {
    "four levels": build_catalogue(),
    "one level": Catalogue.from_codes(torch.randperm(20)[:9, None], (20,)),
    "branches": Catalogue.from_codes(torch.tensor(BRANCHES), (6, 5, 5)),
}


def build(catalogue: Catalogue, **options: Any) -> Any:
    """Return a model whose log-probabilities are far from uniform."""
    torch.manual_seed(1)
    model = build_model({**CASES["sid_sasrec"], **options}, catalogue).eval()
    for table in model.item.tables:
        table.weight.data.mul_(25)
    return model


Prefix = tuple[int, ...]


def list_codes(catalogue: Catalogue) -> list[Prefix]:
    """Return the codes of each item."""
    assert catalogue.sids is not None
    return [*map(tuple, catalogue.sids.tolist())]


def score_by_loops(
    model: Any, catalogue: Catalogue, batch: Any
) -> list[tuple[dict[Prefix, float], dict[Prefix, float]]]:
    """Return log p of all prefixes and log q of all items, by request."""
    items = list_codes(catalogue)
    own, *tables = (table.weight.detach().numpy() for table in model.item.tables)
    vectors = dict(zip(items, own, strict=True))
    for names, table in zip(model.item.row_names[1:], tables, strict=True):
        codes = [tuple(map(int, name.split())) for name in names]
        vectors |= zip(codes, table[1:], strict=True)
    scores = []
    for state in model.last_states(batch).detach().numpy():
        path = {(): 0.0}
        for prefix in sorted(vectors, key=len):
            depth, parent = len(prefix), prefix[:-1]
            siblings = [p for p in vectors if len(p) == depth and p[:-1] == parent]
            total = np.log(sum(np.exp(state @ vectors[p]) for p in siblings))
            path[prefix] = path[parent] + state @ vectors[prefix] - total
        logits = [
            sum(state @ vectors[item[:n]] for n in range(1, len(item) + 1))
            for item in items
        ]
        dense = logits - np.log(np.exp(logits).sum())
        scores.append((path, dict(zip(items, dense, strict=True))))
    return scores


def search(path: dict[Prefix, float], items: list[Prefix], beam: int) -> list[Prefix]:
    """Return the items that a beam search within `items` ends at, best first."""
    beams: list[Prefix] = [()]
    for level in range(len(items[0])):
        children = {item[: level + 1] for item in items if item[:level] in beams}
        beams = sorted(children, key=lambda prefix: -path[prefix])
        if level < len(items[0]) - 1:
            beams = beams[:beam]
    return beams


@pytest.mark.parametrize("rerank", [True, False])
@pytest.mark.parametrize("name", CATALOGUES)
def test_searches_are_those_of_loops_over_paths(name, rerank):
    """Narrow and wide beams, over all items and within every second item."""
    catalogue = CATALOGUES[name]
    count, codes = catalogue.num_items, list_codes(catalogue)
    model, batch = build(catalogue, rerank=rerank), make_requests(4, count)
    for beam, step in ((2, 1), (2, 2), (100, 1), (100, 2)):
        mask = torch.arange(count) % step == 0

        items, scores = model.recommend(
            batch, count, beam=beam, allowed=model.encode_allowed(mask)
        )

        shorter, _ = model.recommend(
            batch, 2, beam=beam, allowed=model.encode_allowed(mask)
        )
        assert shorter.equal(items[:, :2])
        by_request = score_by_loops(model, catalogue, batch)
        for row, (path, dense) in enumerate(by_request):
            found = search(path, codes[::step], beam)
            if rerank:
                path = {item: path[item] + dense[item] for item in found}
                found.sort(key=lambda item: -path[item])
            expected = [path[item] for item in found]
            assert [codes[item] for item in items[row] if item >= 0] == found
            assert scores[row, : len(found)].tolist() == pytest.approx(expected, 1e-4)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("name", CATALOGUES)
def test_the_loss_is_the_mean_over_targets_of_loops_over_paths(name, joint):
    catalogue = CATALOGUES[name]
    codes = list_codes(catalogue)
    model, batch = build(catalogue, joint=joint), make_requests(5, catalogue.num_items)

    loss = model(make_windows(batch))["loss"].item()

    expected = 0.0
    by_request = score_by_loops(model, catalogue, batch)
    for item, (path, dense) in zip(batch.target.tolist(), by_request, strict=True):
        expected -= path[codes[item]] + joint * dense[codes[item]]
    assert loss == pytest.approx(expected / 5, rel=1e-4)


def test_sasrec_sums_vectors_where_there_are_semantic_ids():
    for catalogue, expected in (
        (CATALOGUES["one level"], "ids_and_sids"),
        (Catalogue(9), "ids"),
    ):
        config = SASRec.resolve_config(SASRecConfig(), catalogue)
        assert config.item_vectors == expected


def test_a_new_item_starts_as_the_sum_of_its_nodes(tmp_path):
    """Old nodes keep their vectors by their codes, though new codes move their rows."""
    codes = build_catalogue().sids
    assert codes is not None
    order = codes[:24].argsort(0)[:, 0]  # the later codes come between the old ones
    old = build(Catalogue.from_codes(codes[:24][order], (6, 5, 3, 2)))
    about = checkpoint.Checkpoint(
        model=asdict(old.config),
        learned={"names": collect_row_names(old)},
    )
    checkpoint.save(tmp_path, old, about)
    catalogue = Catalogue.from_codes(
        torch.cat([codes[:24][order], codes[24:]]), (6, 5, 3, 2)
    )
    torch.manual_seed(5)
    new: Any = build_model(CASES["sid_sasrec"], catalogue)

    load_extended_weights(new, tmp_path, checkpoint.read(tmp_path), ITEMS, trains=True)

    nodes: dict[str, torch.Tensor] = {}
    for level in (1, 2, 3):
        table = old.item.tables[level].weight[1:]
        nodes |= zip(old.item.row_names[level], table, strict=True)
    weight = new.item.weight
    torch.testing.assert_close(weight[:24], old.item.weight)
    for item, code in enumerate(codes[24:].tolist(), start=24):
        names = [" ".join(map(str, code[:n])) for n in (1, 2, 3)]
        expected = sum(nodes[name] for name in names if name in nodes)
        torch.testing.assert_close(weight[item], expected)
