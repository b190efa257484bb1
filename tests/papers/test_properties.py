"""Table 4 of SID-MLP, as the code has it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from papers.properties import STUDENTS, Operators, Properties, floats, properties, table

TABLE_4 = {
    "atspeed_s": Properties(True, False, False, False),
    "atspeed_r": Properties(True, False, False, False),
    "earn": Properties(False, True, False, False),
    "nezha": Properties(False, True, True, False),
    "sid_mlp": Properties(True, True, True, True),
}
"""As printed; the two ways of AtSpeed have one row there."""


@pytest.mark.parametrize("name", TABLE_4)
def test_the_code_has_the_properties_that_the_paper_says(name: str) -> None:
    assert properties(name) == TABLE_4[name]


def test_recurrent_decoders_carry_a_state_in_place_of_attention() -> None:
    assert (
        properties("gdn") == properties("mamba2") == Properties(True, True, True, False)
    )
    assert properties("one_layer") == Properties(True, True, False, False)


def test_attention_and_states_are_seen() -> None:
    with Operators() as ran:
        torch.zeros(1, 2).log_softmax(-1)
    assert not any("aten::_softmax" in name for name in ran.names)
    with Operators() as ran, torch.no_grad():
        functional.scaled_dot_product_attention(*[torch.zeros(1, 1, 2, 4)] * 3)
    assert any(
        name.startswith(
            ("aten::_scaled_dot_product", "aten::_softmax", "aten::_safe_softmax")
        )
        for name in ran.names
    )

    class Holds:
        def __init__(self) -> None:
            self.states, self.codes = [torch.zeros(2)], torch.zeros(2, dtype=torch.long)

    Holds.__module__ = "models.somewhere"
    holder = Holds()
    before = floats(holder)  # type: ignore[arg-type]
    assert list(before) == ["scorer.states.0"]
    holder.states[0] += 1
    assert floats(holder)["scorer.states.0"][1] > before["scorer.states.0"][1]  # type: ignore[arg-type]


def test_the_table_has_a_row_of_each_student() -> None:
    assert [line.split("`")[1] for line in table().splitlines()[2:]] == list(STUDENTS)
