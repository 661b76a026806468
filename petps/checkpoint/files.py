"""Files of a store: written once, durable when the call returns. STORE.md.

Owns:        LocalFiles, FsspecFiles, open_files().
Never does:  know what is in a file.
Called by:   state.py, store.py.
Invariants:  a file that can be read is whole; create() makes a name once, whoever else tries.
Threads:     any.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from petps.delta.files import publish_file, sync_folder
from petps.errors import AlreadyExists, DataLoss, InvalidArgument, IoError, NotFound

__all__ = ["Files", "FsspecFiles", "LocalFiles", "open_files"]


class Files(Protocol):
    """A folder of files by relative name ("a/b"). Pickled, it is its address and options."""

    @property
    def name(self) -> str:
        """What to call it in messages."""

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Writes a file of a name that nobody else uses. Durable. Raises IoError.

        A piece is valid until the next one is asked for.
        """

    def create(self, path: str, content: bytes) -> None:
        """Writes a file whose name only one may take. Durable. Raises AlreadyExists, IoError."""

    def read(self, path: str) -> bytes:
        """The whole file. Raises NotFound, IoError."""

    def read_into(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fills each buffer from its offset on. Raises NotFound, IoError, DataLoss: it is cut."""

    def list(self, folder: str) -> dict[str, float]:
        """Names in a folder, with the age in seconds of each. Empty if there is no such folder."""

    def size(self, path: str) -> int:
        """Bytes. Raises NotFound."""

    def remove(self, path: str) -> None:
        """Removes it, if it is there."""


class LocalFiles:
    """A local folder."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self._root.absolute()),)  # another process stands elsewhere

    @property
    def name(self) -> str:
        """See Files."""
        return str(self._root)

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        target = self._folder_of(path)
        try:
            with open(target, "xb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(target.parent)
        except OSError as error:
            target.unlink(missing_ok=True)
            raise IoError(f"{target}: {error.strerror}") from error
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def create(self, path: str, content: bytes) -> None:
        """See Files."""
        target = self._folder_of(path)
        try:
            publish_file(target, content, exclusive=True)
        except FileExistsError:
            raise AlreadyExists(f"{target} is there already") from None
        except OSError as error:
            raise IoError(f"{target}: {error.strerror}") from error

    def read(self, path: str) -> bytes:
        """See Files."""
        with self._reading(path) as file:
            return file.read()

    def read_into(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """See Files."""
        with self._reading(path) as file:
            for offset, buffer in pieces:
                done = 0
                while done < len(buffer):
                    count = os.preadv(file.fileno(), [buffer[done:]], offset + done)
                    if count == 0:
                        raise _cut(f"{self._root / path}", offset + done)
                    done += count

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[FileIO]:
        target = self._root / path
        try:
            with open(target, "rb", buffering=0) as file:
                yield file
        except FileNotFoundError:
            raise NotFound(f"{target} is not there") from None
        except OSError as error:
            raise IoError(f"{target}: {error.strerror}") from error

    def list(self, folder: str) -> dict[str, float]:
        """See Files."""
        now = time.time()
        found: dict[str, float] = {}
        try:
            with os.scandir(self._root / folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed since
                        found[entry.name] = now - entry.stat().st_mtime
        except FileNotFoundError:
            pass
        except OSError as error:
            raise IoError(f"{self._root / folder}: {error.strerror}") from error
        return found

    def size(self, path: str) -> int:
        """See Files."""
        try:
            return (self._root / path).stat().st_size
        except FileNotFoundError:
            raise NotFound(f"{self._root / path} is not there") from None

    def remove(self, path: str) -> None:
        """See Files."""
        try:
            (self._root / path).unlink(missing_ok=True)
        except OSError as error:
            raise IoError(f"{self._root / path}: {error.strerror}") from error

    def _folder_of(self, path: str) -> Path:
        target = self._root / path
        try:
            _make_folder(target.parent)
        except OSError as error:
            raise IoError(f"{target.parent}: {error.strerror}") from error
        return target


def _make_folder(folder: Path) -> None:
    """With those above it; durable, as what is written in it will be."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


class FsspecFiles:
    """A folder of an fsspec filesystem: durable is what that filesystem calls so."""

    def __init__(self, url: str, **options: Any) -> None:
        import fsspec

        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"{url}: {error}") from error
        self._url = url
        self._options = options

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._options), (self._url,)

    @property
    def name(self) -> str:
        """See Files."""
        return self._url

    def _at(self, path: str) -> str:
        return str(PurePosixPath(self._root) / path)

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        target = self._at(path)
        try:
            self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
            # Where it appears piece by piece, nobody knows its name before a state names it.
            with self._fs.open(target, "wb") as file:
                for piece in pieces:
                    file.write(piece)
        except OSError as error:
            raise IoError(f"{self._url}/{path}: {error}") from error

    def create(self, path: str, content: bytes) -> None:
        """See Files."""
        target = self._at(path)
        try:
            self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
            # Atomic where the store has a conditional put (S3, GCS, Azure) and on local disks.
            self._fs.pipe_file(target, content, mode="create")
        except FileExistsError:
            raise AlreadyExists(f"{self._url}/{path} is there already") from None
        except OSError as error:
            raise IoError(f"{self._url}/{path}: {error}") from error

    def read(self, path: str) -> bytes:
        """See Files."""
        with self._reading(path) as target:
            return bytes(self._fs.cat_file(target))

    def read_into(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """See Files: side by side, where the filesystem can."""
        starts = [offset for offset, _ in pieces]
        ends = [offset + len(buffer) for offset, buffer in pieces]
        with self._reading(path) as target:
            found = self._fs.cat_ranges([target] * len(pieces), starts, ends, on_error="raise")
        for (offset, buffer), body in zip(pieces, found, strict=True):
            if len(body) != len(buffer):
                raise _cut(f"{self._url}/{path}", offset + len(body))
            buffer[:] = body

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[str]:
        try:
            yield self._at(path)
        except FileNotFoundError:
            raise NotFound(f"{self._url}/{path} is not there") from None
        except OSError as error:
            raise IoError(f"{self._url}/{path}: {error}") from error

    def list(self, folder: str) -> dict[str, float]:
        """See Files."""
        found: dict[str, float] = {}
        try:
            entries = self._fs.ls(self._at(folder), detail=True, refresh=True)
        except FileNotFoundError:
            return found
        except OSError as error:
            raise IoError(f"{self._url}/{folder}: {error}") from error
        now = time.time()
        for entry in entries:
            made = entry.get("mtime") or entry.get("created") or entry.get("LastModified")
            seconds = made.timestamp() if hasattr(made, "timestamp") else float(made or now)
            found[PurePosixPath(entry["name"]).name] = now - seconds
        return found

    def size(self, path: str) -> int:
        """See Files."""
        try:
            return int(self._fs.size(self._at(path)))
        except FileNotFoundError:
            raise NotFound(f"{self._url}/{path} is not there") from None

    def remove(self, path: str) -> None:
        """See Files."""
        try:
            self._fs.rm_file(self._at(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise IoError(f"{self._url}/{path}: {error}") from error


def _cut(where: str, at: int) -> DataLoss:
    return DataLoss(f"{where} is cut at {at:,} bytes: restore the file from a copy of the store")


def open_files(url: str | Path) -> Files:
    """Of a local path or file:// URL, or of any URL that fsspec knows."""
    text = str(url)
    if text.startswith("file://"):
        return LocalFiles(text.removeprefix("file://"))
    return FsspecFiles(text) if "://" in text else LocalFiles(text)
