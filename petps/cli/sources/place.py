"""Where the file of a source is: a path of this machine, or a URL that fsspec knows."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import IO, Final, cast
from urllib.parse import urlsplit

from petps.errors import InvalidArgument, IoError, NotFound

__all__ = ["Place"]

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

        try:
            return cast(IO[bytes], fsspec.open(self.name, "rb").open())
        except FileNotFoundError:
            raise NotFound(f"{self.name}: no such file") from None
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"{self.name}: {error}") from None
        except Exception as error:  # of the library of the file system
            raise IoError(
                f"{self.name}: {type(error).__name__}: {error}; check that the store's server "
                "answers and accepts the credentials of the environment"
            ) from None

    def __str__(self) -> str:
        return self.name
