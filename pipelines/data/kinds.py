"""All kinds of request, by name.

To add a kind, write a subclass of `Kind` in `pipelines/data/NAME/kind.py` and list it
below.
"""

from __future__ import annotations

from pipelines.data.actions.kind import Actions
from pipelines.data.kind import Kind
from pipelines.data.retrieval.kind import Retrieval
from pipelines.data.search.kind import Search

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (Retrieval(), Search(), Actions())
}
