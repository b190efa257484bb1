"""Top-k equals a stable sort, with and without ties."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.retrieval.search.topk import _select_all_passes, select, top_k


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(0, 6),
    width=st.integers(1, 40),
    k=st.integers(1, 45),
    levels=st.sampled_from([1, 2, 5, 1000]),
    lost=st.floats(0, 1),
)
def test_as_a_stable_sort_has_it(
    seed: int, rows: int, width: int, k: int, levels: int, lost: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (rows, width), generator=generator).float()
    scores = scores.masked_fill(
        torch.rand(scores.shape, generator=generator) < lost, -torch.inf
    )
    expected, order = scores.sort(dim=1, descending=True, stable=True)
    position, values = top_k(scores, k)
    have = min(k, width)
    assert torch.equal(position[:, :have], order[:, :have])
    assert torch.equal(values[:, :have], expected[:, :have])
    assert (position[:, have:] == -1).all()
    assert (values[:, have:] == -torch.inf).all()
    if k < width:
        chosen = order[:, :k].sort(1).values
        assert torch.equal(select(scores, k), chosen)
        assert torch.equal(
            _select_all_passes(scores, k), chosen
        )  # what a GPU does for all rows


def test_nan_is_not_hidden() -> None:
    scores = torch.tensor(
        [[1.0, torch.nan, 2.0, torch.nan], [1.0, 1.0, 1.0, torch.nan]]
    )
    for k in (1, 2, 3):
        for position in (select(scores, k), _select_all_passes(scores, k)):
            assert scores.gather(1, position).isnan().any(1).all()
