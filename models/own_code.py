"""Models, tokenizers and metrics in files of the user's own.

    python -m jobs.train --model.name my_file.py:MyModel ...

The file runs as a module. The name of the class becomes `my_file.py@HASH:MyModel`, with
the start of the hash of the file, and its key `my_file.py@HASH`. Workers get the source
with the config. A checkpoint contains the files of its model, and another process runs
them only if its user names equal files or trusts the checkpoint. A checkpoint cannot
name a file to run.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import BeforeValidator

from core.errors import UserError
from core.files import storage_errors

SOURCES: dict[str, str] = {}
"""Source of each file that runs in this process, by key."""


IMPORT = re.compile(r"^(\s*(?:from|import) )(core|models)(?=\.\w| import)", re.M)


def move_imports(source: str, prefix: str) -> str:
    """Return a source that imports `core` and `models` from a package, `prefix`."""
    return IMPORT.sub(rf"\1{prefix}\2", source)


def run_file(name: str) -> str:
    """Run the file in a name that the user gives, and return the name of the class."""
    file, _, class_name = name.rpartition(":")
    if not file or file in SOURCES:
        return name
    with storage_errors(file):
        source = Path(file).read_text()
    return f"{_run(file, source)}:{class_name}"


def _run(file: str, source: str) -> str:
    """Run a source once, and return its key."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    key = f"{Path(file).name.partition('@')[0]}@{digest}"
    if key not in SOURCES:
        module = ModuleType(f"own_code_{digest}")
        sys.modules[module.__name__] = module
        code = move_imports(source, __name__.removesuffix("models.own_code"))
        exec(compile(code, file, "exec"), vars(module))
        SOURCES[key] = source
    return key


def find_class(name: str, what: str = "class", attribute: str = "__name__") -> Any:
    """Return a class of a file that runs in this process.

    Args:
        name: `KEY:CLASS`.
        what: Kind of class that is wanted, for the message.
        attribute: Attribute that every class of this kind has.
    """
    key, _, class_name = name.rpartition(":")
    if key not in SOURCES:
        raise UserError(f"'{name}' is in no file that may run here", "code")
    module = sys.modules[f"own_code_{key.rpartition('@')[2]}"]
    found = vars(module).get(class_name)
    if not hasattr(found, attribute):
        raise UserError(f"{name} is not a {what}")
    return found


def find_sources(model: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources, by key, that a model's name and config name."""
    return {key: source for key, source in SOURCES.items() if f"{key}:" in str(model)}


def accept_code(code: Mapping[str, str], uri: str, trust: bool) -> None:
    """Run the code of a checkpoint whose classes can then be found.

    Args:
        code: Sources by key.
        uri: Folder of the checkpoint, for the message.
        trust: Whether to run sources that this process does not run already.
    """
    for key, source in code.items():
        if SOURCES.get(key) != source:
            if not trust:
                raise UserError(f"{uri} has code of its own: {key}", "code")
            _run(key, source)


def pickle_with_code(value: Any) -> tuple[Any, ...]:
    """Pickle a value after the user's own code, for its method `__reduce__`.

    Ray passes it from the driver to the workers of its job.
    """
    return _unpickle, (SOURCES, pickle.dumps((type(value), vars(value))))


def _unpickle(code: Mapping[str, str], content: bytes) -> Any:
    """Run the user's own code, and return the value that needs it."""
    accept_code(code, "", trust=True)
    value_class, fields = pickle.loads(content)
    value = object.__new__(value_class)
    vars(value).update(fields)
    return value


def name_metric(name: str) -> str:
    """Return the name of a metric: `hit_rate@10` for `my_file.py:HitRate`."""
    if ":" not in name:
        return name
    from models.metrics.metric import TOP

    return f"{find_class(run_file(name), 'metric', 'is_printed').name}@{TOP}"


MetricName = Annotated[str, BeforeValidator(name_metric)]
"""Type of the name of a metric."""
