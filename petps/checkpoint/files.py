"""The files of a store. Each is written once, and is durable when the call returns. STORE.md.

Owns:        LocalFiles, FsspecFiles, open_files().
Never does:  interpret the contents of a file.
Called by:   state_files.py, commit.py, store.py, shares.py.
Invariants:  a file is whole once write() or create() has returned, and no reader knows its name
             before; create() makes a name once, even if several callers try at the same time.
Threads:     any.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

from petps.delta.files import publish_file, sync_folder
from petps.errors import (
    AlreadyExists,
    DataLoss,
    InvalidArgument,
    IoError,
    NotFound,
    PetpsError,
    Unavailable,
)

__all__ = ["Files", "FsspecFiles", "LocalFiles", "open_files"]

_REMEDY: Final = "check that the store's server answers and accepts the credentials, and try again"


class Files(Protocol):
    """A folder of files with relative names ("a/b"). It pickles as its address and options."""

    @property
    def name(self) -> str:
        """Return the name for messages."""

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a file, durably, under a name that no other caller uses. Raise IoError.

        A piece is valid until the next one is requested.
        """

    def create(self, path: str, content: bytes) -> None:
        """Write a file, durably, if its name is still free. Raise AlreadyExists, IoError.

        After AlreadyExists the file is durable. After an IoError it may exist.
        """

    def read(self, path: str) -> bytes:
        """Return the contents of a file. Raise NotFound, IoError."""

    def read_into(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes from its offset in the file on.

        Raise NotFound, IoError, and DataLoss if the file ends too early.
        """

    def list(self, folder: str) -> dict[str, float]:
        """Return the names in a folder and the age of each in seconds; {} if it does not exist."""

    def size(self, path: str) -> int:
        """Return the size of a file in bytes. Raise NotFound, IoError."""

    def remove(self, path: str) -> None:
        """Remove a file, if it exists. Raise IoError."""


class LocalFiles:
    """A local folder."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    def __reduce__(self) -> tuple[Any, ...]:
        # Absolute: another process has another working directory.
        return type(self), (str(self._root.absolute()),)

    @property
    def name(self) -> str:
        """See Files."""
        return str(self._root)

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        target = self._folder_of(path)
        is_created = False  # until then, a file of this name is another caller's
        try:
            with open(target, "xb") as file:
                is_created = True
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(target.parent)
        except BaseException as error:
            if is_created:
                with contextlib.suppress(OSError):  # the first error counts
                    target.unlink(missing_ok=True)
            if isinstance(error, OSError) and not isinstance(error, PetpsError):
                raise IoError(f"{target}: {error.strerror}") from error
            raise

    def create(self, path: str, content: bytes) -> None:
        """See Files."""
        target = self._folder_of(path)
        try:
            try:
                publish_file(target, content, exclusive=True)
            except FileExistsError:
                sync_folder(target.parent)  # the call that created it may have failed to do so
                raise AlreadyExists(f"{target} exists already") from None
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
                        raise _cut_error(f"{self._root / path}", offset + done)
                    done += count

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[FileIO]:
        target = self._root / path
        with _read_errors(target), open(target, "rb", buffering=0) as file:
            yield file

    def list(self, folder: str) -> dict[str, float]:
        """See Files."""
        now = time.time()
        ages: dict[str, float] = {}
        path = self._root / folder
        with contextlib.suppress(NotFound), _read_errors(path), os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed after it was listed
                    ages[entry.name] = now - entry.stat().st_mtime
        return ages

    def size(self, path: str) -> int:
        """See Files."""
        with _read_errors(self._root / path):
            return (self._root / path).stat().st_size

    def remove(self, path: str) -> None:
        """See Files."""
        with _read_errors(self._root / path):
            (self._root / path).unlink(missing_ok=True)

    def _folder_of(self, path: str) -> Path:
        target = self._root / path
        try:
            _make_folder(target.parent)
        except OSError as error:
            raise IoError(f"{target.parent}: {error.strerror}") from error
        return target


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, durably, because the files in it must be durable."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


class FsspecFiles:
    """A folder of an fsspec filesystem; it is as durable as that filesystem."""

    def __init__(self, url: str, **options: Any) -> None:
        import fsspec

        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **options)
        except OSError as error:
            raise Unavailable(f"{url}: {error.strerror or error}; {_REMEDY}") from error
        except Exception as error:  # some filesystems raise anything for a URL that lacks a part
            known = isinstance(error, ImportError | ValueError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            raise InvalidArgument(
                f"{url}: {reason}; a store is a folder, or a URL that fsspec knows (s3://...)"
            ) from error
        self._url = url
        self._options = options
        self._made_folders: set[str] = set()  # this object need not create them again
        # Another process may write at any time, so a cached listing would hide its files.
        listings: Any = getattr(self._fs, "dircache", None)
        if hasattr(listings, "use_listings_cache"):
            listings.use_listings_cache = False
            listings.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._options), (self._url,)

    @property
    def name(self) -> str:
        """See Files."""
        return self._url

    def _target_of(self, path: str) -> str:
        return str(PurePosixPath(self._root) / path)

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        target, where = self._target_of(path), f"{self._url}/{path}"
        with self._errors_of_writing(where, target):
            self._make_folder_of(target)
            # A filesystem may show the file piece by piece; no reader knows its name before a state
            # names it.
            file = self._fs.open(target, "wb")
        is_ending = False
        try:
            for piece in pieces:
                with self._errors_of_writing(where, target):
                    file.write(piece)
            is_ending = True
            with self._errors_of_writing(where, target):
                file.close()
        except BaseException:
            self._give_up(file, target, is_ending)
            raise

    def _give_up(self, file: Any, target: str, is_ending: bool) -> None:
        """Remove what a failed write() has left. Ignore errors, because the first one counts."""
        from fsspec.spec import AbstractBufferedFile

        if isinstance(file, AbstractBufferedFile):
            # close() would upload the rest of the buffer, and so make a cut file. The garbage
            # collector would call it, too, if the file were not marked as closed.
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            if not is_ending:
                return  # the object does not exist
        with contextlib.suppress(Exception):
            file.close()
        with contextlib.suppress(Exception):
            self._fs.rm_file(target)

    def create(self, path: str, content: bytes) -> None:
        """See Files."""
        target, where = self._target_of(path), f"{self._url}/{path}"
        try:
            with self._errors_of_writing(where, target):
                self._make_folder_of(target)
                # Atomic on local disks, and on stores with a conditional put (S3, GCS, Azure).
                self._fs.pipe_file(target, content, mode="create")
        except FileExistsError:
            raise AlreadyExists(f"{where} exists already") from None
        except IoError as error:
            # s3fs raises FileExistsError only if the answer names the condition, as not all do.
            if _find_http_status(error) == HTTPStatus.PRECONDITION_FAILED:
                raise AlreadyExists(f"{where} exists already") from error
            raise

    def _make_folder_of(self, target: str) -> None:
        """Create the folder of a file, once: on an object store each call asks for the bucket."""
        folder = str(PurePosixPath(target).parent)
        if folder not in self._made_folders:
            self._fs.makedirs(folder, exist_ok=True)
            self._made_folders.add(folder)

    @contextlib.contextmanager
    def _errors_of_writing(self, where: str, target: str) -> Iterator[None]:
        """Raise the errors of _filesystem_errors(); after one, create the folder again."""
        try:
            with _filesystem_errors(where):
                yield
        except PetpsError:
            self._made_folders.discard(str(PurePosixPath(target).parent))
            raise

    def read(self, path: str) -> bytes:
        """See Files."""
        with _filesystem_errors(f"{self._url}/{path}"):
            return bytes(self._fs.cat_file(self._target_of(path)))

    def read_into(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """See Files: read the pieces in parallel, where the filesystem can."""
        starts = [offset for offset, _ in pieces]
        ends = [offset + len(buffer) for offset, buffer in pieces]
        paths = [self._target_of(path)] * len(pieces)
        try:
            with _filesystem_errors(f"{self._url}/{path}"):
                bodies = self._fs.cat_ranges(paths, starts, ends, on_error="raise")
                for body in bodies:
                    if isinstance(body, Exception):  # of fsspec 2024.12, in spite of on_error
                        raise body
        except IoError as error:
            # An object store refuses a range that begins behind the end of the file.
            if _find_http_status(error) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise _cut_error(f"{self._url}/{path}", self.size(path)) from error
            raise
        for (offset, buffer), body in zip(pieces, bodies, strict=True):
            if len(body) != len(buffer):
                raise _cut_error(f"{self._url}/{path}", offset + len(body))
            buffer[:] = body

    def list(self, folder: str) -> dict[str, float]:
        """See Files."""
        ages: dict[str, float] = {}
        entries = []
        with contextlib.suppress(NotFound), _filesystem_errors(f"{self._url}/{folder}"):
            entries = self._fs.ls(self._target_of(folder), detail=True, refresh=True)
        now = time.time()
        for entry in entries:
            file_time = entry.get("mtime") or entry.get("created") or entry.get("LastModified")
            seconds = (
                file_time.timestamp()
                if hasattr(file_time, "timestamp")
                else float(file_time or now)
            )
            ages[PurePosixPath(entry["name"]).name] = now - seconds
        return ages

    def size(self, path: str) -> int:
        """See Files."""
        with _filesystem_errors(f"{self._url}/{path}"):
            return int(self._fs.size(self._target_of(path)))

    def remove(self, path: str) -> None:
        """See Files."""
        with contextlib.suppress(NotFound), _filesystem_errors(f"{self._url}/{path}"):
            self._fs.rm_file(self._target_of(path))


@contextlib.contextmanager
def _read_errors(where: str | Path) -> Iterator[None]:
    """Raise NotFound or IoError, which name ``where``, for errors of the filesystem."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"{where} does not exist") from None
    except FileExistsError:
        raise
    except OSError as error:
        raise IoError(f"{where}: {error.strerror or error}") from error


@contextlib.contextmanager
def _filesystem_errors(where: str) -> Iterator[None]:
    """Raise NotFound or IoError, which name ``where``, for any error of an fsspec filesystem.

    Filesystems raise their libraries' errors too, for instance where credentials are missing.
    """
    try:
        yield
    except (PetpsError, FileExistsError):
        raise
    except FileNotFoundError:
        raise NotFound(f"{where} does not exist") from None
    except OSError as error:
        raise IoError(f"{where}: {error.strerror or error}; {_REMEDY}") from error
    except Exception as error:
        raise IoError(f"{where}: {type(error).__name__}: {error}; {_REMEDY}") from error


def _find_http_status(error: BaseException) -> object:
    """Return the status of S3's answer that caused an error, or None."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore's ClientError
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        cause = cause.__cause__
    return None


def _cut_error(where: str, at: int) -> DataLoss:
    return DataLoss(
        f"{where} ends too early, at {at:,} bytes: restore the file from a copy of the store"
    )


def open_files(url: str | Path) -> Files:
    """Return the files at a local path, a file:// URL, or any URL that fsspec supports."""
    text = str(url)
    if text.startswith("file://"):
        return LocalFiles(text.removeprefix("file://"))
    return FsspecFiles(text) if "://" in text else LocalFiles(text)
