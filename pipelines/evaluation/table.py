"""A table to be printed: columns aligned for the terminal, or whole as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Table:
    """Cells with their header, and notes below."""

    title: str
    """Line above the table."""
    header: list[str]
    """Names of the columns."""
    cells: list[list[str]]
    """One list per row."""
    notes: list[str] = field(default_factory=list)
    """Lines under the table."""
    words: int = 2
    """Columns that are words, aligned left; the rest are numbers."""

    def text(self) -> str:
        """For the terminal: columns aligned."""
        widths = [max(len(line[i]) for line in [self.header, *self.cells]) for i in range(len(self.header))]

        def line(cells: Iterable[str]) -> str:
            aligned = [
                c.ljust(w) if i < self.words else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            ]
            return "  ".join(aligned).rstrip()

        rule = "-" * len(line(self.header).ljust(sum(widths) + 2 * (len(widths) - 1)))
        return "\n".join([self.title, line(self.header), rule, *map(line, self.cells), *self.notes])

    def markdown(self) -> str:
        """As a Markdown table with the notes below."""
        align = ["---"] * self.words + ["---:"] * (len(self.header) - self.words)
        lines = [self.header, align, *([cell.replace("|", "\\|") for cell in row] for row in self.cells)]
        body = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        notes = "".join(f"\n{note}\n" for note in self.notes)
        return f"### {self.title}\n\n{body}\n{notes}"
