"""numpy files: a .npz with two arrays, or a pair of .npy. They are read in chunks."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from petps.cli.sources.base import (
    KEY_NAMES,
    ROW_NAMES,
    Chunk,
    Columns,
    chunk_rows,
    convert_keys,
    convert_rows,
    pick,
)
from petps.cli.sources.place import Place
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

    def __init__(self, place: Place, columns: Columns) -> None:
        self._place = place
        self._has_signed_keys = columns.has_signed_keys
        try:
            with place.open() as file, zipfile.ZipFile(file) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist()]
                self._key = pick(names, columns.key, KEY_NAMES, "key", self.name)
                self._row = pick(names, columns.row, ROW_NAMES, "row", self.name)
                with (
                    archive.open(f"{self._key}.npy") as keys,
                    archive.open(f"{self._row}.npy") as rows,
                ):
                    self._keys_header = _read_header(keys, f"{place}: {self._key}")
                    self._rows_header = _read_header(rows, f"{place}: {self._row}")
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataLoss(f"{place} is no whole .npz file: {error}") from None
        _check_pair(self._keys_header, self._rows_header, self.name)
        if self._rows_header.fortran_order and self.dim != 1:
            raise InvalidArgument(
                f"{place}: '{self._row}' is stored column by column, which cannot be read in "
                "chunks; save numpy.ascontiguousarray of it"
            )

    @property
    def name(self) -> str:
        """See Source."""
        return self._place.name

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
                self._place.open() as file,
                zipfile.ZipFile(file) as archive,
                archive.open(f"{self._key}.npy") as keys,
                archive.open(f"{self._row}.npy") as rows,
            ):
                _read_header(keys, self.name)
                _read_header(rows, self.name)
                for at in range(0, self.rows, step):
                    n = min(step, self.rows - at)
                    key_part = _read(keys, self._keys_header, n, 1, self.name)
                    row_part = _read(rows, self._rows_header, n, self.dim, self.name)
                    yield (
                        convert_keys(key_part, self.name, self._has_signed_keys),
                        convert_rows(row_part.reshape(n, self.dim), self.name),
                    )
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataLoss(f"{self.name} is damaged: {error}") from None


def _read(file: IO[bytes], header: _Header, n: int, width: int, where: str) -> npt.NDArray[Any]:
    size = n * width * header.dtype.itemsize
    data = file.read(size)
    if len(data) != size:
        raise DataLoss(f"{where} ends early: it is cut short")
    return np.frombuffer(data, header.dtype)


class NpyPair:
    """Two .npy files, which are memory-mapped if they are here. One of one dimension has keys."""

    def __init__(self, first: Place, second: Place, columns: Columns) -> None:
        self.name = f"{first} + {second}"
        self._has_signed_keys = columns.has_signed_keys
        headers = []
        for place in (first, second):
            with place.open() as file:
                headers.append((_read_header(file, place.name), place))
        headers.sort(key=lambda item: len(item[0].shape))
        (self._keys_header, self._keys_place), (self._rows_header, self._rows_place) = headers
        _check_pair(self._keys_header, self._rows_header, self.name)
        self.rows = self._keys_header.shape[0]
        self.dim = self._rows_header.shape[1]
        is_remote = self._keys_place.path is None or self._rows_place.path is None
        if is_remote and self._rows_header.fortran_order and self.dim != 1:
            raise InvalidArgument(
                f"{self._rows_place} is stored column by column, which cannot be read in chunks "
                "from a URL; copy it here first, or save numpy.ascontiguousarray of it"
            )
        if not is_remote:  # also to find out now whether they are whole
            self._mapped = _map(self._keys_place), _map(self._rows_place)

    def chunks(self) -> Iterator[Chunk]:
        """See Source."""
        for keys, rows in self._streamed() if not hasattr(self, "_mapped") else self._parts():
            yield (
                convert_keys(keys, self.name, self._has_signed_keys),
                convert_rows(rows, self.name),
            )

    def _parts(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        step = chunk_rows(self.dim)
        keys, rows = self._mapped
        for at in range(0, self.rows, step):
            part = slice(at, at + step)
            yield np.asarray(keys[part]), np.asarray(rows[part])

    def _streamed(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        step = chunk_rows(self.dim)
        with self._keys_place.open() as keys, self._rows_place.open() as rows:
            _read_header(keys, self.name)
            _read_header(rows, self.name)
            for at in range(0, self.rows, step):
                n = min(step, self.rows - at)
                row_part = _read(rows, self._rows_header, n, self.dim, self.name)
                yield (
                    _read(keys, self._keys_header, n, 1, self.name),
                    row_part.reshape(n, self.dim),
                )


def _map(place: Place) -> npt.NDArray[Any]:
    assert place.path is not None
    try:
        array: npt.NDArray[Any] = np.load(place.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataLoss(f"{place} is no numpy array, or cut short: {error}") from None
    return array
