"""Restore of a backup into a new pool, which follows the log from the backup on. BACKUP.md.

Owns:        restore(), list_backups(), find_backup(), progress_of(), LogCheck.
Never does:  write a store; read the log's messages.
Called by:   the CLI, and a server, which asks for the age and the positions of backups.
Invariants:  a pool that is a file has its name only once it is complete. On a device, partitions
             are marked as catching up until it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np

from petps import _native
from petps.checkpoint import Base, BaseInfo, Store
from petps.checkpoint.published import BASE_PART
from petps.checkpoint.state import Version
from petps.delta import DeltaLog
from petps.delta.files import sync_folder
from petps.errors import AlreadyExists, NotFound, ResourceExhausted
from petps.pool.backup_info import (
    BACKUP_PART,
    INCOMPLETE_BASE_PART,
    BackupInfo,
    ProgressFacts,
    TableFacts,
)
from petps.pool.export import Bar, no_bar

__all__ = ["LogCheck", "find_backup", "list_backups", "progress_of", "restore"]

ROWS_AT_ONCE: Final = 1 << 16
SUFFIX: Final = ".restoring-"  # of the folder of a pool whose restore is not complete


@dataclass(frozen=True, slots=True)
class LogCheck:
    """Whether a log still has everything after a backup.

    gone: partitions whose log begins only after the backup's position: a server stops there as
    incomplete, and needs a newer base. ahead: partitions whose log ends before that position: it is
    another log, or it has lost messages.
    """

    log: str
    gone: Sequence[int]
    ahead: Sequence[int]

    @classmethod
    def of(cls, log: DeltaLog, progress: Sequence[ProgressFacts]) -> LogCheck:
        """Compare. Raise PetpsError if the log does not answer."""
        partitions = [entry.partition for entry in progress if entry.partition < log.partitions]
        starts, ends = log.start_offsets(partitions), log.end_offsets(partitions)
        return cls(
            log.name,
            [e.partition for e in progress if starts.get(e.partition, 0) > e.offset],
            [e.partition for e in progress if ends.get(e.partition, 0) < e.offset],
        )

    @property
    def warning(self) -> str | None:
        """Return what an operator must know, or None."""
        if self.ahead:
            return (
                f"{self.log} ends before the backup in {len(self.ahead)} partitions (first "
                f"{self.ahead[0]}): it is another log, or it has lost messages. A server would not "
                "read on"
            )
        if self.gone:
            return (
                f"{self.log} no longer has the messages after the backup in {len(self.gone)} "
                f"partitions (first {self.gone[0]}): a server stops there until a newer base ends "
                "the gap. Keep the log longer than the time between two backups"
            )
        return None


def list_backups(store_url: str, log: DeltaLog | None = None) -> list[dict[str, Any]]:
    """Return facts about each backup of a store, oldest first.

    log: whether it has everything after the backup is then in "follows_log". Raise NotFound,
    DataLoss, IoError.
    """
    store = Store.open(store_url)
    result = []
    for entry in store.state.versions():
        if not BackupInfo.is_in(entry):
            continue
        info = _info_of(store, entry.version)
        history = store.state.lineage_of(entry.version).history
        facts: dict[str, Any] = {
            "version": entry.version,
            "created_ns": entry.created_ns,
            "kind": "full" if info.full else "increment",
            # With what it wrote before its last pass.
            "bytes": sum(
                size
                for number, _, size, _ in history
                if info.first_version <= number <= entry.version
            ),
            "instance": info.instance,
            "log_version": min((progress.version for progress in info.progress), default=0),
        }
        if log is not None:
            facts["follows_log"] = LogCheck.of(log, info.progress).warning is None
        result.append(facts)
    return result


def restore(
    store_url: str,
    path: str | PathLike[str],
    *,
    version: int | None = None,
    durability: str | None = None,
    bar: Bar = no_bar,
) -> dict[str, Any]:
    """Make a pool that holds a backup.

    Args:
        store_url: The store: a folder, or any URL that fsspec knows.
        path: The new pool: a file that does not exist, or a device-DAX device without a pool.
        version: The backup; None: the newest.
        durability: As of petps.create; None: that of the pool that was backed up.
        bar: Receives the progress, table by table.

    Returns:
        Facts about the pool.

    Raises:
        AlreadyExists: There is a file already.
        NotFound: There is no such store or backup.
        DataLoss: The store is damaged. The error names the file.
        ResourceExhausted: The disk is full.
    """
    start = time.monotonic()
    store = Store.open(store_url)
    entry = find_backup(store, version)
    info = _info_of(store, entry.version)
    chosen: Any = durability or info.durability
    part = BASE_PART if BASE_PART in entry.parts else INCOMPLETE_BASE_PART
    body = store.part(entry.version, part)
    base = Base(store, entry.version, BaseInfo.parse(body, f"{store.name}: part {part}"))
    rows: dict[str, int] = {}
    with _new_pool(Path(os.path.realpath(path))) as new_pool:
        native = _native.Tables.create(str(new_pool), durability=chosen)
        try:
            rows = _fill(native, info, base, bar)
            native.close()
        except BaseException:
            with contextlib.suppress(Exception):
                native.close()
            _native.Tables.discard(str(new_pool))
            raise
    return {
        "store": store.name,
        "version": entry.version,
        "pool": str(path),
        "model": info.model,
        "instance": info.instance,
        "log_version": base.version,
        "tables": [{"name": name, "rows": count} for name, count in rows.items()],
        "seconds": round(time.monotonic() - start, 3),
        "warnings": info.warnings,
    }


@contextlib.contextmanager
def _new_pool(target: Path) -> Iterator[Path]:
    """Yield where to make the pool, and give it its name afterwards. A device has its name."""
    if target.exists() and stat.S_ISCHR(target.stat().st_mode):
        yield target
        return
    if target.exists():
        raise AlreadyExists(f"{target} exists already: name a new file for the restored pool")
    _remove_leftovers(target)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}{SUFFIX}", dir=target.parent) as folder:
        new_pool = Path(folder, target.name)
        with _locked(Path(folder)):
            yield new_pool
            _rename_to_new(new_pool, target)
    sync_folder(target.parent)


def _remove_leftovers(target: Path) -> None:
    """Remove what killed restores of the same name left."""
    for folder in target.parent.glob(f"{glob.escape(target.name)}{SUFFIX}*"):
        with contextlib.suppress(OSError), _locked(folder):  # else a restore still uses it
            shutil.rmtree(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock of a folder, which ends with this process. Raise OSError if another has it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def _rename_to_new(source: Path, target: Path) -> None:
    """Rename a file. Raise AlreadyExists if there is a target."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise AlreadyExists(f"{target} exists by now: name a new file") from None
    except OSError:  # a file system without links
        if target.exists():
            raise AlreadyExists(f"{target} exists by now: name a new file") from None
        source.rename(target)
        return
    source.unlink()


