"""Test which packages import which, and that no imports form a cycle."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "core",
    "models",
    "pipelines",
    "tuning",
    "trieline",
    "jobs",
    "benchmarks",
    "papers",
)
"""Packages from the ground floor up; each imports only itself and lower ones."""
ROOMS = (
    "prepare",
    "encode",
    "tracking",
    "serving",
    "training",
    "evaluation",
    "comparison",
)
"""Rooms of `pipelines` from the lowest up; they share the modules beside them."""
NAMED = re.compile(r"\bjobs\.[a-z]|(?<!\w)--[a-z]\w*(?![\w:)])")
"""A command or an option of one, but not a variable of CSS."""
FORBIDDEN = {"core": {"torch", "ray", "mlflow"}, "models": {"ray", "mlflow", "polars"}}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def find_imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports, also inside functions and for types."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def get_module_name(path: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {get_module_name(path): path for path in FILES}
IMPORTS = {name: find_imports(path) & {*MODULES} for name, path in MODULES.items()}
"""Modules of this project that each module imports."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_import_only_lower_ones(path):
    package = path.relative_to(ROOT).parts[0]
    imported = {name.split(".")[0] for name in find_imports(path)}
    above = PACKAGES[PACKAGES.index(package) + 1 :]
    assert not imported & {*above, *FORBIDDEN.get(package, ())}


@pytest.mark.parametrize(("number", "room"), enumerate(ROOMS))
def test_rooms_of_pipelines_import_only_lower_ones(number, room):
    above = {f"pipelines.{name}" for name in ROOMS[number + 1 :]}
    for module, imported in IMPORTS.items():
        if module.startswith(f"pipelines.{room}"):
            rooms = {".".join(name.split(".")[:2]) for name in imported}
            assert not rooms & above, module


def check_no_cycle(graph: dict[str, set[str]]) -> None:
    """Raise CycleError, which names the cycle, if a graph has one."""
    TopologicalSorter({name: graph[name] - {name} for name in graph}).prepare()


def test_imports_form_no_cycle():
    check_no_cycle(IMPORTS)


@pytest.mark.parametrize("folder", ["pipelines.prepare", "models.retrieval"])
def test_folders_of_a_room_form_no_cycle(folder):
    """Files beside the folders count as folders of their own."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, imported in IMPORTS.items():
        if name.startswith(f"{folder}."):
            rooms = {other.split(".")[2] for other in imported if folder + "." in other}
            graph[name.split(".")[2]] |= rooms
    assert len(graph) > 8
    check_no_cycle(graph)


def find_strings(path: Path) -> Iterator[str]:
    """Yield the constants of a file that are not docstrings, as text."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and node not in docstrings:
            yield str(node.value)


def test_code_below_the_jobs_names_hardly_a_command_or_option():
    below = [path for path in FILES if path.relative_to(ROOT).parts[0] in PACKAGES[:4]]
    named = [m for path in below for s in find_strings(path) for m in NAMED.findall(s)]
    assert 0 < len(named) <= 10, named
