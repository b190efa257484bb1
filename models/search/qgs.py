"""QGS: query-conditioned generative search (Song et al., 2026).

    python -m jobs.train --config jobs/configs/qgs.yaml --tables TABLES --text TEXT --storage runs --name qgs

Behaviours are query-item pair tokens (Eq. 1 and 2), read by the Linear HSTU encoder (Eq. 6-10). Trained to
predict the next item given the next query (Eq. 3-5) together with ranking, where HFG-Attention (Eq. 11-13)
brings in the candidate's features. The ablations of Table 3 and the sizes of Table 4 are fields of the config.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.search.sequence import SequenceConfig, SequenceRanker


@dataclass
class QGSConfig(SequenceConfig):
    """Settings of QGS; the defaults are the paper's."""

    group_attention: bool = True
    """HFG-Attention over groups of features (Sec. 3.6)."""


class QGS(SequenceRanker):
    """See the module."""
