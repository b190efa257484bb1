"""Rules on files: whole, as listed, and made from each other."""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pyarrow.parquet as pq

from models.tables import Part, join, open_uri
from pipelines.data.audit.base import Rule, Tables


def check_files(tables: Tables, rule: Rule) -> None:
    """Every listed file is there, whole, and has the columns that the rules read."""
    for table, required in tables.kind.required.items():
        for part in tables.manifests[table].files:
            rule.rows += 1
            listed = {column["name"]: column["type"] for column in tables.manifests[table].schema}
            wrong = _wrong_with(join(tables.uri, table, part.path), part, listed | required)
            if wrong:
                rule.broken(1, [f"{table}/{part.path}: {wrong}"])


def _wrong_with(uri: str, part: Part, columns: dict[str, str]) -> str:
    """What is wrong with one file that must have these columns, or ''."""
    filesystem, path = open_uri(uri)
    sha256 = hashlib.sha256()
    size = 0
    try:
        with filesystem.open_input_stream(path) as stream:
            while chunk := stream.read(1 << 22):
                sha256.update(chunk)
                size += len(chunk)
        if size != part.bytes:
            return f"{size} bytes, the manifest says {part.bytes}"
        if sha256.hexdigest() != part.sha256:
            return "its sha256 is not the manifest's"
        with filesystem.open_input_file(path) as file:
            content = pq.ParquetFile(file)
            rows, schema = content.metadata.num_rows, content.schema_arrow
    except FileNotFoundError:
        return "missing"
    except (pa.ArrowInvalid, OSError) as error:
        return f"not readable ({str(error).splitlines()[0]})"
    if rows != part.rows:
        return f"{rows} rows, the manifest says {part.rows}"
    for name, kind in columns.items():
        if name not in schema.names:
            return f"no column {name}"
        found = str(schema.field(name).type)
        if _plain(found) != _plain(kind):
            return f"column {name} is {found}, not {kind}"
    return ""


def _plain(kind: str) -> str:
    """A type as text; Parquet files and schemas name the values of a list differently."""
    return kind.replace("element:", "item:")


def check_inputs(tables: Tables, rule: Rule) -> None:
    """The hashes that tables were made from are those of the tables beside them."""
    made_from = [("items", "events"), ("sequences", "events"), ("sequences", "items")]
    own = [name for name in tables.manifests if name not in ("events", "items", "sequences")]  # of this kind alone
    for made, name in [*made_from, *((name, "events") for name in own), *(("sequences", name) for name in own)]:
        rule.rows += 1
        recorded, here = tables.manifests[made].inputs.get(name), tables.manifests[name].hash
        if recorded != here:
            rule.broken(1, [f"{made} were made from {name} {str(recorded)[:12]}, this folder holds {here[:12]}"])
