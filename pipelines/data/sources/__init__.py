"""One file per raw log layout; `load_source` reads a source file such as `jobs/configs/sources/NAME.yaml`."""

from pipelines.data.sources.base import Block, Source
from pipelines.data.sources.load import load_source

__all__ = ["Block", "Source", "load_source"]
