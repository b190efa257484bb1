"""Read the pages for users: their sections, links, code blocks and commands."""

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
    """A command of a code block, joined with its continuation lines."""

    words: tuple[str, ...]
    """Words as the shell splits them, without comments."""
    has_prompt: bool
    """Whether the line begins with `$`; its output may follow."""

    def __str__(self) -> str:
        return shlex.join(self.words)


def read_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the content of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def read_commands(text: str) -> list[Command]:
    """Return the commands of all blocks, in their order."""
    commands = []
    for language, content in read_blocks(text):
        if language in ("python", "yaml"):
            continue
        for line in re.sub(r"\\\n\s*", "", content).splitlines():
            has_prompt = line.startswith("$ ")
            line = line.removeprefix("$ ")
            if line.startswith(("python ", "export ", "ray job submit")):
                words = tuple(shlex.split(line, comments=True))
                commands.append(Command(words, has_prompt))
    return commands


def read_section(text: str, title: str) -> str:
    """Return the text below a heading, up to the next heading of its level or above."""
    lines, level, is_code = [], 0, False
    for line in text.splitlines(keepends=True):
        is_code ^= line.startswith("```")
        heading = None if is_code else re.match(r"(#+) (.*)", line)
        if heading and level and len(heading[1]) <= level:
            break
        if level:
            lines.append(line)
        elif heading and heading[2] == title:
            level = len(heading[1])
    assert lines, f"there is no section '{title}'"
    return "".join(lines)


def parse_jobs(command: Command) -> list[tuple[str, list[str]]]:
    """Return the module and the options of a command's `python -m`, if it has one.

    It may also come after `ray job submit ... --`.
    """
    words = list(command.words)
    if "-m" not in words or (words[0] != "python" and "--" not in words):
        return []
    position = words.index("-m")
    return [(words[position + 1], words[position + 2 :])]


def remove_blocks(text: str) -> str:
    """Return the text without its fenced blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def read_links(text: str) -> list[str]:
    """Return the targets of links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", remove_blocks(text))


def read_anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes for the headings."""
    headings = re.findall(r"^#+ (.*)$", remove_blocks(text), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }
