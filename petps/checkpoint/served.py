"""Give a running server the versions of a store as bases to catch up to. STORE.md.

Owns:        ServedVersions.
Never does:  apply rows; decide when a server catches up (ingest does, through its own Protocols).
Called by:   server.
Invariants:  no partition catches up to rows that are ahead of its log.
Threads:     one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from petps.checkpoint.base import Base, BaseFolder, is_url
from petps.checkpoint.published import BaseInfo
from petps.checkpoint.state import Version
from petps.checkpoint.state_files import newest_state
from petps.checkpoint.store import Store
from petps.delta import TableSchema
from petps.errors import NotFound, PetpsError

__all__ = ["ServedVersions"]

_log = logging.getLogger("petps.checkpoint")

# Only this many of the newest versions are considered: the position of each is one or two small
# files, which are read once.
CANDIDATES: Final = 32


class ServedVersions:
    """The versions of a store, and the bases of a folder, as a BaseSource of petps.server.ingest.

    The store need not exist yet. ``tables`` returns the server's tables, by name.
    """

    def __init__(
        self, place: str, bases: BaseFolder, tables: Callable[[], Mapping[str, TableSchema]]
    ) -> None:
        self._place = place
        self._bases = bases
        self._tables = tables
        self._store: Store | None = None
        # By number and time of the version, because a number may be used again after a rollback.
        self._infos: dict[tuple[int, int], BaseInfo] = {}
        self._warned_versions: set[int] = set()

    def open(self, location: str) -> Base:
        """Open the base that a marker names: of this store, or in a folder.

        URL#N is version N of the store at URL. Raise the errors of BaseFolder.open().
        """
        url, _, version = location.partition("#")
        if is_url(url) and url.rstrip("/") == self._place.rstrip("/"):
            return Base.open(self._place, int(version) if version.isdecimal() else None)
        return self._bases.open(location)

    def of_model(self, model: str) -> Sequence[Base]:
        """Return versions of the store, newest first, then the folder's bases. Raise PetpsError."""
        return [*self._versions(model), *self._bases.of_model(model)]

    def _versions(self, model: str) -> list[Base]:
        try:
            store = self._open_store()
        except NotFound:  # no trainer has created the store yet
            return []
        if store.state.model != model:
            return []
        entries = [entry for entry in store.state.versions() if BaseInfo.has_parts(entry)]
        newest = entries[: -CANDIDATES - 1 : -1]
        known = {(entry.version, entry.created_ns) for entry in newest}
        self._infos = {key: info for key, info in self._infos.items() if key in known}
        tables = self._tables()
        return [
            Base(store, entry.version, info, tables)
            for entry in newest
            if (info := self._read_info(store, entry)) is not None
        ]

    def _open_store(self) -> Store:
        if self._store is None:
            self._store = Store.open(self._place)
        elif newest_state(self._store.files) != self._store.state.number:
            self._store.refresh()
        return self._store

    def _read_info(self, store: Store, entry: Version) -> BaseInfo | None:
        """Return the position of a version's rows. If it is lost, log that once and return None."""
        key = (entry.version, entry.created_ns)
        if key not in self._infos:
            try:
                info = BaseInfo.of(store, entry.version)
            except PetpsError as error:
                self._warn(entry, "%s: servers cannot catch up to this version", error)
                return None
            if info is None:
                return None
            self._infos[key] = info
        info = self._infos[key]
        if info.behind:
            self._warn(
                entry,
                "version %d of %s has rows that its log does not have yet, in %d partitions: these "
                "partitions cannot catch up to it; TrainerOutput.checkpoint(publish=True) writes a "
                "version to which all can",
                entry.version,
                store.name,
                info.behind,
            )
        return info

    def _warn(self, entry: Version, message: str, *values: object) -> None:
        if entry.version not in self._warned_versions:
            self._warned_versions.add(entry.version)
            _log.warning(f"[checkpoint] {message}", *values)
