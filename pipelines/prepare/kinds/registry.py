"""All kinds of request, by name.

To add a kind, write a subclass of `SequenceBuilder` in `NAME/sequences.py` beside this
file and list it below, and its audit rules in `pipelines/prepare/audit/rules.py`.
"""

from __future__ import annotations

from pipelines.prepare.kinds.actions.sequences import ActionsBuilder
from pipelines.prepare.kinds.retrieval.sequences import RetrievalBuilder
from pipelines.prepare.kinds.search.sequences import SearchBuilder
from pipelines.prepare.sequences.builder import SequenceBuilder

KINDS: dict[str, type[SequenceBuilder]] = {
    kind.name: kind for kind in (RetrievalBuilder, SearchBuilder, ActionsBuilder)
}
