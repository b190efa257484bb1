"""Text files that are not UTF-8: read as UTF-8 while they stream, and what a file seems to be that is not what it says.

files: log.csv
encoding: cp1252
"""

from __future__ import annotations

import codecs
import re
from encodings.aliases import aliases
from typing import Any

import pyarrow as pa

from models.config import nearest
from models.tables import UserError, open_uri

LIKELY = ("utf-8", "cp1252", "gb18030", "utf-16", "shift_jis", "latin-1")
"""Encodings to suggest."""
MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8"}
LOOKED_AT = 8 << 20  # bytes of a file in which its encoding is looked for


def check_encoding(encoding: str | None, where: str = "") -> str | None:
    """The codec's own name, or None for UTF-8, which needs none. ValueError for one that Python does not have."""
    if encoding is None:
        return None
    try:
        codec = codecs.lookup(encoding)
    except LookupError:
        near = nearest(encoding.lower(), sorted({*aliases, *LIKELY}))
        raise ValueError(
            f"'{where}encoding' is '{encoding}', which is no encoding of Python's; the nearest is '{near}', and likely "
            f"ones are {', '.join(LIKELY)}"
        ) from None
    if not codec._is_text_encoding:
        raise ValueError(
            f"'{where}encoding' is '{encoding}', which is not of text; likely ones are {', '.join(LIKELY)}"
        )
    return None if codec.name in ("utf-8", "utf-8-sig") else codec.name


def open_text(uri: str, encoding: str | None) -> Any:
    """The file's text as a stream of UTF-8, decompressed by its suffix. Reads raise UnicodeDecodeError where it is
    not of the encoding; None: UTF-8 is not decoded here."""
    filesystem, path = open_uri(uri)
    stream = filesystem.open_input_stream(path)
    return pa.transcoding_input_stream(stream, encoding, "utf-8") if encoding else stream


def not_encoded(uri: str, encoding: str, row: int | None = None) -> UserError:
    """What to say of a file that is not of the encoding."""
    filesystem, path = open_uri(uri)
    with filesystem.open_input_stream(path) as stream:
        head = stream.read(LOOKED_AT)
    likely = [name for name in likely_encodings(head) if name != encoding]
    where = ""
    if row is not None:
        line = _line_of_mistake(head)
        where = f" in line {line:,}" if line else f" in row {row:,} (counted from 0)"
    name = "UTF-8" if encoding == "utf-8" else encoding
    remedy = f"set 'encoding: {likely[0]}' beside its 'files' in the source file" if likely else "set its 'encoding'"
    others = f" (or {', '.join(likely[1:])})" if likely[1:] else ""
    return UserError(f"{uri} is not {name}{where}; {remedy}{others}, or convert it to UTF-8")


def likely_encodings(head: bytes) -> list[str]:
    """The encodings that the beginning of a file may be of, the likeliest first."""
    for mark, name in MARKS.items():
        if head.startswith(mark):
            return [name]
    if wide(head):
        return ["utf-16-le" if head[1:2] == b"\0" else "utf-16-be"]
    sample = _around_first_mistake(head)
    fits = [name for name in LIKELY if name != "utf-16" and _decodes(sample, name)]
    runs = [len(run) for run in re.findall(rb"[\x80-\xff]+", sample)]
    # Accents of Europe stand alone among ASCII letters; Chinese characters come in runs of two bytes each.
    if sum(length == 1 for length in runs) * 2 < len(runs) and "gb18030" in fits:
        fits.sort(key=lambda name: name != "gb18030")
    if "utf-8" in fits:
        fits.sort(key=lambda name: name != "utf-8")
    return fits[:3]


def _line_of_mistake(head: bytes) -> int | None:
    """The first line, from 1, that is not UTF-8; None if it is behind this beginning of the file."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        if len(head) < LOOKED_AT or error.start < len(head) - 4:  # a character may be cut at the end
            return head.count(b"\n", 0, error.start) + 1
    return None


def wide(head: bytes) -> bool:
    """Whether it looks like characters of two bytes, as of UTF-16: columns, digits and line ends have a NUL each. A few
    NULs are characters of ids."""
    return head.count(b"\0") * 20 > len(head)


def _around_first_mistake(head: bytes) -> bytes:
    """Some lines from the first that is not UTF-8; all of them if none is."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        start = head.rfind(b"\n", 0, error.start) + 1
        head = head[start : start + (1 << 16)]
    end = head.rfind(b"\n") + 1  # a character may be cut at the end
    return head[:end] or head


def _decodes(sample: bytes, name: str) -> bool:
    try:
        sample.decode(name)
    except UnicodeDecodeError:
        return False
    return True
