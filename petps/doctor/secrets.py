"""Secrets that must not leave the machine: where they are known from, and how texts lose them.

There are two layers. What is known to be secret is replaced wherever it stands: passwords of the
configuration and the environment, tokens, the key of TLS. And what looks like a secret is replaced
too, because a log may have one that nobody configured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from petps.config import Config
from petps.config.secret import HIDDEN, is_secret
from petps.errors import PetpsError

__all__ = ["Scrubber", "known_secrets"]

# A shorter secret would also replace harmless texts. Values of secret names are hidden anyway.
LENGTH_MIN: Final = 4
FILE_BYTES_MAX: Final = 1 << 20
_SECRET_VARIABLE: Final = re.compile(
    "PASS|SECRET|TOKEN|CREDENTIAL|JAAS|HEADERS$|(^|_)PAT$", re.IGNORECASE
)
_HEADERS_VARIABLE: Final = re.compile("HEADERS$", re.IGNORECASE)  # name=value,name=value
# Names that also harmless variables have: the value counts if it looks like a secret.
_DOUBTFUL_VARIABLE: Final = re.compile("KEY|AUTH|SIGNATURE|SASL|DSN", re.IGNORECASE)
_LIKE_A_SECRET: Final = re.compile(r"(?!\d+$).{8,}")
# Settings, which would hide the same word everywhere else.
_SETTINGS: Final = frozenset({"true", "false", "none", "null", "auto"})
# A password may have a slash or an at sign itself; a port is none.
_WITH_PASSWORD: Final = r"[^/@\s:,\"']*:(?!\d+[/,])[^\s,\"']*"
_USER_INFO: Final = re.compile(rf"://({_WITH_PASSWORD}|[^/@\s]+)@")
_NAME: Final = (
    r"[\w.\-]*(?:password|passwd|passphrase|secret|token|jaas|api.?key|access.?key|private.?key|"
    r"account.?key|encryption.?key|shared.?key|honeycomb.?team|credential|signature)[\w.\-]*"
)
_PLACE: Final = r"(?<![._]file)(?<![._]location)(?<![._]url)(?<![._]path)"
_QUOTED: Final = r"\"(?:[^\"\\]|\\.)*\"|'[^']*'"
# The rest of the line, unless it is in quotes.
_WHOLE_VALUE: Final = rf"({_QUOTED}|[^\r\n\"']+)"
_HEADER: Final = r"[\w\-]*authorization|(?:set-)?cookie"
_SECRET_KEY: Final = re.compile(rf"(?i){_HEADER}|sig|pwd|account.?key|x-honeycomb-team")
_PATTERNS: Final = (
    (re.compile(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*-----|\Z)"), HIDDEN),
    (re.compile(r"petps_[A-Za-z0-9_\-]{43}"), HIDDEN),
    (re.compile(r"\beyJ[A-Za-z0-9_\-]{5,}[A-Za-z0-9_\-.=]*"), HIDDEN),  # a JWT: {" in base64
    (re.compile(r"\b(gh[oprsu]_|github_pat_)[A-Za-z0-9_]{10,}"), HIDDEN),
    (re.compile(rf"(?i)\b({_HEADER})(['\"]?\s*[=:]\s*){_WHOLE_VALUE}"), rf"\1\2{HIDDEN}"),
    (re.compile(rf"://{_WITH_PASSWORD}@"), rf"://{HIDDEN}@"),
    (re.compile(r"(://|,)[^/@,\s\"']+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9+/=_.\-]{8,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"), HIDDEN),
    (re.compile(r"\bGOOG1[0-9A-Z]{20,}\b"), HIDDEN),
    (re.compile(r"(?i)\b[0-9a-f]{64}\b"), HIDDEN),  # the hash of a token
    (re.compile(r"\b([Ss]ig|[Pp]wd)(=)[^\s,;&\"'}]+"), rf"\1\2{HIDDEN}"),  # of Azure, of ODBC
    (re.compile(rf"(?i)\b({_NAME}{_PLACE})(['\"]?\s*[=:]\s*)({_QUOTED}|[^\s,;&}}]+)"),
     rf"\1\2{HIDDEN}"),
)  # fmt: skip


def known_secrets(config: Config | None, environment: Mapping[str, str]) -> set[str]:
    """Return the secrets that a configuration, the environment and their files have."""
    found: set[str] = set()
    for name, value in environment.items():
        found |= set(_passwords_of(value))
        is_secret_name = _SECRET_VARIABLE.search(name) or (
            _DOUBTFUL_VARIABLE.search(name) and _LIKE_A_SECRET.match(value)
        )
        if is_secret_name and not os.path.exists(value):
            found.add(value)
        if _HEADERS_VARIABLE.search(name):
            found |= set(_headers_of(value))
    token_files = [environment.get("PETPS_TOKEN_FILE")]
    key_files = [environment.get("PETPS_TLS_KEY")]
    if config is not None:
        for name, option in config.kafka.items():
            if is_secret(name):
                found.add(str(option))
            elif name.endswith("password.file"):
                token_files.append(str(option))
            elif name == "ssl.key.location":
                key_files.append(str(option))
        if config.cluster.password is not None:
            found.add(config.cluster.password)
        if config.cluster.password_file is not None:
            token_files.append(str(config.cluster.password_file))
        key_files.append(None if config.cluster.key is None else str(config.cluster.key))
        for text in _texts(config.model_dump(mode="json")):
            found |= set(_passwords_of(text))
        key_files.append(None if config.tls.key is None else str(config.tls.key))
        found |= _hashes(config)
    for path in token_files:
        found |= {line.strip() for line in _lines(path)}
    for path in key_files:
        found |= {line.strip() for line in _lines(path) if not line.startswith("-----")}
    return {
        secret for secret in found if len(secret) >= LENGTH_MIN and secret.lower() not in _SETTINGS
    }


def _passwords_of(text: str) -> Iterator[str]:
    for user_info in _USER_INFO.findall(text):
        for part in (user_info, user_info.partition("@")[0]):
            yield part
            yield from part.split(":", 1)[1:]


def _headers_of(text: str) -> Iterator[str]:
    """Yield the values of name=value,name=value, as they are and without escapes."""
    for header in text.split(","):
        value = header.partition("=")[2].strip()
        for plain in (value, unquote(value)):
            yield plain
            yield from plain.split(" ", 1)[1:]  # after the scheme


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)


def _hashes(config: Config) -> set[str]:
    from petps.server.access_file import read_access_file

    if config.access.file is None:
        return set()
    try:
        entries = read_access_file(config.access.file)
    except PetpsError:
        return set()
    return {entry.token_sha256 for entry in entries if entry.token_sha256 is not None}


def _lines(path: str | None) -> list[str]:
    if not path:
        return []
    try:
        with Path(path).open("rb") as file:
            return file.read(FILE_BYTES_MAX).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


class Scrubber:
    """Replaces secrets in texts and in values of JSON."""

    def __init__(self, secrets: Iterable[str]) -> None:
        # The longest first: one may be a part of another.
        ordered = sorted(set(secrets), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """Return a value of JSON without secrets; ``name``: its key."""
        if isinstance(value, str):
            is_hidden = is_secret(name) or _SECRET_KEY.fullmatch(name) is not None
            return HIDDEN if value and is_hidden else self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(key)): self.value(entry, str(key)) for key, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(entry, name) for entry in value]
        return value
