"""The access file (FORMAT.md): who may do what. Read by the server, changed by `petps token`."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from petps import _native
from petps.delta.files import publish_file
from petps.errors import AlreadyExists, InvalidArgument, NotFound
from petps.regular_file import read_regular_file

__all__ = [
    "FORMAT",
    "TOKEN_PREFIX",
    "AccessFile",
    "Entry",
    "hash_of",
    "new_token",
    "read_access_file",
]

FORMAT: Final = "petps access 1"
TOKEN_PREFIX: Final = "petps_"
TOKEN_BYTES: Final = 32
MAX_FILE_BYTES: Final = 4 << 20  # 10,000 grants have 2.5 MB
MAX_GRANTS: Final = 10_000
FILE_MODE: Final = 0o600
ALL_MODELS: Final = "*"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,63}$")]
Role = Literal["read", "write", "admin"]
_PerSecond = Annotated[int, Field(ge=0, lt=1 << 53)]


class Entry(BaseModel):
    """One grant."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Name
    token_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$", repr=False)
    certificate: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    roles: Annotated[list[Role], Field(min_length=1)]
    models: list[Name] | Literal["*"]
    created: str = ""
    expires: str | None = None
    """UTC, such as '2027-01-31T00:00:00Z'; None: never."""
    requests_per_second: _PerSecond = 0
    bytes_per_second: _PerSecond = 0

    @model_validator(mode="after")
    def _has_one_credential(self) -> Entry:
        if (self.token_sha256 is None) == (self.certificate is None):
            raise ValueError("a grant has either token_sha256 or certificate")
        if self.models == []:
            raise ValueError('models is empty: name models, or write "*" for all')
        if self.expires is not None:
            _seconds_of(self.expires)
        return self

    def expires_s(self) -> int:
        """Return the end of the grant in seconds since 1970; 0: it has none."""
        return 0 if self.expires is None else _seconds_of(self.expires)

    def is_expired(self) -> bool:
        """Return whether the grant has ended."""
        return 0 < self.expires_s() <= datetime.now(timezone.utc).timestamp()

    def grant(self) -> _native.Grant:
        """Return the grant for the gate."""
        return _native.Grant(
            self.name,
            token_sha256=bytes.fromhex(self.token_sha256 or ""),
            certificate=self.certificate or "",
            roles=list(self.roles),
            models=[] if self.models == ALL_MODELS else list(self.models),
            requests_per_second=self.requests_per_second,
            bytes_per_second=self.bytes_per_second,
            expires_s=self.expires_s(),
        )


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["petps access 1"]
    grants: Annotated[list[Entry], Field(max_length=MAX_GRANTS)]

    @model_validator(mode="after")
    def _names_are_distinct(self) -> _Document:
        for what in ("name", "token_sha256", "certificate"):
            seen: set[str] = set()
            for entry in self.grants:
                value = getattr(entry, what)
                if value is not None and value in seen:
                    raise ValueError(f"two grants have the same {what}: the second is {entry.name}")
                seen.add(value)
        return self


def _seconds_of(text: str) -> int:
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", text) is None:
        raise ValueError(f"expires must be UTC, such as 2027-01-31T00:00:00Z, not '{text}'")
    return int(datetime.fromisoformat(text[:-1] + "+00:00").timestamp())


def new_token() -> str:
    """Return a new token: 32 random bytes."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def hash_of(token: str) -> str:
    """Return what the file has of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_access_file(path: Path) -> list[Entry]:
    """Return the grants. Raises NotFound, or InvalidArgument (file, key, remedy).

    An error quotes no hash.
    """
    try:
        content = read_regular_file(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        raise NotFound(
            f"there is no access file {path}: create it with `petps token new`"
        ) from None
    except OSError as error:
        raise InvalidArgument(f"access file {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise InvalidArgument(f"access file {path} has more than {MAX_FILE_BYTES:,} bytes")
    try:
        return _Document.model_validate(json.loads(content)).grants
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]]
        where = "".join(parts).removeprefix(".") or "the file"
        reason = f"{where}: {str(fault['msg']).removeprefix('Value error, ')}"
    except (ValueError, RecursionError) as error:
        # Not the text around the fault, which might be a hash.
        reason = f"not valid JSON: {getattr(error, 'msg', type(error).__name__)}"
    raise InvalidArgument(f"access file {path}: {reason}")


class AccessFile:
    """The file for `petps token`. Changes are atomic; a lock keeps two commands apart."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def entries(self) -> list[Entry]:
        """Return the grants. Raises NotFound, InvalidArgument."""
        return read_access_file(self._path)

    def add(self, entry: Entry) -> None:
        """Add a grant; create the file if it is missing. Raises AlreadyExists for the name."""
        with self._locked():
            try:
                entries = self.entries()
            except NotFound:
                entries = []
            for other in entries:
                if other.name == entry.name:
                    raise AlreadyExists(
                        f"{self._path} has a grant named '{entry.name}': choose another name, or "
                        "revoke that one first"
                    )
                if entry.certificate is not None and other.certificate == entry.certificate:
                    raise AlreadyExists(
                        f"{self._path} has a grant for the certificate '{entry.certificate}': "
                        f"revoke '{other.name}' first"
                    )
            self._write([*entries, entry])

    def remove(self, name: str) -> Entry:
        """Remove a grant and return it. Raises NotFound, which lists the names."""
        with self._locked():
            entries = self.entries()
            for entry in entries:
                if entry.name == name:
                    self._write([other for other in entries if other is not entry])
                    return entry
        names = ", ".join(entry.name for entry in entries) or "none"
        raise NotFound(f"{self._path} has no grant named '{name}'; it has {names}")

    def _write(self, entries: list[Entry]) -> None:
        document: dict[str, Any] = {
            "format": FORMAT,
            "grants": [
                entry.model_dump(exclude_none=True, exclude_defaults=True) for entry in entries
            ],
        }
        content = (json.dumps(document, indent=2) + "\n").encode()
        if len(content) > MAX_FILE_BYTES or len(entries) > MAX_GRANTS:
            raise InvalidArgument(
                f"{self._path} would have {len(entries):,} grants in {len(content):,} bytes; at "
                f"most are {MAX_GRANTS:,} in {MAX_FILE_BYTES:,}: revoke those that nobody uses"
            )
        try:  # the server's group may read it, if that was so before
            mode = self._path.stat().st_mode & 0o777
        except FileNotFoundError:
            mode = FILE_MODE
        publish_file(self._path, content, mode=mode)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other commands away. The lock's file stays, because removing it would be a race."""
        lock = self._path.with_name(f".{self._path.name}.lock")
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise InvalidArgument(f"access file {self._path}: {lock}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
