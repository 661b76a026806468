"""The credentials of a server and of its callers: the files of [tls] and [access], kept in use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from petps import _native
from petps.config import Config
from petps.errors import PetpsError
from petps.server.access import Access
from petps.server.native_server import native_tls, native_tls_files

if TYPE_CHECKING:
    from petps.server.tls import TlsFiles

__all__ = ["Credentials"]

# Between two looks at the files. A worker acts on new grants within 0.5 s, so a revoked token ends
# within a second.
LOOK_SECONDS: Final = 0.25


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
        self._thread = threading.Thread(target=self._run, name="petps-credentials", daemon=True)

    @property
    def gate(self) -> _native.Gate:
        """Return who may do what."""
        return self._access.gate

    def open(self) -> None:
        """Read what HTTP, gRPC and administration need, and begin to look at the files."""
        if self.native_tls is not None:
            from petps.server.tls import TlsFiles, use_safe_grpc_ciphers

            use_safe_grpc_ciphers()
            self.tls = TlsFiles(self._config.tls, reload_native=self._reload_native, log=self._log)
        self._thread.start()

    def check(self) -> None:
        """Use changed files: a new certificate for new connections, new grants for all."""
        with self._lock:
            self._access.check()
            if self.tls is not None:
                self.tls.check()

    def move(self, config: Config) -> None:
        """Use the files that ``config`` names for [tls] and [access], which it must still have.

        Raises PetpsError if one cannot be used. Then all stay as they were.
        """
        with self._lock:
            old, self._config = self._config, config
            try:
                self._access.move(config.access.file, only_check=True)
                if self.tls is not None and config.tls != old.tls:
                    self.tls.move(config.tls)
                self._access.move(config.access.file)
            except PetpsError:
                self._config = old
                raise

    def _reload_native(self) -> None:
        assert self.native_tls is not None
        self.native_tls.move(*native_tls_files(self._config.tls))

    def status(self) -> dict[str, Any]:
        """Return the members `access` and, with TLS, `tls` of the status."""
        members = {"access": self._access.status()}
        if self.tls is not None:
            members["tls"] = self.tls.status()
        return members

    def close(self) -> None:
        """Look at the files no more."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        logged = ""
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                self.check()
            except Exception as error:  # a thread that ended would never revoke a token again
                if str(error) != logged:
                    logged = str(error)
                    self._log(f"credentials: {type(error).__name__}: {error}")
