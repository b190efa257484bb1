"""Options that a model refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from core.errors import UserError
from models.loaded_model import build_model
from tests.fixtures.small_retrieval import build_catalogue

REFUSED = yaml.safe_load(Path(__file__).with_name("refused_options.yaml").read_text())


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_an_impossible_option_is_refused_by_its_name(case):
    options = dict(case)
    name = rf"\b{[*options][-1]}\b" if "error" not in options else ""
    message = name or re.escape(options.pop("error"))
    with pytest.raises(UserError, match=message):
        build_model(options, build_catalogue())
