"""numpy files: a .npz with two arrays, or a pair of .npy. They are read in chunks."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from petps.cli.sources.base import (
    KEY_NAMES,
    ROW_NAMES,
    Chunk,
    chunk_rows,
    convert_keys,
    convert_rows,
    pick,
)
from petps.errors import DataLoss, InvalidArgument

__all__ = ["NpyPair", "Npz"]


@dataclass(frozen=True)
class _Header:
    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]


def _read_header(file: IO[bytes], where: str) -> _Header:
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        header = _Header(*read(file))
    except (ValueError, EOFError) as error:
        raise DataLoss(f"{where} is no numpy array, or cut short: {error}") from None
    if header.dtype.hasobject:
        raise InvalidArgument(
            f"{where} holds Python objects, which are never loaded; save an array of numbers"
        )
    return header


def _check_pair(keys: _Header, rows: _Header, where: str) -> None:
    if len(keys.shape) != 1 or len(rows.shape) != 2:
        raise InvalidArgument(
            f"{where}: keys have shape {keys.shape} and rows {rows.shape}; "
            "expected (n,) and (n, dim)"
        )
    if keys.shape[0] != rows.shape[0]:
        raise InvalidArgument(
            f"{where}: {keys.shape[0]:,} keys but {rows.shape[0]:,} rows; each key needs one row"
        )
    if rows.shape[1] == 0:
        raise InvalidArgument(f"{where}: rows have dim 0; dim must be at least 1")


class Npz:
    """A .npz file with an array of keys and one of rows. Reading decompresses chunk by chunk."""

    def __init__(self, path: Path, key_column: str | None, row_column: str | None) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist()]
                self._key = pick(names, key_column, KEY_NAMES, "key", self.name)
                self._row = pick(names, row_column, ROW_NAMES, "row", self.name)
                with (
                    archive.open(f"{self._key}.npy") as keys,
                    archive.open(f"{self._row}.npy") as rows,
                ):
                    self._keys_header = _read_header(keys, f"{path}: {self._key}")
                    self._rows_header = _read_header(rows, f"{path}: {self._row}")
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataLoss(f"{path} is no whole .npz file: {error}") from None
        _check_pair(self._keys_header, self._rows_header, self.name)
        if self._rows_header.fortran_order and self.dim != 1:
            raise InvalidArgument(
                f"{path}: '{self._row}' is stored column by column, which cannot be read in "
                "chunks; save numpy.ascontiguousarray of it"
            )

    @property
    def name(self) -> str:
        """See Source."""
        return str(self._path)

    @property
    def rows(self) -> int:
        """See Source."""
        return self._keys_header.shape[0]

    @property
    def dim(self) -> int:
        """See Source."""
        return self._rows_header.shape[1]

    def chunks(self) -> Iterator[Chunk]:
        """See Source."""
        step = chunk_rows(self.dim)
        try:
            with (
                zipfile.ZipFile(self._path) as archive,
                archive.open(f"{self._key}.npy") as keys,
                archive.open(f"{self._row}.npy") as rows,
            ):
                _read_header(keys, self.name)
                _read_header(rows, self.name)
                for at in range(0, self.rows, step):
                    n = min(step, self.rows - at)
                    yield (
                        convert_keys(self._read(keys, self._keys_header, n, 1), self.name),
                        convert_rows(
                            self._read(rows, self._rows_header, n, self.dim).reshape(n, self.dim),
                            self.name,
                        ),
                    )
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataLoss(f"{self._path} is damaged: {error}") from None

    def _read(self, file: IO[bytes], header: _Header, n: int, width: int) -> npt.NDArray[Any]:
        size = n * width * header.dtype.itemsize
        data = file.read(size)
        if len(data) != size:
            raise DataLoss(f"{self._path} ends early: it is cut short")
        return np.frombuffer(data, header.dtype)


class NpyPair:
    """Two memory-mapped .npy files. The one-dimensional array has the keys."""

    def __init__(self, first: Path, second: Path) -> None:
        self.name = f"{first} + {second}"
        headers = []
        for path in (first, second):
            with path.open("rb") as file:
                headers.append((_read_header(file, str(path)), path))
        headers.sort(key=lambda item: len(item[0].shape))
        (keys, keys_path), (rows, rows_path) = headers
        _check_pair(keys, rows, self.name)
        self.rows = keys.shape[0]
        self.dim = rows.shape[1]
        self._keys = _map(keys_path)
        self._rows = _map(rows_path)

    def chunks(self) -> Iterator[Chunk]:
        """See Source."""
        step = chunk_rows(self.dim)
        for at in range(0, self.rows, step):
            part = slice(at, at + step)
            yield (
                convert_keys(np.asarray(self._keys[part]), self.name),
                convert_rows(np.asarray(self._rows[part]), self.name),
            )


def _map(path: Path) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataLoss(f"{path} is no numpy array, or cut short: {error}") from None
    return array
