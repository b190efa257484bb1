"""Test which packages import which, and that no imports form a cycle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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


def find_imported_packages(source: str) -> set[str]:
    """Return the top-level packages that code imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_import_only_lower_ones(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    imported = find_imported_packages(path.read_text())
    above = PACKAGES[PACKAGES.index(package) + 1 :]
    assert not imported & {*above, *FORBIDDEN.get(package, ())}


@pytest.mark.parametrize(("number", "room"), enumerate(ROOMS))
def test_rooms_of_pipelines_import_only_lower_ones(number: int, room: str) -> None:
    modules = {get_module_name(path) for path in FILES}
    above = {f"pipelines.{name}" for name in ROOMS[number + 1 :]}
    for path in (ROOT / "pipelines" / room).rglob("*.py"):
        imported = find_imported_modules(path, modules)
        assert not {".".join(name.split(".")[:2]) for name in imported} & above, path


def test_an_import_inside_a_function_is_found() -> None:
    source = "def f():\n    import ray.data\n    from jobs.cli import main"
    assert find_imported_packages(source) == {"ray", "jobs"}


def get_module_name(path: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of this project that a file imports.

    Imports inside functions and for types count too.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names & modules


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one cycle of imports, or an empty list."""
    without_cycle: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in without_cycle:
            return []
        for imported in sorted(graph[module]):
            cycle = walk(imported, [*path, module])
            if cycle:
                return cycle
        without_cycle.add(module)
        return []

    for module in sorted(graph):
        cycle = walk(module, [])
        if cycle:
            return cycle
    return []


def test_imports_form_no_cycle() -> None:
    paths = {get_module_name(path): path for path in FILES}
    graph = {
        name: find_imported_modules(path, set(paths)) - {name}
        for name, path in paths.items()
    }
    assert find_cycle(graph) == []


@pytest.mark.parametrize("folder", ["pipelines.prepare", "models.retrieval"])
def test_folders_of_a_room_form_no_cycle(folder: str) -> None:
    """Files beside the folders count as folders of their own."""
    paths = {get_module_name(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        if name.startswith(f"{folder}."):
            imported = find_imported_modules(path, set(paths))
            rooms = {other.split(".")[2] for other in imported if folder + "." in other}
            room = name.split(".")[2]
            graph[room] = (graph.get(room, set()) | rooms) - {room}
    assert len(graph) > 8
    assert find_cycle(graph) == []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def find_strings(path: Path) -> Iterator[str]:
    """Yield the constants of a file that are not docstrings, as text."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and node not in docstrings:
            yield str(node.value)


def test_code_below_the_jobs_names_hardly_a_command_or_option() -> None:
    below = [path for path in FILES if path.relative_to(ROOT).parts[0] in PACKAGES[:4]]
    named = [m for path in below for s in find_strings(path) for m in NAMED.findall(s)]
    assert 0 < len(named) <= 10, named
