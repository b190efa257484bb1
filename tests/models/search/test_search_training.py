"""Search models through the common set-up: trained, validated by GAUC, saved, loaded
for the right tables only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from models.build import load_model, parse_options
from models.evaluation import measure_examples
from models.loaded_model import load_catalogue
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit import EpochEvent, FitConfig, StepEvent, fit
from tests.fixtures.search_tables import write_search
from tests.fixtures.trainings import build_training

CONFIGS = Path(__file__).parents[3] / "jobs/configs"
SMALL = {
    "width": 16,
    "num_layers": 1,
    "max_history": 8,
    "dnn_width": 16,
    "tower_width": 8,
    "text_width": 8,
}
FIT = FitConfig(
    optimizer="adagrad",
    lr=0.05,
    weight_decay=0,
    batch_size=16,
    max_epochs=6,
    metric="gauc",
    schedule="constant",
)


@pytest.mark.long
def test_a_run_improves_gauc_and_its_checkpoint_scores_alike(search, tmp_path):
    tables, text = search
    setup = build_training({"name": "qgs", **SMALL}, FIT, Inputs(tables, text=text))
    events = list(
        fit(setup.model, setup.train, setup.validate, setup.fit, means=setup.means)
    )
    ends = [event for event in events if isinstance(event, EpochEvent)]
    for event in events:
        if isinstance(event, StepEvent):  # both parts of the loss are told apart
            parts = (
                event.parts["ranking"]
                + setup.model.config.infonce_weight * event.parts["infonce"]
            )
            assert event.loss == pytest.approx(parts, rel=1e-5)
    assert ends[-1].metrics["gauc"] > 0.6
    assert ends[-1].loss < ends[0].loss
    assert ends[-1].metrics["requests"] == 40
    checkpoint.save(tmp_path / "best", setup.model, setup.checkpoint(epoch=6))
    loaded, about = load_model(
        tmp_path / "best", load_catalogue("qgs", Inputs(tables, text=text)), "qgs"
    )
    assert not [
        name for name in loaded.state_dict() if name.startswith("text.pairs")
    ]  # the tables stay where they are
    found = [
        measure_examples(
            model,
            setup.val,
            batch_size=5,
            device=torch.device("cpu"),
        ).sums
        for model in (setup.model, loaded)
    ]
    assert found[0].keys() == found[1].keys()
    one, other = (setup.means(sums) for sums in found)
    assert one == pytest.approx(other, rel=0, abs=0, nan_ok=True)
    assert about.hashes.keys() >= {"sequences", "items", "queries", "text_pairs"}
    other = write_search(tmp_path / "other", users=12, seed=5)
    with pytest.raises(UserError, match="belongs to another table"):
        load_model(
            tmp_path / "best", load_catalogue("qgs", Inputs(other[0], text=other[1]))
        )


def test_search_models_ask_for_text(search):
    with pytest.raises(
        UserError,
        match=r"needs text embeddings; give --text with the folder that jobs\.encode made",
    ):
        build_training({"name": "base"}, FIT, Inputs(search[0]))


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("search/*.yaml")), ids=lambda p: p.stem
)
def test_the_configs_are_of_models_that_exist(path):
    content = yaml.safe_load(path.read_text())
    alone = ("base", "boosted", "pair_ctr", "item_ctr", "log_order")
    if path.stem not in alone:  # read after the base
        base = yaml.safe_load((CONFIGS / "qgs.yaml").read_text())
        content = {part: {**base[part], **content.get(part, {})} for part in base}
    model_class, config = parse_options(content["model"])
    assert model_class.family == "search"
    metric = "with_position/gauc" if path.stem == "log_order" else "gauc"
    assert FitConfig(**content["fit"]).metric == metric
    assert config.max_history >= 1
