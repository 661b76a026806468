"""Where the file of a source is: a path of this machine, or a URL that fsspec knows."""

from __future__ import annotations

import contextlib
import copy
import glob
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Final, cast
from urllib.parse import urlsplit

from petps.errors import InvalidArgument, IoError, NotFound

__all__ = ["Place", "expand"]

WILDCARDS: Final = "*["  # and not "?", which begins the options of some URLs
_REMEDY: Final = (
    "check that the store's server answers and accepts the credentials of the environment"
)

# What a name before :// says, if it is no file of rows.
_OTHERS: Final = {
    "petps": "is a server, which is no source: export its pool (`petps export`) and load the base",
    "kafka": "is a log, which servers follow: `petps serve --log`",
}


class Place:
    """The place of one file. Raises InvalidArgument for a URL of something else."""

    def __init__(self, name: str) -> None:
        self.name = name
        scheme, separator, rest = name.partition("://")
        if separator and scheme == "file":
            name, separator = rest, ""
        self.path = None if separator else Path(name)
        """None: it is a URL."""
        kind = scheme.partition("+")[0]
        if separator and kind in _OTHERS:
            raise InvalidArgument(f"{self.name} {_OTHERS[kind]}")

    @property
    def suffix(self) -> str:
        """Return the ending of the file's name: '.npz'."""
        if self.path is not None:
            return self.path.suffix.lower()
        return PurePosixPath(urlsplit(self.name).path).suffix.lower()

    def open(self) -> IO[bytes]:
        """Open the file, which can seek. Raises NotFound, IoError, InvalidArgument."""
        if self.path is not None:
            return self.path.open("rb")
        import fsspec

        with _errors_of(self.name):
            return cast(IO[bytes], fsspec.open(self.name, "rb").open())

    def absolute(self) -> Place:
        """Return the same place, under the same name, for a process with another folder."""
        place = copy.copy(self)
        place.path = None if self.path is None else self.path.absolute()
        return place

    def __str__(self) -> str:
        return self.name


def expand(name: str) -> list[str]:
    """Return the files that a name with wildcards means, in the order of their names.

    A name without wildcards, or of a file that exists, means itself. Raises NotFound if no file has
    such a name; raises IoError, InvalidArgument.
    """
    place = Place(name)
    if not any(letter in name for letter in WILDCARDS) or (place.path and place.path.exists()):
        return [name]
    if place.path is not None:
        names = sorted(glob.glob(str(place.path), recursive=True))
    else:
        import fsspec

        with _errors_of(name):
            files, pattern = fsspec.core.url_to_fs(name)
            names = sorted(files.unstrip_protocol(path) for path in files.glob(pattern))
    if not names:
        raise NotFound(f"{name}: no file has such a name")
    return names


@contextlib.contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Raise NotFound, InvalidArgument or IoError, which name the file, for any error of fsspec."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"{name}: no such file") from None
    except (ImportError, ValueError) as error:
        raise InvalidArgument(f"{name}: {error}") from None
    except Exception as error:  # of the library of the file system
        raise IoError(f"{name}: {type(error).__name__}: {error}; {_REMEDY}") from None
