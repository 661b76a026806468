"""Opening of a source by the kind of its file or folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from petps.cli.sources.base import Source
from petps.errors import InvalidArgument, NotFound

__all__ = ["Columns", "open_sources"]

PARQUET: Final = (".parquet", ".pq")
STATES: Final = "states"  # the folder that every base and checkpoint store has
MANIFEST: Final = "manifest.json"  # the file that a base of an older release has
ARROW: Final = (".arrow", ".arrows", ".ipc", ".feather")


@dataclass(frozen=True)
class Columns:
    """Names of the key and row columns; None selects one of the usual names."""

    key: str | None = None
    row: str | None = None


def open_sources(
    names: Sequence[str], columns: Columns, table: str, version: int | None = None
) -> list[Source]:
    """Open and check the sources: paths, and URLs of checkpoint stores.

    ``table`` selects the table of a base or checkpoint store, and ``version`` the version of a
    checkpoint store; None selects the newest.
    """
    stores = [name for name in names if "://" in name]
    paths = [Path(name) for name in names if "://" not in name]
    arrays = [path for path in paths if path.suffix == ".npy"]
    if len(arrays) not in (0, 2):
        raise InvalidArgument(
            f"{len(arrays)} .npy given; give two, the keys and the rows (or one .npz with both)"
        )
    for path in paths:
        if not path.exists():
            raise NotFound(f"{path}: no such file or folder")
    sources: list[Source] = []
    if stores:
        from petps.cli.sources.folders import StoreTable

        sources += [StoreTable(url, table, version) for url in stores]
    sources += [_open(path, columns, table, version) for path in paths if path not in arrays]
    if arrays:
        from petps.cli.sources.numpy_files import NpyPair

        sources.append(NpyPair(arrays[0], arrays[1]))
    return sources


def _open(path: Path, columns: Columns, table: str, version: int | None) -> Source:
    if version is not None and not (path / STATES).is_dir():
        raise InvalidArgument(
            f"{path} is no checkpoint store, and only a store has versions: omit --version"
        )
    if path.is_dir():
        return _open_folder(path, table, version)
    suffix = path.suffix.lower()
    if suffix == ".npz":
        from petps.cli.sources.numpy_files import Npz

        return Npz(path, columns.key, columns.row)
    if suffix in PARQUET:
        from petps.cli.sources.arrow_files import ParquetFile

        return ParquetFile(path, columns.key, columns.row)
    if suffix in ARROW:
        from petps.cli.sources.arrow_files import ArrowFile

        return ArrowFile(path, columns.key, columns.row)
    raise InvalidArgument(
        f"{path}: unknown kind of file; known are .npz, a pair of .npy, "
        f"{', '.join(PARQUET + ARROW)}, a folder with key and emb_vector (HPS), a base "
        "and a checkpoint store"
    )


def _open_folder(path: Path, table: str, version: int | None) -> Source:
    from petps.cli.sources.folders import HpsFolder, StoreTable

    if (path / STATES).is_dir() or (path / MANIFEST).exists():
        return StoreTable(path, table, version)
    if (path / "key").exists() and (path / "emb_vector").exists():
        return HpsFolder(path)
    raise InvalidArgument(
        f"folder {path} holds neither key and emb_vector (HPS) nor {STATES}/ (a base or checkpoint "
        f"store) nor {MANIFEST} (a base of an older release); name the files in it one by one"
    )
