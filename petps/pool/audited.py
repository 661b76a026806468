"""A pool whose changes leave a line each in its audit log, POOL.audit: when, who, what.

The line is written before the change, which is refused if the line cannot be written. A change
that fails leaves a second line, with the error. A pool that is no file has no audit log.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from os import PathLike
from pathlib import Path
from typing import Any, Final

from petps import _native
from petps.config.duration import duration_text
from petps.errors import IoError
from petps.pool.beside import append, file_beside
from petps.pool.pool import DEFAULT_PARTITIONS, Pool
from petps.pool.reader import DEFAULT_MODEL, TableInfo

__all__ = ["AuditedPool", "audit_log_of", "audited", "this_user"]

WHAT_CHARACTERS_MAX: Final = 1000  # names are checked only after the line is written


def audit_log_of(pool: str | PathLike[str]) -> Path | None:
    """Return the audit log of a pool; None if the pool is no file."""
    return file_beside(pool, "audit")


def this_user() -> str:
    """Return who runs this process."""
    return f"uid {os.getuid()}"


@contextlib.contextmanager
def audited(pool: str | PathLike[str], user: str, change: str) -> Iterator[None]:
    """Write a line for what the block does, and another one if it fails.

    Raises IoError if the line cannot be written; then the block does not run.
    """
    path = audit_log_of(pool)
    if path is None:
        yield
        return
    line = {"who": user, "what": change[:WHAT_CHARACTERS_MAX]}
    _write(path, line)
    try:
        yield
    except BaseException as error:
        failed = f"{type(error).__name__}: {error}"[:WHAT_CHARACTERS_MAX]
        with contextlib.suppress(IoError):  # of the two errors, the first one counts
            _write(path, line | {"failed": failed})
        raise


def _write(path: Path, values: dict[str, str]) -> None:
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    line = (json.dumps({"time": now} | values) + "\n").encode()
    try:
        append(path, line, path.with_suffix("").stat())
    except OSError as error:
        raise IoError(
            f"the audit log {path} cannot be written, so nothing was changed: "
            f"{error.strerror or error}"
        ) from error


def _text_of(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)


def _of_model(model: str | None) -> str:
    return "" if model is None else f" of model {model}"


class AuditedPool(Pool):
    """A Pool whose administration leaves lines in the audit log. user: who changes it."""

    def __init__(self, native: _native.Tables, user: str, *, is_borrowed: bool = False) -> None:
        super().__init__(native, is_borrowed=is_borrowed)
        self._user = user

    @staticmethod
    def open(path: str | PathLike[str], *, read_only: bool = False) -> AuditedPool:
        """Open a pool for the user of this process. See Pool.open."""
        native = _native.Tables.open(os.fspath(path), read_only=read_only)
        return AuditedPool(native, this_user())

    def _line(self, change: str) -> contextlib.AbstractContextManager[None]:
        return audited(self._native.info().path, self._user, change)

    def create_model(self, name: str = DEFAULT_MODEL, partitions: int = DEFAULT_PARTITIONS) -> str:
        """See Pool."""
        with self._line(f"create model {name} with {partitions} partitions"):
            return super().create_model(name, partitions)

    def create_instance(self, name: str) -> str:
        """See Pool."""
        with self._line(f"create instance {name}"):
            return super().create_instance(name)

    def create_table(self, name: str, **options: Any) -> TableInfo:
        """See Pool."""
        with self._line(f"create table {name}: {_text_of(options)}"):
            return super().create_table(name, **options)

    def grow(self, table: str, capacity: int, *, model: str | None = None, **options: Any) -> None:
        """See Pool."""
        with self._line(f"grow table {table}{_of_model(model)} to capacity {capacity}"):
            super().grow(table, capacity, model=model, **options)

    def set_expiry(self, table: str, seconds: int, *, model: str | None = None) -> None:
        """See Pool."""
        instance = self._instance(model).name
        age = f"expire {duration_text(seconds)} after they were written" if seconds else "stay"
        with self._line(f"let rows of table {table} of {instance} {age}"):
            super().set_expiry(table, seconds, model=instance)

    def drop_table(self, table: str, *, model: str | None = None) -> None:
        """See Pool."""
        instance = self._instance(model).name  # the model may name another one later
        with self._line(f"drop table {table} of {instance}"):
            super().drop_table(table, model=instance)

    def scrub(
        self, table: str = "", *, model: str | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """See Pool."""
        with self._line(f"scrub {f'table {table}' if table else 'all tables'}{_of_model(model)}"):
            return super().scrub(table, model=model, **options)

    def shrink(self, progress: Callable[[int, int], bool] = lambda done, free: True) -> int:
        """See Pool."""
        with self._line("shrink"):
            return super().shrink(progress)

    def switch_alias(self, alias: str, instance: str) -> None:
        """See Pool."""
        with self._line(f"switch alias {alias} to {instance}"):
            super().switch_alias(alias, instance)

    def drop_instance(self, instance: str) -> None:
        """See Pool."""
        with self._line(f"drop instance {instance}"):
            super().drop_instance(instance)
