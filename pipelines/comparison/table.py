"""A table to be printed: columns aligned for the terminal, or whole as Markdown or HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape


def percent(change: float | None) -> str:
    """A relative change; nothing where there is none, - where it is not a number."""
    if change is None:
        return ""
    return (
        "-"
        if math.isnan(change)
        else f"{change:+.1%}"
        if abs(change) >= 0.01
        else f"{change:+.2%}"
    )


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
        widths = [
            max(len(line[i]) for line in [self.header, *self.cells])
            for i in range(len(self.header))
        ]

        def line(cells: Iterable[str]) -> str:
            aligned = [
                c.ljust(w) if i < self.words else c.rjust(w)
                for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            ]
            return "  ".join(aligned).rstrip()

        rule = "-" * len(line(self.header).ljust(sum(widths) + 2 * (len(widths) - 1)))
        return "\n".join(
            [self.title, line(self.header), rule, *map(line, self.cells), *self.notes]
        )

    def markdown(self) -> str:
        """As a Markdown table with the notes below."""
        align = ["---"] * self.words + ["---:"] * (len(self.header) - self.words)
        lines = [
            self.header,
            align,
            *([cell.replace("|", "\\|") for cell in row] for row in self.cells),
        ]
        body = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        notes = "".join(f"\n{note}\n" for note in self.notes)
        return f"### {self.title}\n\n{body}\n{notes}"

    def html(self) -> str:
        """As an HTML section with its heading."""

        def line(cells: Iterable[str], tag: str) -> str:
            kinds = [""] * self.words + [" class=number"] * (
                len(self.header) - self.words
            )
            return "<tr>" + "".join(
                f"<{tag}{k}>{escape(c)}" for c, k in zip(cells, kinds, strict=True)
            )

        body = "\n".join(line(cells, "td") for cells in self.cells)
        notes = "".join(f"<li>{escape(note)}" for note in self.notes)
        return (
            f"<section><h2>{escape(self.title)}</h2>\n<div class=wide><table>\n"
            f"<thead>{line(self.header, 'th')}</thead>\n<tbody>\n{body}\n</tbody></table></div>\n"
            + (f"<ul class=notes>{notes}</ul>" if notes else "")
            + "</section>"
        )
