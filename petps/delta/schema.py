"""Schema of a table's rows: name, dtype, dim. native/codec defines the row layouts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.errors import InvalidArgument

__all__ = [
    "DTYPES",
    "INSTANCE",
    "MAX_DIM",
    "MAX_NAME_BYTES",
    "MAX_PARTITIONS",
    "TableSchema",
    "check_instance",
    "check_name",
    "partition_of",
]

MAX_DIM: Final = 4096  # pool::kMaxDim
MAX_NAME_BYTES: Final = 63  # pool::kMaxNameBytes
MAX_PARTITIONS: Final = _native.MAX_PARTITIONS

DTYPES: Final = ("f32", "f16", "bf16", "int8")
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")
INSTANCE: Final = r"^[A-Za-z0-9_.\-]+@[A-Za-z0-9_.\-]+$"  # and at most MAX_NAME_BYTES


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if a pool accepts it. Raises InvalidArgument with the kind of the object."""
    if len(name) > MAX_NAME_BYTES or not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{kind} {name!r}: a name has 1 to {MAX_NAME_BYTES} letters, digits, '_', '-' or '.'"
        )
    return name


def check_instance(model: str, name: str) -> str:
    """Return ``name`` if it is ``model@...`` and not too long. Raises InvalidArgument."""
    if (
        len(name) > MAX_NAME_BYTES
        or not re.fullmatch(INSTANCE, name)
        or name.split("@")[0] != model
    ):
        raise InvalidArgument(
            f"instance {name!r}: write {model}@NAME, with at most {MAX_NAME_BYTES} letters, "
            "digits, '_', '-' or '.'"
        )
    return name


@dataclass(frozen=True, slots=True)
class TableSchema:
    """Schema of one table: rows of ``dim`` values stored as ``dtype`` (f32, f16, bf16 or int8)."""

    name: str
    dtype: str
    dim: int

    def __post_init__(self) -> None:
        check_name("table", self.name)
        if self.dtype not in DTYPES:
            raise InvalidArgument(
                f"table {self.name}: unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}"
            )
        if not 1 <= self.dim <= MAX_DIM:
            raise InvalidArgument(f"table {self.name}: dim {self.dim} is outside 1..{MAX_DIM}")

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one stored row."""
        return _native.row_bytes(self.dtype, self.dim)

    def encode(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        """Convert rows float32[n, dim] to uint8[n, row_bytes]; for f32 return a view.

        Raises InvalidArgument for another shape.
        """
        if rows.ndim != 2 or rows.shape[1] != self.dim:
            raise InvalidArgument(
                f"table {self.name}: rows have shape {rows.shape}, expected (n, {self.dim})"
            )
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        if self.dtype == "f32":
            return rows.view(np.uint8).reshape(rows.shape[0], self.dim * 4)
        return _native.encode_rows(self.dtype, rows)


def partition_of(keys: npt.NDArray[np.uint64], partitions: int) -> npt.NDArray[np.uint32]:
    """Return each key's partition: keys uint64[n] -> uint32[n], each below ``partitions``.

    The partition is XXH3-64 (seed 0) of the key, mod ``partitions``.
    """
    return _native.partition_of(np.ascontiguousarray(keys), partitions)
