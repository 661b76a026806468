"""The cache of pulled rows against a slow model; its bounds in bytes, age and version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies
from petps_client.cache import ENTRY_BYTES, WAYS, RowCache
from petps_client.errors import InvalidArgument

from tests.seed import SEED

DIMS = {"users": 4, "items": 4, "words": 2}


def keys_of(*keys: int) -> np.ndarray:
    return np.array(keys, np.uint64)


@given(
    strategies.dictionaries(
        strategies.text(max_size=3), strategies.integers(1, 300), min_size=1, max_size=6
    ),
    strategies.integers(0, 1 << 20),
)
def test_the_cache_uses_no_more_than_its_bytes(dims: dict[str, int], bytes_max: int) -> None:
    least = WAYS * sum(ENTRY_BYTES + 4 * dim for dim in dims.values())
    if bytes_max < least:
        with pytest.raises(InvalidArgument, match=f"cache_bytes must be at least {least}"):
            RowCache(bytes_max, dims)
        return
    cache = RowCache(bytes_max, dims)
    assert bytes_max / 2 < cache.nbytes <= bytes_max
    for table, dim in dims.items():
        keys = np.arange(5000, dtype=np.uint64)
        cache.store("", {table: keys}, {table: np.zeros((5000, dim), np.float32)}, 1.0, 1)
    assert cache.nbytes <= bytes_max


@pytest.mark.parametrize("places", [1, 3, 1000])
def test_the_cache_agrees_with_a_dict(places: int) -> None:
    """Every row found was stored and is recent enough. With room for all, it is the newest."""
    random = np.random.default_rng((SEED, places))
    entry = sum(ENTRY_BYTES + 4 * dim for dim in DIMS.values())
    cache = RowCache(places * WAYS * entry, DIMS)
    assert cache.reset("a", DIMS, 0, 0)
    model: dict[tuple[str, int], list[tuple[float, int, tuple[float, ...]]]] = {}
    hits = expected_hits = 0
    for step in range(600):
        now = 10.0 + step
        wanted = {
            table: random.choice(200, random.integers(0, 60), replace=False).astype(np.uint64)
            for table in random.choice(list(DIMS), random.integers(1, 4), replace=False)
        }
        if random.random() < 0.5:
            requested_at = now - float(random.integers(0, 4))  # replies overtake each other
            version = int(random.integers(1, 9))
            rows = {
                table: random.random((len(keys), DIMS[table]), np.float32)
                for table, keys in wanted.items()
            }
            cache.store("a", wanted, rows, requested_at, version)
            for table, keys in wanted.items():
                for key, row in zip(keys.tolist(), rows[table], strict=True):
                    stored = (requested_at, version, tuple(row.tolist()))
                    model.setdefault((table, key), []).append(stored)
            continue
        oldest, least = now - float(random.integers(0, 30)), int(random.integers(0, 9))
        cached = cache.look_up(wanted, now, oldest, least)
        used = [(now, (1 << 64) - 1)]
        for table, keys in wanted.items():
            for key, hit, row in zip(
                keys.tolist(), cached.hits[table], cached.rows[table], strict=True
            ):
                stored_rows = model.get((table, key), [(-np.inf, 0, ())])
                requested_at, version, _ = max(reversed(stored_rows), key=lambda stored: stored[0])
                expected_hits += requested_at >= oldest and version >= least
                if not hit:
                    continue
                hits += 1
                (match,) = (stored for stored in stored_rows if stored[2] == tuple(row.tolist()))
                assert match[0] >= oldest, f"seed {SEED}"
                assert match[1] >= least, f"seed {SEED}"
                assert places < 1000 or match[0] == requested_at, f"seed {SEED}"
                used.append(match[:2])
        assert cached.requested_at == min(requested_at for requested_at, _ in used)
        assert cached.version == min(version for _, version in used)
    assert hits > 0
    if places == 1000:
        assert hits == expected_hits  # every row found a place


def test_a_new_row_replaces_the_least_recently_used_row() -> None:
    cache = RowCache(WAYS * (ENTRY_BYTES + 4), {"t": 1})
    row = np.ones((1, 1), np.float32)
    for key in range(WAYS):
        cache.store("", {"t": keys_of(key)}, {"t": row * key}, 1.0 + key, 1)
    assert cache.look_up({"t": keys_of(0)}, 100.0, 0.0, 0).hits["t"].all()
    cache.store("", {"t": keys_of(50)}, {"t": row}, 101.0, 1)
    cached = cache.look_up({"t": np.arange(WAYS, dtype=np.uint64)}, 102.0, 0.0, 0)
    assert cached.hits["t"].tolist() == [True, False] + [True] * (WAYS - 2)
    # With more keys than places, the cache keeps as many as there are places, each once.
    many = np.arange(100, 100 + 3 * WAYS, dtype=np.uint64)
    cache.store("", {"t": many}, {"t": many.astype(np.float32)[:, None]}, 103.0, 1)
    cached = cache.look_up({"t": many}, 104.0, 0.0, 0)
    assert cached.hits["t"].sum() == WAYS
    assert (cached.rows["t"][cached.hits["t"], 0] == many[cached.hits["t"]]).all()


def test_a_reset_for_another_instance_deletes_all_rows() -> None:
    cache = RowCache(1 << 16, DIMS)
    rows = np.ones((2, 4), np.float32)
    assert cache.reset("a", DIMS, 0, 0)
    cache.store("a", {"users": keys_of(1, 2)}, {"users": rows}, 1.0, 1)
    cache.store("b", {"users": keys_of(3, 4)}, {"users": rows}, 1.0, 1)
    cached = cache.look_up({"users": keys_of(1, 2, 3, 4), "items": keys_of(1)}, 1.0, 0.0, 0)
    assert cached.instance == "a"
    assert cached.hits["users"].tolist() == [True, True, False, False]
    assert not cached.hits["items"].any()  # the same key of another table is another row
    assert cache.reset("b", DIMS | {"users": 3}, 0, 1)
    too_long = DIMS | {"users": 1 << 20}
    assert not cache.reset("a", too_long, 0.5, 2)  # requested before the reset for b
    assert cache.instance == "b"
    assert not cache.look_up({"users": keys_of(1, 2)}, 1.0, 0.0, 0).hits["users"].any()
    cache.store("b", {"users": keys_of(1, 2)}, {"users": rows}, 1.0, 1)  # another dim: not stored
    assert not cache.look_up({"users": keys_of(1, 2)}, 1.0, 0.0, 0).hits["users"].any()
