"""A small catalogue of semantic IDs, random requests and a TIGER of random weights, for
tests of retrieval models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.retrieval.data import PAD, Catalogue, RequestBatch, WindowBatch
from models.retrieval.parts import History
from models.retrieval.tiger import Tiger, TigerConfig

SIZES = (6, 5, 3, 2)
FIRST = [1, 7, 12, 15]
"""First token of each codebook."""
ITEMS = 30
TEACHER: dict[str, Any] = {
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 3,
    "num_decoder_layers": 2,
    "n_user_tokens": 2,
    "max_history": 6,
}


def catalogue(items: int = ITEMS, sizes: tuple[int, ...] = SIZES) -> Catalogue:
    """So many items, with codes drawn from all that there are."""
    codes = torch.cartesian_prod(*(torch.arange(size) for size in sizes))
    order = torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))
    return Catalogue.from_codes(codes[order[:items]], sizes)


def requests(
    count: int, items: int = ITEMS, seed: int = 1, longest: int = 5
) -> RequestBatch:
    """Requests with histories of 1 to `longest` items, the first one's of 2."""
    length = torch.randint(
        1, longest + 1, (count,), generator=torch.Generator().manual_seed(seed)
    )
    length[0] = min(2, longest)
    return requests_of(length.tolist(), seed, items, longest)


def requests_of(
    lengths: list[int], seed: int = 1, items: int = ITEMS, longest: int = 0
) -> RequestBatch:
    """Requests with histories of these lengths, padded to the longest of them, or to
    `longest`.
    """
    generator, length = (
        torch.Generator().manual_seed(seed),
        torch.tensor(lengths, dtype=torch.long),
    )
    width = longest or max(lengths, default=1)
    history = torch.randint(0, items, (len(lengths), width), generator=generator)
    history = history.masked_fill(torch.arange(width) >= length[:, None], PAD)
    user = torch.randint(0, 2**62, (len(lengths),), generator=generator)
    target = torch.randint(0, items, (len(lengths),), generator=generator)
    repeats = (history == target[:, None]).any(1).long()
    row = torch.arange(len(lengths))
    return RequestBatch(
        history=history,
        history_length=length,
        user=user,
        user_row=row,
        request=row,
        target=target,
        repeats=repeats,
    )


def windows(batch: RequestBatch, **requests: Tensor) -> WindowBatch:
    """The histories of a batch as windows that serve the `requests` (target, target_row
    and target_position).
    """
    return WindowBatch(
        history=batch.history,
        history_length=batch.history_length,
        user=batch.user,
        user_row=batch.user_row,
        request=batch.request,
        **requests,
    )


def tiger(seed: int = 0) -> Tiger:
    """Of random weights, frozen."""
    torch.manual_seed(seed)
    return Tiger(TigerConfig(**TEACHER), catalogue()).requires_grad_(False).eval()


def row_of(history: History, row: int) -> History:
    """One request's part of the history."""
    return History(history.states[row : row + 1], history.lengths[row : row + 1])
