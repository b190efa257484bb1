"""Training of models of search: they train, are validated by GAUC, and a checkpoint is
loaded for its tables only.
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
def test_training_improves_gauc_and_its_checkpoint_has_equal_scores(search, tmp_path):
    tables, text = search
    inputs = Inputs(tables, text=text)
    run = build_training({"name": "qgs", **SMALL}, FIT, inputs)

    events = list(fit(run.model, run.train, run.validate, run.fit, means=run.means))

    weight = run.model.config.infonce_weight
    for event in events:
        if isinstance(event, StepEvent):
            loss = event.parts["ranking"] + weight * event.parts["infonce"]
            assert event.loss == pytest.approx(loss, rel=1e-5)
    ends = [event for event in events if isinstance(event, EpochEvent)]
    assert ends[-1].metrics["gauc"] > 0.6
    assert ends[-1].loss < ends[0].loss
    assert ends[-1].metrics["requests"] == 40

    path = tmp_path / "best"
    checkpoint.save(path, run.model, run.checkpoint(epoch=6))
    loaded, metadata = load_model(path, load_catalogue("qgs", inputs), "qgs")
    # embeddings stay in their tables
    assert not [name for name in loaded.state_dict() if name.startswith("text.pairs")]
    cpu = torch.device("cpu")
    sums = measure_examples(run.model, run.val, batch_size=5, device=cpu).sums
    loaded_sums = measure_examples(loaded, run.val, batch_size=5, device=cpu).sums
    assert sums.keys() == loaded_sums.keys()
    assert run.means(sums) == pytest.approx(
        run.means(loaded_sums), rel=0, abs=0, nan_ok=True
    )
    assert metadata.hashes.keys() >= {"sequences", "items", "queries", "text_pairs"}

    other, other_text = write_search(tmp_path / "other", users=12, seed=5)
    other_catalogue = load_catalogue("qgs", Inputs(other, text=other_text))
    with pytest.raises(UserError, match="belongs to another table"):
        load_model(path, other_catalogue)


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("search/*.yaml")), ids=lambda p: p.stem
)
def test_the_configs_are_valid_and_use_gauc(path):
    options = yaml.safe_load(path.read_text())
    complete = ("base", "boosted", "pair_ctr", "item_ctr", "log_order")
    if path.stem not in complete:  # others are merged into qgs.yaml
        base = yaml.safe_load((CONFIGS / "qgs.yaml").read_text())
        options = {part: {**base[part], **options.get(part, {})} for part in base}
    model_class, config = parse_options(options["model"])
    assert model_class.family == "search"
    metric = "with_position/gauc" if path.stem == "log_order" else "gauc"
    assert FitConfig(**options["fit"]).metric == metric
    assert config.max_history >= 1
