"""The table of kinds of request.

A new kind is a folder beside this file, whose `kind.py` holds its class, and a row
here.
"""

from __future__ import annotations

from pipelines.data.actions.kind import Actions
from pipelines.data.kind import Kind
from pipelines.data.retrieval.kind import Retrieval
from pipelines.data.search.kind import Search

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (Retrieval(), Search(), Actions())
}
