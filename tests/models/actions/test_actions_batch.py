"""The batch contract: what is refused, and who sees what."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from models.actions.attributes import Attributes
from models.actions.batch import ActionsCatalogue, any_tied, check_batch, earlier


def test_every_event_sees_what_is_strictly_before_it(batch):
    batch["candidate_time"][0] = torch.tensor([30, 31, -5])
    assert not any_tied(batch)
    assert earlier(batch)[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 4, 0]
    batch["time"][0, 2:5] = 20
    assert any_tied(batch)
    assert earlier(batch)[0].tolist() == [0, 1, 2, 2, 2, 5, 6, 5, 5, 0]
    assert earlier(batch)[3, 7:9].tolist() == [0, 0]  # a user without context


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("viewer", (0, 0, 1), 2, "viewer is not within 0 to"),
        ("item", (0, 0), 30, "item is not within 0 to 29"),
        ("candidate_item", (0, 0), -1, "candidate_item is not within"),
        ("label", (0, 0, 0), 0.5, "label has a value other than 0 and 1"),
        ("action", (0, 0, 0), float("nan"), "action has a value that is not finite"),
        ("valid", (0, 2), False, "padding before an event"),
        ("time", (0, 3), 5, "time falls within a context"),
        ("learn", (1, 5), True, "learn is true for padding"),
    ],
)
def test_bad_values_are_named(name, place, value, said, catalogue, batch):
    batch[name][place] = value
    with pytest.raises(ValueError, match=said):
        check_batch(batch, catalogue)


def test_wrong_shapes_are_named(catalogue, batch):
    with pytest.raises(ValueError, match="action has shape"):
        check_batch(batch | {"action": batch["action"][:, :, :2]}, catalogue)
    empty = {key: tensor if key.startswith("candidate") else tensor[:, :0] for key, tensor in batch.items()}
    with pytest.raises(ValueError, match="the context has no position"):
        check_batch(empty, catalogue)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([10.0, None, 30.0], [-1.0, 0.0, 1.0]),  # of deviation 10
        ([7.0, 7.0, None], [0.0, 0.0, 0.0]),
        ([None, None], [0.0, 0.0]),
    ],
)
def test_numbers_of_items_have_mean_0_and_deviation_1(values, expected):
    items = pa.table({"num_x": pa.array(values, pa.float32())})
    assert Attributes.of(items).read(items)[0][:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actions": ()}, "actions has 0 entries"),
        ({"features": ("clicks",)}, "feature_mean has 0 entries for 1 features"),
        (
            {"features": ("clicks",), "feature_mean": torch.zeros(1), "feature_std": torch.zeros(1)},
            "feature_std has an entry that is not positive",
        ),
        ({"numbers": torch.zeros(3, 1)}, "give a row for each of 4 items"),
        ({"train_rates": (0.5, 0.5)}, "train_rates has 2 entries for 1 tasks"),
    ],
)
def test_an_impossible_catalogue_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        ActionsCatalogue(**({"num_items": 4, "actions": ("like",), "labels": ("like",)} | changes))
