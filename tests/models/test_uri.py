"""URIs with a secret are rejected with a message that does not contain it; all others are
accepted.
"""

from __future__ import annotations

import string
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.storage.uri import UserError, refuse_secrets

SCHEMES = ("https", "http", "s3", "postgresql", "mysql+pymysql", "gs", "abfs")
SECRET_NAMES = (
    "access_key",
    "secret_key",
    "token",
    "password",
    "sig",
    "X-Amz-Signature",
    "X-Amz-Credential",
    "AWSAccessKeyId",
    "session_token",
    "accessKey",
    "ACCOUNT_KEY",
    "api-key",
    "access%5Fkey",
    "client_secret",
    "user",
    "sas_token",
)
HARMLESS_NAMES = (
    "endpoint_override",
    "region",
    "scheme",
    "keepalives",
    "sslmode",
    "max_tries",
    "monkey",
)

secret_characters = string.ascii_letters + string.digits + "%@:/?#&=+;!$'()* "
secrets = st.text(secret_characters, min_size=1).map(lambda text: f"S3CR{text}ET")
words = st.text(string.ascii_lowercase, min_size=1, max_size=6)


@given(
    st.sampled_from(SCHEMES),
    st.sampled_from(["{}@", "{}:{}@", ":{}@"]),
    secrets,
    words,
    words,
)
def test_a_uri_with_a_user_or_password_is_rejected(
    scheme: str, user: str, secret: str, host: str, path: str
) -> None:
    quoted = quote(secret, safe="")
    uri = f"{scheme}://{user.format(quoted, quoted)}{host}/{path}"
    with pytest.raises(
        UserError, match="holds a user, password or key; leave it out and"
    ) as raised:
        refuse_secrets(uri)
    assert "S3CR" not in str(raised.value)


@given(
    st.sampled_from(SCHEMES),
    words,
    st.sampled_from(SECRET_NAMES),
    secrets,
    st.sampled_from("?#"),
)
def test_a_uri_with_a_secret_parameter_is_rejected(
    scheme: str, path: str, name: str, secret: str, sign: str
) -> None:
    uri = f"{scheme}://host:5000/{path}{sign}region=eu&{name}={quote(secret, safe='')}"
    with pytest.raises(
        UserError, match=f"--storage .{scheme.replace('+', '.')}://..."
    ) as raised:
        refuse_secrets({"storage": [uri]}, "--storage")
    assert "S3CR" not in str(raised.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://KEY:ab/c+d@bucket/x",
        "s3://KEY%3Aabc%40bucket/x",
        "postgresql://u:p@[::1]/db",
    ],
)
def test_users_with_unusual_characters_are_rejected(uri: str) -> None:
    with pytest.raises(UserError, match="holds a user"):
        refuse_secrets(uri)


@given(
    st.sampled_from(SCHEMES),
    words,
    st.lists(st.text(string.ascii_letters + "@:.=-_~", min_size=1)),
    st.lists(st.tuples(st.sampled_from(HARMLESS_NAMES), words)),
)
def test_uris_without_secrets_are_accepted(
    scheme: str, host: str, path: list[str], query: list[tuple[str, str]]
) -> None:
    uri = f"{scheme}://{host}/{'/'.join(path)}"
    if query:
        uri += "?" + "&".join(f"{name}={value}" for name, value in query)
    refuse_secrets(uri)


@pytest.mark.parametrize(
    "text",
    [
        r"C:\Users\me@home\runs",
        "C:/Users/me:x@home",
        "/home/me@work/token=5?sig=1",
        "runs/a b/password=x",
        "",
        "~/x",
        "sqlite:////home/me:x/a@b/mlflow.db",
        "file:///C:/me@work/x",
        "http://[::1]:5000/a@b",
        "models:/name@champion",
        "gs://anonymous@bucket/x",
        "http://host:5000/path/me@x?y=a@b",
        "50% of all: 1@2",
        "https://host?keepalives=1",
        "split_part(url, '://', 2) || 'me@x'",
    ],
)
def test_paths_and_other_texts_are_accepted(text: str) -> None:
    refuse_secrets([text, 3, None])
