"""A table of a comparison as text for the terminal, as Markdown, and as HTML.

table = Table("retrieval/x", ["model", "test/ndcg@10"], [["sasrec", "0.0662"]])
print(table.text())
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

NBSP = "\u00a0"
"""No-break space."""


def percent(change: float | None) -> str:
    """Format a relative change as `+1.5%`; None gives an empty string, and NaN `-`.

    Changes below 1% have two decimals.
    """
    if change is None:
        return ""
    if math.isnan(change):
        return "-"
    return f"{change:+.1%}" if abs(change) >= 0.01 else f"{change:+.2%}"


@dataclass
class Table:
    """A table of text cells with a title, a header and notes."""

    title: str
    """Heading."""
    header: list[str]
    """Names of the columns."""
    cells: list[list[str]]
    """Rows of cells."""
    notes: list[str] = field(default_factory=list)
    """Notes below the table."""
    num_words: int = 2
    """Number of leading columns with words, which are aligned left; the columns after
    them have numbers and are aligned right."""

    def text(self) -> str:
        """Render the table for the terminal, with aligned columns."""
        rows = [self.header, *self.cells]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        header, *body = (self._align(row, widths) for row in rows)
        return "\n".join([self.title, header, rule, *body, *self.notes])

    def _align(self, row: list[str], widths: list[int]) -> str:
        """Return a row as a line of padded cells."""
        words = zip(row[: self.num_words], widths[: self.num_words], strict=True)
        numbers = zip(row[self.num_words :], widths[self.num_words :], strict=True)
        padded = [cell.ljust(width) for cell, width in words]
        padded += [cell.rjust(width) for cell, width in numbers]
        return "  ".join(padded).rstrip()

    def markdown(self) -> str:
        """Render the table as Markdown, with the notes below."""
        num_numbers = len(self.header) - self.num_words
        rows = [
            [escape_markdown(cell) for cell in r] for r in (self.header, *self.cells)
        ]
        rows.insert(1, ["---"] * self.num_words + ["---:"] * num_numbers)
        body = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        notes = "".join(f"\n{escape_markdown(note)}\n" for note in self.notes)
        return f"### {escape_markdown(self.title)}\n\n{body}\n{notes}"

    def html(self) -> str:
        """Render the table as an HTML section with a heading."""
        header = self._html_row(map(break_header, self.header), "th")
        body = "\n".join(
            self._html_row(map(break_cell, row), "td") for row in self.cells
        )
        items = "".join(f"<li>{escape(note)}" for note in self.notes)
        notes = f"<ul class=notes>{items}</ul>" if self.notes else ""
        return (
            f"<section><h2>{escape(self.title)}</h2>\n<div class=wide><table>\n"
            f"<thead>{header}</thead>\n<tbody>\n{body}\n</tbody></table></div>\n"
            f"{notes}</section>"
        )

    def _html_row(self, cells: Iterable[str], tag: str) -> str:
        """Return a row of HTML cells as HTML; `tag` is `th` or `td`."""
        row = "<tr>"
        for column, cell in enumerate(cells):
            attribute = "" if column < self.num_words else " class=number"
            row += f"<{tag}{attribute}>{cell}"
        return row


def escape_markdown(text: str) -> str:
    """Return a text as one line of Markdown without HTML, links or new cells."""
    line = escape(" ".join(text.splitlines()), quote=False)
    return line.replace("|", "\\|").replace("](", "]\\(")


def break_header(name: str) -> str:
    """Return the name of a column as HTML that can be broken after slashes."""
    return escape(name).replace("/", "/<wbr>")


def break_cell(cell: str) -> str:
    """Return a cell as HTML that can be broken before `±` but not after it."""
    return escape(cell).replace(" ± ", f" ±{NBSP}")
