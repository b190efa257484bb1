"""All kinds of request, by name.

To add a kind, write a subclass of `Kind` in `NAME/kind.py` beside
this file and list it below.
"""

from __future__ import annotations

from pipelines.prepare.kinds.actions.kind import Actions
from pipelines.prepare.kinds.kind import Kind
from pipelines.prepare.kinds.retrieval.kind import Retrieval
from pipelines.prepare.kinds.search.kind import Search

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (Retrieval(), Search(), Actions())
}
