"""Secrets in URIs: none survives masking, nothing else changes, and what was hidden is found again."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import uri
from models.uri import hide, masked, real

SCHEMES = ("https", "http", "s3", "postgresql", "mysql+pymysql", "gs", "abfs")
NAMES = (
    "access_key", "secret_key", "token", "password", "sig", "X-Amz-Signature", "X-Amz-Credential", "AWSAccessKeyId",
    "session_token", "accessKey", "ACCOUNT_KEY", "api-key", "access%5Fkey", "client_secret", "user", "sas_token",
)  # fmt: skip
PLAIN = ("endpoint_override", "region", "scheme", "keepalives", "sslmode", "max_tries", "monkey")

secrets = st.text(string.ascii_letters + string.digits + "%@:/?#&=+;!$'()* ", min_size=1).map(lambda s: f"S3CR{s}ET")
words = st.text(string.ascii_lowercase, min_size=1, max_size=6)
around = st.sampled_from([("", ""), ("cannot open ", ": refused"), ("--uri=", ""), ("['", "', 2]"), ('{"a": "', '"}')])


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uri, "_known", [])
    monkeypatch.setattr(uri, "tell", lambda known: None)  # an earlier test may have joined a job of Ray
    monkeypatch.setattr(uri, "ask", tuple)


@st.composite
def with_secrets(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A URI with a user, parameters or both, and its secrets as they stand in it."""
    hidden = [quote(secret, safe="") for secret in draw(st.lists(secrets, min_size=2, max_size=4))]
    user = draw(st.sampled_from(["", "{}@", "{}:{}@", ":{}@"])) if len(hidden) > 2 else "{}:{}@"
    count = user.count("{}")
    uri = f"{draw(st.sampled_from(SCHEMES))}://{user.format(*hidden)}{draw(words)}:5000/{draw(words)}"
    parameters = list(zip(draw(st.permutations(NAMES)), hidden[count:], strict=False))
    parameters += [(draw(st.sampled_from(PLAIN)), draw(words))]
    return f"{uri}?" + "&".join(f"{name}={value}" for name, value in draw(st.permutations(parameters))), hidden


@given(with_secrets(), around, st.integers(0, 2))
def test_no_secret_survives(made: tuple[str, list[str]], text: tuple[str, str], encoded: int) -> None:
    address, hidden = made
    for _ in range(encoded):
        address, hidden = quote(address, safe=""), [quote(secret, safe="") for secret in hidden]
    said = masked(f"{text[0]}{address}{text[1]}")
    for secret in hidden:
        assert secret not in said
    assert "S3CR" not in said
    assert said.startswith(text[0])
    assert masked(said) == said


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("https://me:secret@mlflow:5000", "https://***@mlflow:5000"),
        ("https://me:p@ss@mlflow/a@b", "https://***@mlflow/a@b"),
        ("s3://KEY:ab/c+d@bucket/x?region=eu", "s3://***@bucket/x?region=eu"),
        ("s3://KEY%3Aabc%40bucket/x", "s3://***@bucket/x"),
        ("postgresql://u:p@[::1]:5432/db", "postgresql://***@[::1]:5432/db"),
        ("http://h/x?next=https%3A%2F%2Fu%3Ap%40h2%2Fy&a=1", "http://h/x?next=https%3A%2F%2F***%40h2%2Fy&a=1"),
        ("http://h/x?next=%2Fy%3Ftoken%3Dabc", "http://h/x?next=%2Fy%3Ftoken%3D***"),
        ("http://h/x#access_token=abc&b=1", "http://h/x#access_token=***&b=1"),
        ("http://h/x?a=1&amp;token=abc&amp;b=2", "http://h/x?a=1&amp;token=***&amp;b=2"),
        ("http://u:p@h,http://v:q@h2 and s3://k:s@b", "http://***@h,http://***@h2 and s3://***@b"),
    ],
)
def test_what_is_masked(text: str, wanted: str) -> None:
    assert masked(text) == wanted


@given(
    st.sampled_from(SCHEMES), words, st.lists(st.text(string.ascii_letters + "@:.=-_~", min_size=1)),
    st.lists(st.tuples(st.sampled_from(PLAIN), words)),
)  # fmt: skip
def test_uris_without_secrets_are_unchanged(
    scheme: str, host: str, path: list[str], query: list[tuple[str, str]]
) -> None:
    parameters = "?" + "&".join(f"{name}={value}" for name, value in query) if query else ""
    address = f"{scheme}://{host}/{'/'.join(path)}{parameters}"
    assert masked(address) == address
    assert hide(address) == address
    assert real(address) == address


@pytest.mark.parametrize(
    "text",
    [
        r"C:\Users\me@home\runs", "C:/Users/me:x@home", "/home/me@work/token=5?sig=1", "runs/a b/password=x", "", "~/x",
        "sqlite:////home/me:x/a@b/mlflow.db", "file:///C:/me@work/x", "http://[::1]:5000/a@b", "models:/name@champion",
        "gs://anonymous@bucket/x", "http://host:5000/path/me@x?y=a@b", "50% of all: 1@2", "https://host?keepalives=1",
    ],
)  # fmt: skip
def test_paths_and_plain_texts_are_unchanged(text: str) -> None:
    assert masked(text) == text


@given(st.text())
def test_any_text_can_be_masked(text: str) -> None:
    once = masked(text)
    assert masked(once) == once
    if "://" not in text and "%" not in text:
        assert once == text


@dataclass
class _Options:
    storage: str
    more: dict[str, list[str]] = field(default_factory=dict)
    number: int = 1


def test_what_is_hidden_is_found_again_by_server_and_path() -> None:
    options = hide(
        _Options("s3://K:S@bucket/runs?secret_key=a%2Fb&region=eu", {"uris": ["https://me:pw@mlflow:5000", "runs/x"]})
    )
    assert options == _Options(
        "s3://***@bucket/runs?secret_key=***&region=eu", {"uris": ["https://***@mlflow:5000", "runs/x"]}
    )
    assert real("s3://***@bucket/runs/one/best?secret_key=***&region=eu") == (
        "s3://K:S@bucket/runs/one/best?secret_key=a%2Fb&region=eu"
    )
    assert real("https://***@mlflow:5000/") == "https://me:pw@mlflow:5000/"
    uri.remember("s3://K2:S2@bucket/tables")
    assert real("s3://***@bucket/tables/items") == "s3://K2:S2@bucket/tables/items"
    assert real("s3://***@bucket/runs/x") == "s3://K:S@bucket/runs/x"


def test_what_nobody_knows_is_left_out() -> None:
    """A scheme's own environment may have it."""
    uri._known.clear()
    assert real("s3://***@bucket/runs?secret_key=***&region=eu&token=***") == "s3://bucket/runs?region=eu"
    assert real("https://***@mlflow:5000?token=***") == "https://mlflow:5000"


@given(with_secrets())
def test_hidden_then_real_is_what_was_given(made: tuple[str, list[str]]) -> None:
    uri._known.clear()
    assert real(hide(made[0])) == made[0]
