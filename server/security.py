"""Who may ask: API keys, and the names under which the server answers. Knows headers; no scheduler and no API's shapes.

A key names a tenant. Tenants get equal shares of the work, and prefixes of their own; without keys everybody is one.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from tinyloop.errors import TinyLoopError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
OPEN_PATHS = frozenset({"/health", "/v1/health", "/ready", "/version"})  # probes have no key
ENVIRONMENT = "TINYLOOP_API_KEYS"


class Keys:
    """The keys that are known, as digests. None at all: everybody may ask, and everybody is the same tenant."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(dict.fromkeys(_digest(key.encode()) for key in keys))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, headers: Mapping[str, str]) -> str | None:
        """On whose behalf a request comes; None if its key is missing or unknown.

        The key stands in `authorization: Bearer` or in `x-api-key`. Every known key is compared, in constant time.
        """
        if not self._digests:
            return ""
        given = _digest(_given(headers))
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return given.hex() if any(matches) else None


def _digest(key: bytes) -> bytes:
    """Of one length, so that a comparison tells nothing of the key's."""
    return hashlib.sha256(key).digest()


def _given(headers: Mapping[str, str]) -> bytes:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    text = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return text.encode("latin-1", "replace")  # as the bytes were sent


def read_keys(given: Iterable[str] = (), file: Path | None = None) -> tuple[str, ...]:
    """Keys of the command line, of a file (one a line, `#` begins a comment), and of the environment (separated by
    commas or blanks). Raises TinyLoopError for a file that cannot be read or holds none, and for an empty key."""
    keys = [*given, *(_from_file(file) if file else ()), *re.split(r"[,\s]+", os.environ.get(ENVIRONMENT, ""))]
    if not all(key.strip() for key in given):
        raise TinyLoopError("--api-key must not be empty")
    return tuple(dict.fromkeys(key for key in keys if key))


def _from_file(path: Path) -> list[str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TinyLoopError(f"--api-key-file {path}: cannot be read") from error
    keys = [key for line in lines if (key := line.partition("#")[0].strip())]
    if not keys:
        raise TinyLoopError(f"--api-key-file {path}: holds no key, and the server would be open to everybody")
    return keys


class Hosts:
    """The names that a Host header may hold, without the port; none given: any name.

    On a loopback address this is what keeps web pages out that rebind a name of their own to 127.0.0.1.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = {name.lower() for name in names}

    def allow(self, host: str) -> bool:
        return not self._names or re.sub(r":\d+$", "", host).lower() in self._names
