"""The one table of kinds of request: name -> all that differs between them.

A new kind is a folder beside this file, whose `kind.py` names its parts, and a row here.
"""

from __future__ import annotations

from pipelines.data.kinds.actions.kind import ACTIONS
from pipelines.data.kinds.base import RequestKind
from pipelines.data.kinds.retrieval.kind import RETRIEVAL
from pipelines.data.kinds.search.kind import SEARCH

KINDS: dict[str, RequestKind] = {kind.name: kind for kind in (RETRIEVAL, SEARCH, ACTIONS)}
