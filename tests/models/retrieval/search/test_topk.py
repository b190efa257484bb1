"""Top-k equals a stable sort, with and without ties."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.retrieval.search import _select_all_passes, select, top_k


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(0, 6),
    width=st.integers(1, 40),
    k=st.integers(1, 45),
    distinct=st.sampled_from([1, 2, 5, 1000]),
    missing=st.floats(0, 1),
)
def test_top_k_is_a_stable_sort(seed, rows, width, k, distinct, missing):
    """Scores have up to `distinct` values, and a share `missing` of them is -inf."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(distinct, (rows, width), generator=generator).float()
    is_missing = torch.rand(scores.shape, generator=generator) < missing
    scores = scores.masked_fill(is_missing, -torch.inf)
    expected, order = scores.sort(dim=1, descending=True, stable=True)

    position, values = top_k(scores, k)

    count = min(k, width)
    assert torch.equal(position[:, :count], order[:, :count])
    assert torch.equal(values[:, :count], expected[:, :count])
    assert (position[:, count:] == -1).all()
    assert (values[:, count:] == -torch.inf).all()
    if k < width:
        selected = order[:, :k].sort(1).values
        assert torch.equal(select(scores, k), selected)
        # the implementation of a GPU
        assert torch.equal(_select_all_passes(scores, k), selected)


def test_a_row_with_nan_selects_a_nan():
    scores = torch.tensor(
        [[1.0, torch.nan, 2.0, torch.nan], [1.0, 1.0, 1.0, torch.nan]]
    )
    for k in (1, 2, 3):
        for position in (select(scores, k), _select_all_passes(scores, k)):
            assert scores.gather(1, position).isnan().any(1).all()
