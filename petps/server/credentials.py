"""The credentials of a server and of its callers: the files of [tls] and [access], kept in use."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from petps import _native
from petps.config import Config
from petps.errors import PetpsError, Unavailable
from petps.log import ERROR, Line
from petps.server.access import Access
from petps.server.native_server import native_tls, native_tls_files

if TYPE_CHECKING:
    from petps.server.tls import TlsFiles

__all__ = ["Credentials"]

# Between two looks at the files. A worker acts on new grants within 0.5 s, so a revoked token ends
# within a second.
LOOK_SECONDS: Final = 0.25
# After this time without a look, the status says so: a file system does not answer (NFS).
LATE_SECONDS: Final = 10.0
# How long a reload, or the end of the server, waits for the thread that looks.
WAIT_SECONDS: Final = 5.0


class Credentials:
    """The gate and the TLS of every door. A thread looks at their files until close().

    The thread is its own, because the reports of the server may wait for the log's broker.

    Raises NotFound, InvalidArgument if a file cannot be used at the start.
    """

    def __init__(self, config: Config, log: Callable[[str], None]) -> None:
        self._config, self._log = config, log
        self._access = Access(config, log=log)
        self.native_tls = native_tls(config)
        """TLS of the native port; None without [tls]."""
        self.tls: TlsFiles | None = None
        """TLS of HTTP, gRPC and administration, after open()."""
        self._lock = threading.Lock()  # held while the files are looked at
        self._stopping = threading.Event()
        self._looked_at: float | None = None  # None: before open()
        self._is_late = False  # as in the log
        self._thread = threading.Thread(target=self._run, name="petps-credentials", daemon=True)

    @property
    def gate(self) -> _native.Gate:
        """Return who may do what."""
        return self._access.gate

    def has_admin(self, caller: _native.Caller) -> bool:
        """Return whether the caller may administer anything, if only one model."""
        return self._access.has_admin(caller)

    def open(self) -> None:
        """Read what HTTP, gRPC and administration need, and begin to look at the files."""
        if self.native_tls is not None:
            from petps.server.tls import TlsFiles, use_safe_grpc_ciphers

            use_safe_grpc_ciphers()
            self.tls = TlsFiles(self._config.tls, reload_native=self._reload_native, log=self._log)
        self._looked_at = time.monotonic()
        self._thread.start()

    def check(self) -> None:
        """Use changed files: a new certificate for new connections, new grants for all.

        Raises Unavailable if another thread waits for one of the files.
        """
        with self._looking():
            self._access.check()
            if self.tls is not None:
                self.tls.check()

    def move(self, config: Config) -> None:
        """Use the files that ``config`` names for [tls] and [access], which it must still have.

        Raises PetpsError if one cannot be used. Then all stay as they were.
        """
        with self._looking():
            old, self._config = self._config, config
            try:
                self._access.move(config.access.file, only_check=True)
                if self.tls is not None and config.tls != old.tls:
                    self.tls.move(config.tls)
                self._access.move(config.access.file)
            except PetpsError:
                self._config = old
                raise

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise Unavailable(
                "the files of [tls] and [access] are being read, and one of them does not answer: "
                "look at its file system, then reload again"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _reload_native(self) -> None:
        assert self.native_tls is not None
        self.native_tls.move(*native_tls_files(self._config.tls))

    def status(self) -> dict[str, Any]:
        """Return the members `access` and, with TLS, `tls` of the status."""
        members = {"access": self._access.status()}
        if self.tls is not None:
            members["tls"] = self.tls.status()
        if late := self._lateness():
            for member in members.values():
                member["error"] = late
        return members

    def _lateness(self) -> str:
        """Return for how long nobody has looked at the files, as a sentence; '': not for long."""
        at, text = self._looked_at, ""
        if at is not None and self._thread.is_alive():
            silent = time.monotonic() - at
            if silent >= LATE_SECONDS:
                text = (
                    f"the files have not been read for {silent:.0f} s, so a revoked grant stays "
                    "valid: one of them, or its file system, does not answer"
                )
        if bool(text) != self._is_late:
            self._is_late = bool(text)
            event = "credentials_late" if text else "credentials_read"
            line = f"credentials: {text or 'the files can be read again'}"
            self._log(Line(line, event, ERROR) if text else Line(line, event))
        return text

    def close(self) -> None:
        """Look at the files no more. A thread that waits for one of them is left behind."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(WAIT_SECONDS)

    def _run(self) -> None:
        logged = ""
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                self.check()
            except Exception as error:  # a thread that ended would never revoke a token again
                if str(error) != logged:
                    logged = str(error)
                    self._log(f"credentials: {type(error).__name__}: {error}")
            self._looked_at = time.monotonic()
