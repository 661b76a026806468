"""What a pool and a reader beside its server share: pulls, and their use as context managers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import numpy as np
import numpy.typing as npt
from petps_client.arrays import as_keys

from petps._native import LiveReader, Table, TableRecord, Tables
from petps.errors import InvalidArgument

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

__all__ = ["DEFAULT_MODEL", "Form", "Keys", "Mask", "PoolReader", "Rows", "TableInfo", "empty_rows"]

DEFAULT_MODEL: Final = "default"

Keys = npt.NDArray[np.uint64]
# float32[n, dim], or uint8[n, row_bytes] as the pool stores them.
Rows = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Form = Literal["f32", "stored"]


@dataclass(frozen=True, slots=True)
class TableInfo:
    """Description of a table, as it was created."""

    id: int
    name: str
    instance: str
    dim: int
    dtype: str
    capacity: int
    feed: str
    expire_after: int = 0

    @classmethod
    def of(cls, record: TableRecord, instance: str) -> TableInfo:
        """Return the description for a record of the catalogue."""
        return cls(
            id=record.id,
            name=record.name,
            instance=instance,
            dim=record.dim,
            dtype=record.dtype,
            capacity=record.capacity,
            feed=record.feed,
            expire_after=record.expire_after,
        )


def empty_rows(table: Table | TableRecord, n: int, dtype: Form) -> Rows:
    """Return space for n rows in the given form. Raises InvalidArgument for an unknown form."""
    if dtype == "stored":
        return np.empty((n, table.row_bytes), np.uint8)
    if dtype != "f32":
        raise InvalidArgument(f"dtype '{dtype}' is unknown; write 'f32' or 'stored'")
    return np.empty((n, table.dim), np.float32)


class PoolReader(ABC):
    """Pulls from the tables of one pool in this process. Usable as a context manager."""

    _native: Tables | LiveReader

    @abstractmethod
    def close(self) -> None:
        """Close the pool for this process."""

    @property
    def closed(self) -> bool:
        """Return whether close() was called."""
        return self._native.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _model(self, model: str | None) -> str:
        """Return ``model``, or if None, the only model of the pool or else the default model."""
        if model is not None:
            return model
        models = {instance.model for instance in self._native.instances()}
        return models.pop() if len(models) == 1 else DEFAULT_MODEL

    @overload
    def pull(
        self,
        table: str,
        keys: npt.ArrayLike,
        out: Rows | None = ...,
        return_mask: Literal[False] = ...,
        dtype: Form = ...,
        *,
        mask: Mask | None = ...,
        model: str | None = ...,
    ) -> Rows: ...
    @overload
    def pull(
        self,
        table: str,
        keys: npt.ArrayLike,
        out: Rows | None = ...,
        *,
        return_mask: Literal[True],
        dtype: Form = ...,
        mask: Mask | None = ...,
        model: str | None = ...,
    ) -> tuple[Rows, Mask]: ...
    def pull(
        self,
        table: str,
        keys: npt.ArrayLike,
        out: Rows | None = None,
        return_mask: bool = False,
        dtype: Form = "f32",
        *,
        mask: Mask | None = None,
        model: str | None = None,
    ) -> Rows | tuple[Rows, Mask]:
        """Pull the rows of keys. A missing key has the table's default row.

        Args:
            table: The table's name.
            keys: integers[n].
            out: A C-contiguous float32[n, dim] to fill; it is returned.
            return_mask: Return (rows, mask); mask bool[n] is True for the keys that were found.
            dtype: "f32", or "stored" for uint8[n, row_bytes] as the pool stores them.
            mask: A bool[n] to fill with the mask.
            model: A model, instance or alias; None selects the only model, or else 'default'.

        Returns:
            float32[n, dim], or as ``dtype`` and ``return_mask`` say.

        Raises:
            NotFound (lists the tables), InvalidArgument (names the array).
        """
        all_keys = [as_keys(keys)]
        if mask is None and return_mask:
            mask = np.empty(all_keys[0].shape[0], np.bool_)
        rows = self._pull(model, [table], all_keys, [mask], out, dtype)[0]
        return (rows, mask) if return_mask and mask is not None else rows

    @overload
    def pull_many(
        self,
        keys: Mapping[str, npt.ArrayLike],
        *,
        return_mask: Literal[False] = ...,
        model: str | None = ...,
    ) -> dict[str, Rows]: ...
    @overload
    def pull_many(
        self,
        keys: Mapping[str, npt.ArrayLike],
        *,
        return_mask: Literal[True],
        model: str | None = ...,
    ) -> dict[str, tuple[Rows, Mask]]: ...
    def pull_many(
        self,
        keys: Mapping[str, npt.ArrayLike],
        *,
        return_mask: bool = False,
        model: str | None = None,
    ) -> dict[str, Rows] | dict[str, tuple[Rows, Mask]]:
        """Pull keys of several tables of one instance, as pull() does; return results by table."""
        all_keys = [as_keys(table_keys) for table_keys in keys.values()]
        masks = [np.empty(len(array), np.bool_) if return_mask else None for array in all_keys]
        rows = dict(zip(keys, self._pull(model, list(keys), all_keys, masks), strict=True))
        if not return_mask:
            return rows
        return {
            table: (rows[table], mask)
            for table, mask in zip(keys, masks, strict=True)
            if mask is not None
        }

    @abstractmethod
    def _pull(
        self,
        model: str | None,
        tables: Sequence[str],
        keys: Sequence[Keys],
        masks: Sequence[Mask | None],
        out: Rows | None = None,
        dtype: Form = "f32",
    ) -> list[Rows]:
        """Pull the rows of each table's keys, all from one instance; fill ``out`` if given."""
