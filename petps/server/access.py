"""Who may come in: the gate of a configuration, kept equal to its access file (DOORS.md)."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from petps import _native
from petps.config import Config
from petps.errors import InvalidArgument, PetpsError
from petps.log import WARNING, Line

__all__ = ["Access", "host_of", "peer_of", "token_of"]

EXPIRES_SOON_SECONDS: Final = 7 * 86_400


class Access:
    """The gate for every door, and the access file, which check() reads again when it changes.

    Raises NotFound, InvalidArgument if the file cannot be used at the start.
    """

    def __init__(self, config: Config, *, log: Callable[[str], None] = print) -> None:
        self._path: Path | None = config.access.file
        self._log = log
        self._error = ""
        self._must_retry = False  # the file could not be read, which may change without it
        self._seen: tuple[int, ...] | None = None
        self._grants = 0
        self._ends: dict[str, int] = {}  # of the grants that expire, by name
        self._admins: frozenset[str] = frozenset()  # names of the grants with the role admin
        if self._path is not None:
            self.gate = _native.Gate("grants")
            self._use_file()
        elif config.tls.client_certificates == "required":
            self.gate = _native.Gate("certificates")
        else:
            self.gate = _native.Gate("open")

    @property
    def is_open(self) -> bool:
        """Return whether nobody is asked for a credential."""
        return self.gate.mode == "open"

    def has_admin(self, caller: _native.Caller) -> bool:
        """Return whether the caller has the role admin for any model, also one to be created."""
        return caller.may_everywhere("admin") or caller.name in self._admins

    def check(self) -> None:
        """Use the file if it has changed. If it cannot be used, keep the present grants.

        The status, a metric and one line in the log say why.
        """
        if self._path is None or (self._look() == self._seen and not self._must_retry):
            return
        try:
            self._use_file()
        except PetpsError as error:
            self._must_retry = isinstance(error.__cause__, OSError)
            if str(error) != self._error:
                self._error = str(error)
                text = f"access: the present grants stay in use: {error}"
                self._log(Line(text, "access_reload_failed", WARNING, code=error.code))
            return
        self._error, self._must_retry = "", False
        are = "grant is" if self._grants == 1 else "grants are"
        text = f"access: {self._grants} {are} in use"
        self._log(Line(text, "access_reloaded", grants=self._grants))

    def move(self, path: Path | None, *, only_check: bool = False) -> None:
        """Use another access file, unless it is the present one. Raises as the constructor."""
        if path is None or self._path is None or path == self._path:
            return
        from petps.server.access_file import read_access_file

        read_access_file(path)
        if not only_check:
            self._path = path
            self._use_file()

    def status(self) -> dict[str, Any]:
        """Return the member `access` of the status."""
        now = time.time()
        ends = self._ends.items()
        return {
            "mode": self.gate.mode,
            "grants": self._grants,
            "expired": sorted(name for name, end in ends if end <= now),
            "expire_soon": sorted(
                name for name, end in ends if now < end <= now + EXPIRES_SOON_SECONDS
            ),
            "error": self._error,
            **self.gate.counts(),
        }

    def _use_file(self) -> None:
        from petps.server.access_file import read_access_file

        assert self._path is not None
        self._seen = self._look()  # also of a file that cannot be used: it is not read in vain
        entries = read_access_file(self._path)
        self._admins = frozenset(entry.name for entry in entries if "admin" in entry.roles)
        self.gate.replace([entry.grant() for entry in entries])
        self._grants = len(entries)
        self._ends = {entry.name: entry.expires_s() for entry in entries if entry.expires}

    def _look(self) -> tuple[int, ...] | None:
        assert self._path is not None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)


def peer_of(context: Any) -> str:
    """Return the address of a gRPC peer: "127.0.0.1:52133"."""
    from urllib.parse import unquote

    return unquote(str(context.peer()).partition(":")[2])  # it is ipv6:%5B::1%5D:52133


def host_of(peer: str) -> str:
    """Return whom the address of a peer belongs to, as native/base/peer.h does: no port.

    Of an IPv6 address, return the first 64 bits.
    """
    return _native.host_of(peer)


def token_of(header: str | bytes) -> str:
    """Return the token in the header `authorization`: Bearer, or Basic with it as the password.

    Without a header (""), return "". Raises InvalidArgument for another scheme, without quoting it.
    """
    text = header.decode("latin-1") if isinstance(header, bytes) else header
    scheme, _, credential = text.partition(" ")
    if not text:
        return ""
    if scheme.lower() == "bearer":
        return credential.strip()
    with contextlib.suppress(ValueError):
        if scheme.lower() == "basic":
            return base64.b64decode(credential, validate=True).decode().partition(":")[2]
    raise InvalidArgument("the header authorization must be 'Bearer TOKEN', or Basic")
