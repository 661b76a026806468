"""The cache of pulled rows against a slow model; its bounds in bytes, age and version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from petps_client.cache import ENTRY_BYTES, WAYS, RowCache
from petps_client.errors import InvalidArgument

from tests.seed import SEED

DIMS = {"users": 4, "items": 4, "words": 2}


def keys_of(*keys: int) -> np.ndarray:
    return np.array(keys, np.uint64)


@given(
    some.dictionaries(some.text(max_size=3), some.integers(1, 300), min_size=1, max_size=6),
    some.integers(0, 1 << 20),
)
def test_it_never_takes_more_bytes(dims: dict[str, int], bytes_max: int) -> None:
    least = WAYS * sum(ENTRY_BYTES + 4 * dim for dim in dims.values())
    if bytes_max < least:
        with pytest.raises(InvalidArgument, match=f"it takes {least} at least"):
            RowCache(bytes_max, dims)
        return
    cache = RowCache(bytes_max, dims)
    assert bytes_max / 2 < cache.nbytes <= bytes_max  # it uses more than half of them
    for table, dim in dims.items():
        keys = np.arange(5000, dtype=np.uint64)
        cache.keep("", {table: keys}, {table: np.zeros((5000, dim), np.float32)}, 1.0, 1)
    assert cache.nbytes <= bytes_max


@pytest.mark.parametrize("places", [1, 3, 1000])
def test_it_agrees_with_a_dict(places: int) -> None:
    """Every row found was stored and meets both bounds; with room for all, it is the newest."""
    random = np.random.default_rng((SEED, places))
    entry = sum(ENTRY_BYTES + 4 * dim for dim in DIMS.values())
    cache = RowCache(places * WAYS * entry, DIMS)
    assert cache.begin("a", DIMS, 0, 0)
    model: dict[tuple[str, int], list[tuple[float, int, tuple[float, ...]]]] = {}
    hits = asked_for = 0
    for step in range(600):
        now = 10.0 + step
        wanted = {
            table: random.choice(200, random.integers(0, 60), replace=False).astype(np.uint64)
            for table in random.choice(list(DIMS), random.integers(1, 4), replace=False)
        }
        if random.random() < 0.5:
            asked = now - float(random.integers(0, 4))  # replies overtake each other
            version = int(random.integers(1, 9))
            rows = {
                table: random.random((len(keys), DIMS[table]), np.float32)
                for table, keys in wanted.items()
            }
            cache.keep("a", wanted, rows, asked, version)
            for table, keys in wanted.items():
                for key, row in zip(keys.tolist(), rows[table], strict=True):
                    model.setdefault((table, key), []).append((asked, version, tuple(row.tolist())))
            continue
        oldest, least = now - float(random.integers(0, 30)), int(random.integers(0, 9))
        taken = cache.take(wanted, now, oldest, least)
        seen = [(now, (1 << 64) - 1)]
        for table, keys in wanted.items():
            for key, hit, row in zip(
                keys.tolist(), taken.hits[table], taken.rows[table], strict=True
            ):
                answers = model.get((table, key), [(-np.inf, 0, ())])
                asked, version, _ = max(reversed(answers), key=lambda answer: answer[0])
                asked_for += asked >= oldest and version >= least
                if not hit:
                    continue
                hits += 1
                (given,) = (answer for answer in answers if answer[2] == tuple(row.tolist()))
                assert given[0] >= oldest, f"seed {SEED}"
                assert given[1] >= least, f"seed {SEED}"
                assert places < 1000 or given[0] == asked, f"seed {SEED}"
                seen.append(given[:2])
        assert taken.asked == min(asked for asked, _ in seen)
        assert taken.version == min(version for _, version in seen)
    assert hits > 0
    if places == 1000:
        assert hits == asked_for  # every row found a place


def test_the_least_recently_used_row_goes() -> None:
    cache = RowCache(WAYS * (ENTRY_BYTES + 4), {"t": 1})
    one = np.ones((1, 1), np.float32)
    for key in range(WAYS):
        cache.keep("", {"t": keys_of(key)}, {"t": one * key}, 1.0 + key, 1)
    assert cache.take({"t": keys_of(0)}, 100.0, 0.0, 0).hits["t"].all()
    cache.keep("", {"t": keys_of(50)}, {"t": one}, 101.0, 1)
    taken = cache.take({"t": np.arange(WAYS, dtype=np.uint64)}, 102.0, 0.0, 0)
    assert taken.hits["t"].tolist() == [True, False] + [True] * (WAYS - 2)
    # With more keys than places, the cache keeps as many as there are places, each once.
    many = np.arange(100, 100 + 3 * WAYS, dtype=np.uint64)
    cache.keep("", {"t": many}, {"t": many.astype(np.float32)[:, None]}, 103.0, 1)
    taken = cache.take({"t": many}, 104.0, 0.0, 0)
    assert taken.hits["t"].sum() == WAYS
    assert (taken.rows["t"][taken.hits["t"], 0] == many[taken.hits["t"]]).all()


def test_another_instance_begins_empty() -> None:
    cache = RowCache(1 << 16, DIMS)
    rows = np.ones((2, 4), np.float32)
    assert cache.begin("a", DIMS, 0, 0)
    cache.keep("a", {"users": keys_of(1, 2)}, {"users": rows}, 1.0, 1)
    cache.keep("b", {"users": keys_of(3, 4)}, {"users": rows}, 1.0, 1)
    taken = cache.take({"users": keys_of(1, 2, 3, 4), "items": keys_of(1)}, 1.0, 0.0, 0)
    assert taken.instance == "a"
    assert taken.hits["users"].tolist() == [True, True, False, False]
    assert not taken.hits["items"].any()  # the same key of another table is another row
    assert cache.begin("b", DIMS | {"users": 3}, 0, 1)
    too_long = DIMS | {"users": 1 << 20}
    assert not cache.begin("a", too_long, 0.5, 2)  # requested before the cache began with b
    assert cache.instance == "b"
    assert not cache.take({"users": keys_of(1, 2)}, 1.0, 0.0, 0).hits["users"].any()
    cache.keep("b", {"users": keys_of(1, 2)}, {"users": rows}, 1.0, 1)  # another dim: not stored
    assert not cache.take({"users": keys_of(1, 2)}, 1.0, 0.0, 0).hits["users"].any()
