"""Base (BERT & DNN, Sec. 4.1 of QGS): the discriminative ranker. Features, query and document text; no history.

python -m jobs.train --config jobs/configs/search/base.yaml --tables TABLES --text TEXT --storage runs --name base
"""

from __future__ import annotations

from dataclasses import dataclass

from models.search.ranker import Ranker, RankerConfig


@dataclass
class BaseConfig(RankerConfig):
    """Sizes of Base; it reads no history, so `max_history` only shapes the batches."""


class Base(Ranker):
    """See the module."""
