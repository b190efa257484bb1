"""The rules of the house: who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "pipelines", "tuning", "jobs", "benchmarks", "papers")
ALLOWED = {
    "models": {"models"},
    "pipelines": {"models", "pipelines"},
    "tuning": {"models", "pipelines", "tuning"},
    "jobs": {"models", "pipelines", "tuning", "jobs"},
    "benchmarks": {*PACKAGES} - {"papers"},
    "papers": {*PACKAGES},
}
FORBIDDEN = {"models": {"ray", "mlflow", "polars"}}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(source: str) -> set[str]:
    """Top-level names that a module imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_flow(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    found = imports(path.read_text())
    assert found & set(PACKAGES) <= ALLOWED[package]
    assert not found & FORBIDDEN.get(package, set())


def test_a_forbidden_import_is_seen() -> None:
    assert imports("def f():\n    import ray.data\n    from jobs.cli import main") == {
        "ray",
        "jobs",
    }


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, known: set[str]) -> set[str]:
    """The modules of this project that a file imports anywhere: in functions and for
    types too.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {
                node.module
            }
    return found & known


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, or none."""
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if found := walk(other, [*way, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := walk(module, []))), [])


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {module_of(path): path for path in FILES}
    assert (
        circle(
            {
                name: imported(path, set(modules)) - {name}
                for name, path in modules.items()
            }
        )
        == []
    )


def test_a_circle_is_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