def progress_of(store_url: str, version: int | None = None) -> Sequence[ProgressFacts]:
    """Return the positions of a backup, for LogCheck. Raise the errors of restore()."""
    store = Store.open(store_url)
    return _info_of(store, find_backup(store, version).version).progress


def find_backup(store: Store, version: int | None = None) -> Version:
    """Return a backup of the store; None: the newest. Raise NotFound."""
    backups = {entry.version: entry for entry in store.state.versions() if BackupInfo.is_in(entry)}
    if not backups:
        raise NotFound(f"{store.name} holds no backup: `petps backup POOL STORE` writes one")
    number = max(backups) if version is None else version
    if number not in backups:
        known = ", ".join(map(str, backups))
        raise NotFound(f"{store.name} has no backup {number}; it has: {known}")
    return backups[number]


def _info_of(store: Store, version: int) -> BackupInfo:
    return BackupInfo.parse(store.part(version, BACKUP_PART), f"{store.name}: part {BACKUP_PART}")


def _fill(native: _native.Tables, info: BackupInfo, base: Base, bar: Bar) -> dict[str, int]:
    """Create the instance, its tables, rows and progress. Return the rows by table."""
    instance = native.create_instance(info.model, info.instance, info.partitions).id
    _record(native, instance, info.progress, "catching_up", base.version)
    counts = {}
    for facts in info.tables:
        table = _create(native, instance, facts)
        counts[facts.name] = _write_rows(table, base, bar)
        if facts.expire_after > 0:  # not before: rows would get the stamps of the table's own clock
            native.set_expiry(table.id, facts.expire_after)
        for partition, clock in base.clocks(facts.name).items():
            native.adopt_clock(table.id, partition, clock)
    _record(native, instance, info.progress, None, 0)
    for alias in info.aliases:
        native.set_alias(alias, instance)
    return counts


def _create(native: _native.Tables, instance: int, facts: TableFacts) -> _native.Table:
    default = np.frombuffer(bytes.fromhex(facts.default_row), np.uint8)
    return native.create_table(
        facts.name,
        instance=instance,
        dim=facts.dim,
        dtype=facts.dtype,
        capacity=facts.capacity,
        feed=facts.feed,
        default_row=default if len(default) else None,
    )


def _write_rows(table: _native.Table, base: Base, bar: Bar) -> int:
    count = 0
    with bar(table.name, base.rows(table.name)) as advance:
        for keys, rows, stamps in base.stamped_chunks(table.name):
            for start in range(0, len(keys), ROWS_AT_ONCE):
                part = slice(start, start + ROWS_AT_ONCE)
                stamp = 0 if stamps is None else np.ascontiguousarray(stamps[part])
                own = np.ascontiguousarray(rows[part])
                report = table.apply(np.ascontiguousarray(keys[part]), own, None, stamp)
                if report.refused:
                    raise ResourceExhausted(
                        f"table '{table.name}' has no room for {report.refused} rows of the backup"
                    )
                advance(len(own))
            count += len(keys)
    return count


def _record(
    native: _native.Tables,
    instance: int,
    progress: Sequence[ProgressFacts],
    state: str | None,
    target: int,
) -> None:
    """Record the progress; state and target: if not None, instead of the backup's own."""
    entries = []
    for entry in progress:
        values = entry.model_dump()
        if state is not None:
            values |= {"state": state, "target": target}
        entries.append(_native.Progress(instance=instance, **values))
    if entries:
        native.record_all_progress(entries)
