"""SQLite waits its turn: how long MLflow's connections to a SQLite store wait while another process, such as a backup,
holds it.

Python's own limit is 5 s and MLflow sets 20 s at the start of every session, so a longer lock raises in every writer.
"""

from __future__ import annotations

import os
import sqlite3
from typing import Any

from sqlalchemy import Engine, Pool, event

TIMEOUT = "TRIELINE_SQLITE_TIMEOUT_S"
"""Environment variable with the seconds that a locked store is waited for; 300 where it is not set."""


def timeout() -> float:
    """Seconds that a locked store is waited for."""
    return float(os.environ.get(TIMEOUT, "300"))


def _pragma() -> str:
    return f"PRAGMA busy_timeout = {int(1000 * timeout())}"


@event.listens_for(Pool, "connect")
def _connected(connection: Any, record: Any) -> None:
    """Before MLflow's first session, when it looks whether its tables are there."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute(_pragma())


@event.listens_for(Engine, "before_cursor_execute", retval=True)
def _executed(
    connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> tuple[str, Any]:
    """Our limit in the place of the one that MLflow sets."""
    return _pragma() if statement.startswith("PRAGMA busy_timeout") else statement, parameters
