"""An exported student recommends like the model, for all batches and lengths."""

from __future__ import annotations

import pytest
import torch

from models.retrieval.data import Catalogue
from models.retrieval.search.export import export_student, load_exported
from models.retrieval.students.sid_mlp import SidMlp
from models.retrieval.students.sid_mlp_pp import SidMlpPp, SidMlpPpConfig
from models.retrieval.tiger import Tiger, TigerConfig
from models.storage.tables import UserError
from tests.fixtures.small_retrieval import make_requests
from tests.fixtures.small_students import (
    HEADS,
    SIZES,
    TEACHER,
    build_student,
    draw_published_codes,
)


def build_sid_mlp() -> SidMlp:
    """Return a SID-MLP of 400 items."""
    return build_student(draw_published_codes(400), SIZES)


def build_sid_mlp_pp() -> SidMlpPp:
    """Return a SID-MLP++ of 400 items."""
    torch.manual_seed(0)
    config = SidMlpPpConfig(
        teacher_model=TEACHER,
        **HEADS,
        encoder_layers=2,
        encoder_width=32,
        scores="codebook",
    )
    catalogue = Catalogue.from_codes(draw_published_codes(400), SIZES)
    return SidMlpPp(config, catalogue).eval()


@pytest.mark.long
@pytest.mark.parametrize("build", [build_sid_mlp, build_sid_mlp_pp])
def test_an_exported_student_recommends_like_the_model(build, tmp_path):
    model = build()
    path = tmp_path / "student.pt2"
    export_student(model, path, k=10)
    program = load_exported(path)

    for count, longest in ((1, 1), (1, 20), (7, 5), (30, 20)):
        batch = make_requests(count, 400, seed=count, longest=longest)
        expected_items, expected_scores = model.recommend(batch, 10)
        items, scores = program(batch.history, batch.history_length, batch.user)
        torch.testing.assert_close(scores, expected_scores, rtol=1e-4, atol=1e-4)
        assert items.tolist() == expected_items.tolist()

    empty = make_requests(1, 400, longest=20).select("B", slice(0))
    items, scores = program(empty.history, empty.history_length, empty.user)
    assert items.shape == scores.shape == (0, 10)


def test_an_unsupported_model_or_k_is_rejected(tmp_path):
    codes = draw_published_codes(300)
    path = tmp_path / "student.pt2"
    with pytest.raises(UserError, match="a SidMlp of this config cannot be exported"):
        export_student(build_student(codes, SIZES, readout="mean"), path, 10)
    tiger = Tiger(TigerConfig(**TEACHER), Catalogue.from_codes(codes, SIZES))
    with pytest.raises(UserError, match="a Tiger of this config cannot be exported"):
        export_student(tiger, path, 10)
    with pytest.raises(UserError, match="k 0 is below 1"):
        export_student(build_student(codes, SIZES), path, 0)
