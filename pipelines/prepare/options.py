"""Options of jobs.simulate and jobs.prepare: where to write, over other settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.dataclasses import dataclass

from core.options import STRICT, Folder, as_base, build, check_keys, merge
from pipelines.prepare.kinds.simulation import Settings
from pipelines.prepare.reading.log import load_source
from pipelines.prepare.settings.config import PrepareConfig


@dataclass(config=STRICT, kw_only=True)
class PrepareOptions(PrepareConfig):
    """Options of jobs.prepare; settings of the tables override the source file's."""

    source: str
    """YAML file that describes the raw log, such as jobs/configs/sources/NAME.yaml."""
    input: Folder
    """Folder of the raw log: a local path, s3:// or gs://."""
    output: Folder
    """Folder for the tables."""
    overwrite: bool = False
    """Replace existing tables."""
    append: bool = False
    """Add new files of events to existing tables; items keep their indices."""
    dry_run: bool = False
    """Read the first rows of the log, print the resulting events, and exit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.append and (self.overwrite or self.catalogue):
            other = "overwrite" if self.overwrite else "catalogue"
            raise ValueError(
                f"append and {other} are both given; append keeps the tables and their "
                "items"
            )

    @property
    def settings(self) -> PrepareConfig:
        """Settings of the tables."""
        return as_base(self, PrepareConfig)


def build_options(content: Mapping[str, Any], prefix: str = "") -> PrepareOptions:
    """Build options over the settings in the section `prepare` of the source file.

    Args:
        content: Values by option.
        prefix: Prefix of keys in messages.
    """
    source = content.get("source")
    defaults = load_source(source)[1] if source else {}
    check_keys(PrepareConfig, defaults, "prepare.")
    return build(PrepareOptions, merge(defaults, content), prefix)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SimulateOptions(Settings):
    """Options of jobs.simulate: where to write the log, its size, seed and causes."""

    output: Folder
    """Folder for the log: new, empty, or with an earlier simulated log, which is
    replaced."""
    kind: str = "retrieval"
    """`retrieval`: one item per event. `search`: searches with a query, ten results,
    clicks, purchases and dwell. `actions`: impressions of a feed with
    likes, comments, shares, follows, hides and dwell of dog and cat users."""
