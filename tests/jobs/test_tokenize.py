"""The command line of jobs.tokenize: options, last lines, one-line errors."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from jobs import tokenize as job
from models.retrieval.tokenizers.config import RqkmeansConfig
from models.storage.tables import (
    UserError,
    commit,
    read_manifest,
    read_table,
    write_part,
)
from pipelines.data.schemas import items_schema
from pipelines.data.sids.config import TokenizerConfig


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    return write_items(
        tmp_path, [f"thing {i % 4} of kind {i % 5} made by {i % 3}" for i in range(40)]
    )


def write_items(tmp_path: Path, texts: list[str | None]) -> Path:
    uri = str(tmp_path / "tables" / "items")
    Path(uri).mkdir(parents=True)
    schema = items_schema(["title"])
    ids = pa.array([str(i) for i in range(100, 100 + len(texts))])
    columns = [
        pa.array(range(len(texts)), pa.int32()),
        ids,
        pa.array(texts, pa.string()),
    ]
    commit(
        uri,
        "items",
        schema,
        [write_part(uri, pa.Table.from_arrays(columns, schema=schema))],
        config={},
        inputs={},
    )
    return tmp_path / "tables"


def parse(*words: str) -> job.Config:
    import jobs.cli

    return jobs.cli.parse(job.Config, list(words))


def test_nested_options_reach_the_tokenizer(tables: Path, tmp_path: Path) -> None:
    common = ["--tables", str(tables), "--output", str(tmp_path / "sids")]
    config = parse(
        *common,
        "--tokenizer",
        "rqvae",
        "--rqvae.epochs",
        "3",
        "--rqvae.hidden",
        "[8, 4]",
        "--overwrite",
    )
    assert (config.rqvae.epochs, config.rqvae.hidden, config.overwrite) == (
        3,
        [8, 4],
        True,
    )
    assert config.rqvae.codebook_size == 256
    assert config.sids_config().relevant_settings()["rqvae"]["epochs"] == 3


def test_run_says_what_was_made_where_and_what_is_next(
    ray_local: None, tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "sids")
    words = [
        "--tables",
        str(tables),
        "--output",
        output,
        "--tokenizer",
        "rqkmeans",
        "--encoder",
        "tfidf",
    ]
    config = parse(*words, "--rqkmeans.codebook_size", "8", "--rqkmeans.levels", "2")
    job.run(config)
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-2].startswith(f"made {output}")
    assert lines[-1].startswith(
        f"next: python -m jobs.train --config jobs/configs/tiger_small.yaml --tables {tables}"
    )
    assert f"--sids {output}" in lines[-1]
    assert any(line.startswith("collision rate") for line in lines)
    assert not any(line.startswith("note: only") for line in lines)  # 5 items to a code
    job.run(config)
    assert f"nothing to do: {output} is up to date" in capsys.readouterr().out

    output = str(tmp_path / "many")
    job.run(
        parse(
            *words,
            "--output",
            output,
            "--rqkmeans.codebook_size",
            "16",
            "--rqkmeans.levels",
            "2",
        )
    )
    (said,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("note: only")
    ]
    used = read_manifest(f"{output}/sids", "sids").info["levels"][0]["used"]
    assert said.startswith(
        f"note: only {40 / used:.1f} items share a first code; below 4 a model learns little"
    )
    assert said.endswith("try --rqkmeans.codebook_size 8 --overwrite")

    items = read_manifest(str(tables / "items"))
    table = read_table(str(tables / "items"))
    more = pa.table(
        [[*range(40, 42)], ["new 1", "new 2"], ["thing 1", "thing 2"]],
        schema=table.schema,
    )
    parts = [write_part(str(tables / "items"), pa.concat_tables([table, more]))]
    commit(
        str(tables / "items"),
        "items",
        table.schema,
        parts,
        config={},
        inputs={},
        extends=[items.hash],
    )
    of_many = [
        "--output",
        output,
        "--rqkmeans.codebook_size",
        "16",
        "--rqkmeans.levels",
        "2",
    ]
    job.run(parse(*words, *of_many, "--extend", output))
    assert "2 items since the codebooks were trained" in capsys.readouterr().out


def test_too_few_items_are_said_before_ray_starts(tables: Path, tmp_path: Path) -> None:
    words = [
        "--tables",
        str(tables),
        "--output",
        str(tmp_path / "sids"),
        "--encoder",
        "tfidf",
    ]
    with pytest.raises(
        UserError,
        match=r"rqkmeans.codebook_size is 256, more than the 40 items of .*codebook_size 8$",
    ):
        job.run(parse(*words, "--tokenizer", "rqkmeans"))
    assert not (tmp_path / "sids").exists()


@pytest.mark.parametrize("size", ["2", "256"])
def test_a_catalogue_of_one_item_is_refused_as_such(tmp_path: Path, size: str) -> None:
    tables = write_items(tmp_path, ["green tea"])
    words = ["--tables", str(tables), "--output", str(tmp_path / "sids")]
    words += ["--encoder", "tfidf", "--tokenizer", "rqkmeans"]
    with pytest.raises(UserError, match="has 1 item, and semantic IDs need 2 or more"):
        job.run(parse(*words, "--rqkmeans.codebook_size", size))


def test_the_advice_on_codebooks_is_smaller_than_what_is_set() -> None:
    config = TokenizerConfig("rqkmeans", rqkmeans=RqkmeansConfig(codebook_size=2))
    assert config.describe_sparse_codes(num_items=3, num_first_codes=2) is None
    config = TokenizerConfig("rqkmeans", rqkmeans=RqkmeansConfig(codebook_size=4))
    assert "codebook_size 2" in str(
        config.describe_sparse_codes(num_items=9, num_first_codes=4)
    )


def test_items_without_text_are_said_before_ray_starts(tmp_path: Path) -> None:
    tables = write_items(
        tmp_path, ["green tea", None, " \u00a0\t", "", *(f"tea {n}" for n in range(36))]
    )
    words = [
        "--tables",
        str(tables),
        "--output",
        str(tmp_path / "sids"),
        "--tokenizer",
        "rqkmeans",
    ]
    said = r"3 of 40 items have no text in title; use a template with more columns"
    for encoder in ("minilm", "tfidf"):
        with pytest.raises(UserError, match=f"^{said}"):
            job.run(
                parse(
                    *words,
                    "--encoder",
                    encoder,
                    "--rqkmeans.codebook_size",
                    "8",
                    "--embed.empty",
                    "error",
                )
            )


def test_published_sids_are_imported_and_a_gap_leaves_the_old_ones(
    tables: Path, tmp_path: Path
) -> None:
    published = tmp_path / "sids.csv"
    rows = [f"{i},{i % 7},{i // 7}" for i in range(100, 140)]
    published.write_text("\n".join(["item_id,c1,c2", *rows]))
    output = str(tmp_path / "out")
    words = [
        "--tables",
        str(tables),
        "--output",
        output,
        "--tokenizer",
        "published",
        "--published",
        str(published),
    ]
    job.run(parse(*words))
    published.write_text("\n".join(["item_id,c1,c2", *rows[5:]]))
    with pytest.raises(
        UserError, match=r"none for 5 of the catalogue's 40 \(such as '100'\)"
    ):
        job.run(parse(*words, "--overwrite"))
    assert (
        read_manifest(output + "/trie", "trie").info["items"] == 40
    )  # the old SIDs are as they were
