"""The fast path finds what the plain path finds, in the same order."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trie import catalogues
from torch import Tensor

from models.retrieval.data import PAD, Catalogue
from models.retrieval.sid_mlp import SidMlp, SidMlpConfig

TEACHER = {"d_model": 16, "d_ff": 24, "num_heads": 2, "d_kv": 8, "num_encoder_layers": 2, "num_decoder_layers": 1,
           "n_user_tokens": 2}  # fmt: skip
SMALL = {"attention_heads": 2, "attention_width": 24, "ffn_width": 32, "head_width": 20}
CLOSE = 1e-4
"""Scores of the two paths differ by rounding alone; two items whose plain scores are nearer than this may swap."""


def student(codes: Tensor, sizes: tuple[int, ...], seed: int = 0, **options: Any) -> SidMlp:
    """A student with random weights, its scores far from uniform."""
    torch.manual_seed(seed)
    config = SidMlpConfig(**{"teacher_model": TEACHER, **SMALL, **options})
    model = SidMlp(config, Catalogue.from_codes(codes, sizes))
    for name, parameter in model.named_parameters():
        if name.startswith("heads") and parameter.dim() == 2:
            torch.nn.init.normal_(parameter.data, std=0.5)
    return model.eval()


def requests(count: int, items: int, seed: int = 1, longest: int = 20) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, longest + 1, (count,), generator=generator)
    history = torch.randint(0, items, (count, int(length.max())), generator=generator)
    return {
        "history": history.masked_fill(torch.arange(history.shape[1]) >= length[:, None], PAD),
        "history_length": length,
        "user": torch.randint(0, 2**62, (count,), generator=generator),
    }


def same(model: SidMlp, batch: dict[str, Tensor], k: int, beam: int, scores: str) -> None:
    """Scores equal by rank up to rounding; items equal in order, but where scores by rank leave it to rounding."""
    items, plain = model.recommend(batch, k, beam=beam, path="plain", scores=scores)
    found, fast = model.recommend(batch, k, beam=beam, path="fast", scores=scores)
    torch.testing.assert_close(fast, plain, rtol=CLOSE, atol=CLOSE)
    assert ((found == -1) == (items == -1)).all()
    for row in (items != found).any(1).nonzero().flatten().tolist():
        gap = plain[row].diff().abs()
        for at in (items[row] != found[row]).nonzero().flatten().tolist():
            near = [float(gap[other]) for other in (at - 1, at) if 0 <= other < len(gap)]
            assert at == k - 1 or min(near) < CLOSE, f"rank {at} differs and its score stands alone: {near}"


@settings(max_examples=120, deadline=None)
@given(
    catalogues(),
    st.sampled_from(["children", "codebook"]),
    st.integers(1, 12),
    st.sampled_from([1, 2, 3, 5, 10, 50]),
    st.integers(0, 5),
)
def test_any_trie(catalogue, scores, k, beam, seed):
    sizes, codes = catalogue
    same(student(torch.tensor(codes), sizes, seed), requests(5, len(codes), seed, longest=4), k, beam, scores)
