"""An exported student recommends like the model, for all batches and lengths."""

from __future__ import annotations

import pytest
import torch
from test_fast import SMALL, TEACHER, requests, student, table_7

from models.retrieval.data import Catalogue
from models.retrieval.search.export import export_student, load_exported
from models.retrieval.students.sid_mlp_pp import SidMlpPp, SidMlpPpConfig
from models.retrieval.tiger import Tiger, TigerConfig
from models.storage.tables import UserError


def plus_plus() -> SidMlpPp:
    torch.manual_seed(0)
    config = SidMlpPpConfig(
        teacher_model=TEACHER,
        **SMALL,
        encoder_layers=2,
        encoder_width=32,
        scores="codebook",
    )
    return SidMlpPp(
        config, Catalogue.from_codes(table_7(400), (256, 256, 256, 256))
    ).eval()


@pytest.mark.long
@pytest.mark.parametrize(
    "make", [lambda: student(table_7(400), (256, 256, 256, 256)), plus_plus]
)
def test_it_recommends_the_same(make, tmp_path):
    model = make()
    path = tmp_path / "student.pt2"
    export_student(model, path, k=10)
    program = load_exported(path)
    for count, longest in ((1, 1), (1, 20), (7, 5), (30, 20)):
        batch = requests(count, 400, seed=count, longest=longest)
        items, scores = model.recommend(batch, 10)
        found, exported = program(batch.history, batch.history_length, batch.user)
        torch.testing.assert_close(exported, scores, rtol=1e-4, atol=1e-4)
        assert found.tolist() == items.tolist()
    empty = requests(1, 400)
    items, scores = program(empty.history[:0], empty.history_length[:0], empty.user[:0])
    assert items.shape == scores.shape == (0, 10)


def test_what_cannot_be_exported_is_refused(tmp_path):
    codes, sizes = table_7(300), (256, 256, 256, 256)
    path = tmp_path / "student.pt2"
    with pytest.raises(UserError, match="a SidMlp of this config cannot be exported"):
        export_student(student(codes, sizes, readout="mean"), path, 10)
    with pytest.raises(UserError, match="a Tiger of this config cannot be exported"):
        export_student(
            Tiger(TigerConfig(**TEACHER), Catalogue.from_codes(codes, sizes)), path, 10
        )
    with pytest.raises(UserError, match="k 0 is below 1"):
        export_student(student(codes, sizes), path, 0)
