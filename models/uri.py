"""What URIs hide: user, password and keys are masked wherever a text leaves the process, and only there.

    masked("https://me:secret@mlflow:5000")             ->  https://***@mlflow:5000
    masked("s3://bucket/runs?secret_key=abc&region=eu") ->  s3://bucket/runs?secret_key=***&region=eu

Options are hidden where they come in (`hide`), so that configs, records, tags and messages hold the masked form; what
opens a URI asks for the `real` one, by what was hidden in this call. A record of an earlier call thus opens again
where the same URI, or another one of the same server or bucket, is given with its secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

MASK = "***"

SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]*"

URI = re.compile(rf"{SCHEME}://[^\s\"<>]*")
"""A URI in a text, up to the next blank."""

CODED = re.compile(rf"{SCHEME}%(?:25)*3A%(?:25)*2F%(?:25)*2F[^\s&\"<>]*", re.IGNORECASE)
"""A URI that is percent-encoded whole, as the value of a parameter of another one."""

USER = re.compile(
    r"(?<=://)(?!anonymous@)(?:"
    r"[^\s/?#@:\[\"<>]+:(?!\d+(?:[/?#\s]|$))[^\s@\"<>]*[/?#][^\s\"<>@]*@|"  # with / ? # in it: after the : is no port
    r"[^\s/?#\"<>]+(?:@|%40)"  # up to the last @ before the path
    r")",
    re.IGNORECASE,
)
"""User and password."""

PARAMETER = re.compile(r"(?<=[?&;#])([^\s=&;#?\"<>]+)=([^\s&#\"<>]+)")
"""A parameter of a query or a fragment."""

SECRET = re.compile(
    r"secret|token|passw|passphrase|pwd|signature|credential|authorization|accesskey|accessid|accountkey|apikey|"
    r"privatekey|sharedkey|^(?:amp)?(?:xamz|xgoog)|^(?:amp)?(?:sig|key|keyid|user|username|login|auth|pass|uid)$"
)
"""Names of parameters that hold secrets, in small letters and digits alone."""

SHAPE = re.compile(rf"({SCHEME}://)(?:([^/?#]*)@)?([^/?#]*)([^?#]*)(.*)", re.DOTALL)
"""Scheme, user, host, path, and the rest of a masked URI."""

T = TypeVar("T")


def masked(text: str) -> str:
    """The text with user, password and secret parameters of all URIs in it masked, percent-encoded ones too. A text
    without such is returned as it is, and a masked one is not changed again."""
    if "://" in text:
        text = USER.sub(f"{MASK}@", text)
        text = URI.sub(lambda found: PARAMETER.sub(_parameter, found[0]), text)
    return CODED.sub(_coded, text) if "%" in text else text


def is_secret(name: str) -> bool:
    """Whether a parameter of this name holds a secret."""
    return SECRET.search(re.sub(r"[^a-z0-9]", "", _decoded(name).lower())) is not None


def _parameter(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    if is_secret(name):
        return f"{name}={MASK}"
    plain = unquote(value)
    hidden = PARAMETER.sub(_parameter, f"?{plain}")[1:]  # a query that is a parameter's value
    return f"{name}={value if hidden == plain else quote(hidden, safe='*')}"


def _coded(found: re.Match[str]) -> str:
    """Decoded, masked and encoded again, as often as it was."""
    plain = unquote(found[0])
    hidden = masked(plain)
    return found[0] if hidden == plain else quote(hidden, safe="*")


def _decoded(name: str) -> str:
    while (plain := unquote(name)) != name:
        name = plain
    return name


_known: list[str] = []
"""The URIs that were hidden, as they were given."""

tell: Callable[[list[str]], None] = lambda known: None  # noqa: E731
"""Tells other processes of the same job what is known here; Ray's part sets it."""

ask: Callable[[], Iterable[str]] = tuple
"""What other processes of the same job have told."""


def remember(*uris: str) -> None:
    """Knows the secrets of these URIs from now on."""
    if new := [uri for uri in uris if uri not in _known and masked(uri) != uri]:
        _known.extend(new)
        tell(_known)


def known() -> list[str]:
    """The URIs with secrets that were hidden so far."""
    return list(_known)


def hide(value: T) -> T:
    """A string that is a URI masked, and remembered as it was; in mappings, lists and dataclasses each of their values
    (dataclasses in place). Anything else is returned as it is."""
    made: Any = value
    if isinstance(value, str) and "://" in value and (made := masked(value)) != value:
        remember(value)
    elif isinstance(value, dict):
        made = {key: hide(part) for key, part in value.items()}
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        made = type(value)(hide(part) for part in value)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            before = getattr(value, field.name)
            if (after := hide(before)) != before:
                object.__setattr__(value, field.name, after)
    return made


def real(uri: str) -> str:
    """The URI with the secrets that it was given with: of what was hidden, that of the same server or bucket whose path
    is the nearest. What nobody knows is left out, for the scheme's own environment to give (AWS_ACCESS_KEY_ID,
    MLFLOW_TRACKING_USERNAME)."""
    if MASK not in uri or not (shape := SHAPE.fullmatch(uri)):
        return uri
    scheme, user, host, path, rest = shape.groups()
    everything = [*_known, *ask()]
    if exact := [one for one in everything if masked(one) == uri]:
        return exact[-1]
    same = [one for one in map(_taken_apart, everything) if one[:2] == (scheme.lower(), host)]
    same.sort(key=lambda one: _shared(path, one[2]), reverse=True)
    if user == MASK:
        user = next((one[3] for one in same if one[3]), "")
    secrets: dict[str, str] = {}
    for one in reversed(same):
        secrets |= one[4]

    def given(found: re.Match[str]) -> str:
        value = secrets.get(found[1], "") if found[2] == MASK else found[2]
        return f"{found[1]}={value}" if value else ""

    rest = re.sub(r"&{2,}", "&", PARAMETER.sub(given, rest)).replace("?&", "?").rstrip("?&")
    return f"{scheme}{user + '@' if user else ''}{host}{path}{rest}"


def _shared(path: str, other: str) -> int:
    """How many elements two paths begin with alike."""
    pairs = list(zip(path.strip("/").split("/"), other.strip("/").split("/"), strict=False))
    return next((i for i, (one, two) in enumerate(pairs) if one != two), len(pairs))


def _taken_apart(uri: str) -> tuple[str, str, str, str, dict[str, str]]:
    """Scheme, host, path, user and secret parameters."""
    shape = SHAPE.fullmatch(masked(uri))
    assert shape is not None, "only what has a scheme is masked"
    user = USER.search(uri)
    secrets = {name: value for name, value in PARAMETER.findall(uri[user.end() if user else 0 :]) if is_secret(name)}
    return shape[1].lower(), shape[3], shape[4], user[0].removesuffix("@") if user else "", secrets


def absolute(uri: str) -> str:
    """A local path made absolute, since workers run in other folders; URIs without what they hide."""
    return hide(uri.rstrip("/")) if "://" in uri else str(Path(uri).expanduser().absolute())
