"""A small catalogue, and a batch of users with contexts of several lengths, one of them
empty.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.actions.catalogue import ActionsCatalogue
from models.actions.requests import ActionsBatch


@pytest.fixture(scope="session")
def catalogue() -> ActionsCatalogue:
    """A catalogue of 30 items with attributes and viewer features."""
    torch.manual_seed(1)
    return ActionsCatalogue(
        num_items=30,
        actions=("click", "like", "share", "dwell"),
        labels=("long_dwell", "like", "contribution"),
        features=("item_clicks", "user_clicks"),
        feature_mean=torch.tensor([1.0, 2.0]),
        feature_std=torch.tensor([2.0, 1.0]),
        numbers=torch.randn(30, 2),
        categories=torch.stack([torch.arange(30) % 5, torch.arange(30) % 3], 1),
        viewers={"device": ["phone", "tablet"], "tab": ["feed"]},
        train_rates=(0.3, 0.1, 0.5),
    )


@pytest.fixture
def batch(catalogue) -> ActionsBatch:
    """A batch of 4 users with contexts of 7, 3, 1 and 0 events, and 3, 3, 1 and 2
    candidates; one candidate of user 0 is between context events.
    """
    torch.manual_seed(2)
    events: dict[str, Any] = {}
    for prefix, size in {"": (4, 7), "candidate_": (4, 3)}.items():
        events[f"{prefix}item"] = torch.randint(30, size)
        events[f"{prefix}feature"] = torch.randn(*size, 2)
        events[f"{prefix}label"] = torch.randint(2, (*size, 3)).float()
        events[f"{prefix}viewer"] = torch.randint(2, (*size, 2))
    valid = torch.arange(7) < torch.tensor([[7], [3], [1], [0]])
    return ActionsBatch(
        **events,
        user_row=torch.arange(4),
        time=torch.arange(7).repeat(4, 1) * 10,
        candidate_time=torch.tensor(
            [[100, 35, 80], [100, 90, 110], [90, 0, 0], [50, 60, 0]]
        ),
        action=torch.rand(4, 7, 4).round(decimals=1),
        valid=valid,
        learn=valid.clone(),
        candidate_valid=torch.arange(3) < torch.tensor([[3], [3], [1], [2]]),
    )
