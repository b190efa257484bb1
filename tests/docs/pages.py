"""The pages for users as tests read them: their sections, links, code and commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "jobs/configs/sources/README.md",
    ROOT / "deploy/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@dataclass(frozen=True)
class Command:
    """A line of a block, with those that it goes on in."""

    words: tuple[str, ...]
    """As the shell splits it, `#` and what follows left out."""
    typed: bool
    """Whether it stands behind a `$`, with what it prints."""

    def __str__(self) -> str:
        return shlex.join(self.words)


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[Command]:
    """Those of all blocks, in order, that begin with a program or a setting."""
    found = []
    for language, content in blocks(text):
        if language in ("python", "yaml"):
            continue
        for line in re.sub(r"\\\n\s*", "", content).splitlines():
            typed, line = line.startswith("$ "), line.removeprefix("$ ")
            if line.startswith(("python ", "export ", "ray job submit")):
                found.append(Command(tuple(shlex.split(line, comments=True)), typed))
    return found


def section(text: str, title: str) -> str:
    """What stands below the heading, up to the next one of its level or above."""
    found, level, fenced = [], 0, False
    for line in text.splitlines(keepends=True):
        fenced ^= line.startswith("```")
        heading = None if fenced else re.match(r"(#+) (.*)", line)
        if heading and level and len(heading[1]) <= level:
            break
        if level:
            found.append(line)
        elif heading and heading[2] == title:
            level = len(heading[1])
    assert found, f"there is no section '{title}'"
    return "".join(found)


def jobs_of(command: Command) -> list[tuple[str, list[str]]]:
    """(module, options) of the `python -m` in a command; that behind `ray job submit
    ... --` too.
    """
    words = list(command.words)
    if "-m" not in words or (words[0] != "python" and "--" not in words):
        return []
    at = words.index("-m")
    return [(words[at + 1], words[at + 2 :])]


def links(text: str) -> list[str]:
    """Targets of links and images."""
    return re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    )


def anchors(text: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$",
        re.sub(r"```.*?```", "", text, flags=re.DOTALL),
        flags=re.MULTILINE,
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }
