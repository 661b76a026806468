"""LivePool: a reader of a pool while a server writes it."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from typing import Final

from petps import _native
from petps.errors import Unavailable
from petps.pool.reader import (
    DEFAULT_MODEL,
    Form,
    Keys,
    Mask,
    PoolReader,
    Rows,
    TableInfo,
    empty_rows,
)

__all__ = ["LivePool"]

# A pull starts again only if its instance is dropped during the pull, after the alias was switched
# to another one. So many drops during one pull are a mistake of the operator.
MAX_RESOLUTIONS: Final = 8


class LivePool(PoolReader):
    """A reader of a pool beside its server (native/epoch/READERS.md); see ``petps.open_live``.

    It sees every row and table as soon as the server's own pulls do, and continues when the server
    is killed. Any thread may use it, but no forked child.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Open the pool.

        Raises NotFound, FailedPrecondition, PermissionDenied, Unimplemented, DataLoss.
        """
        self._native: _native.LiveReader = _native.LiveReader.open(fspath(path))

    def close(self) -> None:
        """Wait for pulls in progress, then close."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<petps.LivePool {'closed' if self.closed else self._native.path}>"

    def tables(self, model: str | None = None) -> list[TableInfo]:
        """Return all current tables, or those of one model, instance or alias."""
        selected = None if model is None else self._native.resolve(model).name
        return [
            TableInfo.of(record, instance)
            for instance, record in self._native.tables()
            if selected in (None, instance)
        ]

    def _pull(
        self,
        model: str | None,
        tables: Sequence[str],
        keys: Sequence[Keys],
        masks: Sequence[Mask | None],
        out: Rows | None = None,
        dtype: Form = "f32",
    ) -> list[Rows]:
        """Pull rows of all tables from one instance: the model's name is resolved once.

        If that instance is dropped before the last row is read, resolve and read everything again.
        """
        for _ in range(MAX_RESOLUTIONS):
            results: list[Rows] = []
            records = self._native.find(self._model(model), list(tables))
            for record, table_keys, mask in zip(records, keys, masks, strict=True):
                rows = empty_rows(record, table_keys.shape[0], dtype) if out is None else out
                if self._native.pull(record, table_keys, rows, mask) is None:
                    break
                results.append(rows)
            else:
                return results
        raise Unavailable(
            f"the instance of '{model or DEFAULT_MODEL}' was dropped during the pull, "
            f"{MAX_RESOLUTIONS} times: pull again"
        )
