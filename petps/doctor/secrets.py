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

from petps.config import Config
from petps.config.secret import HIDDEN, is_secret
from petps.errors import PetpsError

__all__ = ["Scrubber", "known_secrets"]

# A shorter secret would also replace harmless texts. Values of secret names are hidden anyway.
LENGTH_MIN: Final = 4
FILE_BYTES_MAX: Final = 1 << 20
_SECRET_VARIABLE: Final = re.compile("PASS|SECRET|TOKEN|CREDENTIAL|JAAS", re.IGNORECASE)
# Names that also harmless variables have: the value counts if it looks like a secret.
_DOUBTFUL_VARIABLE: Final = re.compile("KEY|AUTH|SIGNATURE|SASL|DSN", re.IGNORECASE)
_LIKE_A_SECRET: Final = re.compile(r"(?!\d+$).{8,}")
# Settings, which would hide the same word everywhere else.
_SETTINGS: Final = frozenset({"true", "false", "none", "null", "auto"})
_USER_INFO: Final = re.compile(r"://([^/@\s]+)@")
_NAME: Final = (
    r"[\w.\-]*(?:password|passwd|passphrase|secret|token|jaas|api.?key|access.?key|private.?key|"
    r"credential|signature)[\w.\-]*"
)
_PLACE: Final = r"(?<![._]file)(?<![._]location)(?<![._]url)(?<![._]path)"
_PATTERNS: Final = (
    (re.compile(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*-----|\Z)"), HIDDEN),
    (re.compile(r"petps_[A-Za-z0-9_\-]{43}"), HIDDEN),
    (re.compile(r"(://|,)[^/@,\s\"']+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9+/=_.\-]{8,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"), HIDDEN),
    (re.compile(r"\b[0-9a-f]{64}\b"), HIDDEN),  # the hash of a token
    (re.compile(rf"(?i)\b({_NAME}{_PLACE})(['\"]?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&}}]+)"),
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
        yield user_info
        yield from user_info.split(":", 1)[1:]


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
            return HIDDEN if value and is_secret(name) else self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(key)): self.value(entry, str(key)) for key, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(entry, name) for entry in value]
        return value
