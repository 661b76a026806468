"""Opening of a source by the kind of its file or folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from petps.cli.sources.base import Columns, Source
from petps.cli.sources.place import Place, expand
from petps.errors import InvalidArgument, NotFound

__all__ = ["Columns", "open_sources"]

NPY: Final = ".npy"
NPZ: Final = ".npz"
PARQUET: Final = (".parquet", ".pq")
STATES: Final = "states"  # the folder that every base and checkpoint store has
MANIFEST: Final = "manifest.json"  # the file that a base of an older release has
ARROW: Final = (".arrow", ".arrows", ".ipc", ".feather")


def open_sources(
    names: Sequence[str], columns: Columns, table: str, version: int | None = None
) -> list[Source]:
    """Open and check the sources: paths, and URLs of files and of checkpoint stores.

    A name may have wildcards (``*``, ``[...]``), which mean the files in the order of their names.
    ``table`` selects the table of a base or checkpoint store, and ``version`` the version of a
    checkpoint store; None selects the newest.
    """
    places = [Place(file) for name in names for file in expand(name)]
    arrays = [place for place in places if place.suffix == NPY]
    if len(arrays) not in (0, 2):
        raise InvalidArgument(
            f"{len(arrays)} .npy given; give two, the keys and the rows (or one .npz with both)"
        )
    for place in places:
        if place.path is not None and not place.path.exists():
            raise NotFound(f"{place}: no such file or folder")
    sources = [_open(place, columns, table, version) for place in places if place not in arrays]
    if arrays:
        from petps.cli.sources.numpy_files import NpyPair

        sources.append(NpyPair(arrays[0], arrays[1], columns))
    return sources


def _open(place: Place, columns: Columns, table: str, version: int | None) -> Source:
    path, suffix = place.path, place.suffix
    is_file = suffix == NPZ or suffix in PARQUET or suffix in ARROW
    if path is None and not is_file:
        return _open_store(place, table, version)
    if version is not None and (path is None or not (path / STATES).is_dir()):
        raise InvalidArgument(
            f"{place} is no checkpoint store, and only a store has versions: omit --version"
        )
    if path is not None and path.is_dir():
        return _open_folder(path, place.name, table, version)
    if suffix == NPZ:
        from petps.cli.sources.numpy_files import Npz

        return Npz(place, columns)
    if suffix in PARQUET:
        from petps.cli.sources.arrow_files import ParquetFile

        return ParquetFile(place, columns)
    if suffix in ARROW:
        from petps.cli.sources.arrow_files import ArrowFile

        return ArrowFile(place, columns)
    raise InvalidArgument(
        f"{place}: unknown kind of file; known are .npz, a pair of .npy, "
        f"{', '.join(PARQUET + ARROW)}, a folder with key and emb_vector (HPS), a base "
        "and a checkpoint store"
    )


def _open_store(place: Place, table: str, version: int | None) -> Source:
    from petps.cli.sources.folders import StoreTable

    try:
        return StoreTable(place.name, table, version)
    except NotFound as error:
        raise NotFound(
            f"{error}; a URL names a checkpoint store, a base, or a file that ends with {NPZ}, "
            f"{NPY}, {', '.join(PARQUET + ARROW)}"
        ) from None


def _open_folder(path: Path, name: str, table: str, version: int | None) -> Source:
    from petps.cli.sources.folders import HpsFolder, StoreTable

    if (path / STATES).is_dir() or (path / MANIFEST).exists():
        return StoreTable(name if "://" in name else path, table, version)  # file://
    if (path / "key").exists() and (path / "emb_vector").exists():
        return HpsFolder(path)
    raise InvalidArgument(
        f"folder {path} holds neither key and emb_vector (HPS) nor {STATES}/ (a base or checkpoint "
        f"store) nor {MANIFEST} (a base of an older release); name the files in it one by one"
    )
