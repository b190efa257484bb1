"""Test URIs with a query."""

from core.files import join


def test_paths_are_joined_before_the_query_of_a_uri():
    assert join("s3://b/a?region=eu", "b", "c.json") == "s3://b/a/b/c.json?region=eu"
    assert join("runs/a?b", "c") == "runs/a?b/c"
