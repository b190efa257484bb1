"""Test URIs: joined paths, and addresses that no file system has."""

from __future__ import annotations

import pytest

from core.errors import UserError
from core.files import join, open_uri


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://bucket/x?colour=red", "Unexpected query"),
        ("nowhere://host/x", "Unrecognized filesystem"),
    ],
)
def test_an_invalid_uri_is_refused(uri: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_uri(uri)


def test_paths_are_joined_before_the_query_of_a_uri() -> None:
    assert join("s3://b/a?region=eu", "b", "c.json") == "s3://b/a/b/c.json?region=eu"
    assert join("runs/a?b", "c") == "runs/a?b/c"
