"""Check the budgets of size.yaml: tokens of Python per folder. `make size` prints them."""

import io
import tokenize
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
COUNTED = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)


def count_tokens(file: Path) -> int:
    """Count names, numbers, strings and operators; a docstring is one string."""
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    return sum(token.type in COUNTED for token in tokens)


def test_every_folder_is_within_its_budget():
    """A file counts for the longest of its folders that size.yaml names."""
    budgets: dict[str, int] = yaml.safe_load((ROOT / "size.yaml").read_text())
    sizes = dict.fromkeys(budgets, 0)
    for top in {folder.split("/")[0] for folder in budgets}:
        for file in (ROOT / top).rglob("*.py"):
            names = [
                str(parent.relative_to(ROOT))
                for parent in file.parents[:-1]
                if parent.is_relative_to(ROOT)
            ]
            sizes[next(name for name in names if name in budgets)] += count_tokens(file)
    rows = [
        f"{size:>9,} of {budgets[name]:>9,}  {name}" for name, size in sizes.items()
    ]
    tests = sum(size for name, size in sizes.items() if name.startswith("tests"))
    print(*rows, f"source {sum(sizes.values()) - tests:,}, tests {tests:,}", sep="\n")
    assert {n: s for n, s in sizes.items() if s > budgets[n]} == {}
