"""The records in etcd are pinned: what this release wrote, later releases must read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from petps.cluster.maps import ClusterMap
from petps.cluster.records import (
    Choice,
    Drop,
    Keys,
    Member,
    Move,
    PartitionReport,
    Received,
    Registration,
    Sent,
    Settings,
    Wish,
    dump,
    read_state,
)
from petps.errors import FailedPrecondition, InvalidArgument
from petps.server.shard_map import parse

KEYS = Keys("/petps", "ranking")
# Never change these: other releases have written them.
GOLDEN: dict[str, tuple[str, object]] = {
    "/petps/models/ranking/orders/drops/h1:7070/3": (
        (
            '{"address": "h1:7070", "format": 1, "is_copied": true, "is_foreign": false, '
            '"map_version": 14, "partition": 3}'
        ),
        Drop("h1:7070", 3, 14, is_copied=True),
    ),
    "/petps/models/ranking/members/h1:7070": (
        (
            '{"address": "h1:7070", "error": "", "format": 1, "instance": "ranking@1", '
            '"instances": ["ranking@1", "ranking@2"], "map_version": 12, "partitions": '
            '{"0": {"is_caught_up": true, "run": 3, "version": 840}}, "pool": "5f0c", '
            '"whole": ["ranking@1"]}'
        ),
        Member(
            "h1:7070",
            "5f0c",
            12,
            "ranking@1",
            {0: PartitionReport(840, True, 3)},
            "",
            ("ranking@1", "ranking@2"),
            ("ranking@1",),
        ),
    ),
    "/petps/models/ranking/servers/h1:7070": (
        (
            '{"address": "h1:7070", "format": 1, "grpc_address": null, "has_store": true, '
            '"is_fed": true, "is_manual": true, "is_pushed": false, "partitions": 8, '
            '"pool": "5f0c", "release": "petps 0.1.0", "weight": 1.0, "zone": "a"}'
        ),
        Registration("h1:7070", None, "a", 1.0, "5f0c", "petps 0.1.0", False, 8, True, True, True),
    ),
    "/petps/models/ranking/orders/moves/3": (
        (
            '{"attempt": 1, "format": 1, "has_kept": false, "is_copied": true, "map_version": 12, '
            '"partition": 3, '
            '"pause_ms": 2000, "phase": "follow", "reason": "drain", "run": 3, '
            '"source": "h1:7070", "target": "h2:7070", "version": 840}'
        ),
        Move(3, "h1:7070", "h2:7070", "follow", "drain", 12, 840, True, 1, 2000, run=3),
    ),
    "/petps/models/ranking/orders/sent/3": (
        (
            '{"address": "h1:7070", "attempt": 1, "copy": "6f1c", "error": "", "format": 1, '
            '"is_close": true, "is_released": false, "partition": 3, "parts": 4, "rows": 81000}'
        ),
        Sent(3, "h1:7070", "6f1c", 1, 4, 81000, True),
    ),
    "/petps/models/ranking/orders/received/3": (
        (
            '{"address": "h2:7070", "copy": "6f1c", "error": "", "format": 1, "partition": 3, '
            '"parts": 3}'
        ),
        Received(3, "h2:7070", "6f1c", 3),
    ),
    "/petps/models/ranking/wishes/3": (
        '{"format": 1, "partition": 3, "source": "h1:7070", "target": "h2:7070"}',
        Wish(3, "h1:7070", "h2:7070"),
    ),
    "/petps/models/ranking/settings": ('{"format": 1, "replicas": 2}', Settings(2)),
    "/petps/models/ranking/orders/instance": (
        '{"before": "ranking@1", "format": 1, "instance": "ranking@2", "map_version": 13}',
        Choice("ranking@2", 13, "ranking@1"),
    ),
}
MAP = (
    '{"model": "ranking", "version": 12, "partitions": 4, "servers": [{"address": "h1:7070", '
    '"grpc_address": "h1:7071", "partitions": ["0-2"]}, {"address": "h2:7070", '
    '"partitions": [3], "follows": [0, "2-2"]}]}'
)


def test_records_have_their_golden_text() -> None:
    keys = [
        KEYS.drop("h1:7070", 3), KEYS.member("h1:7070"), KEYS.registration("h1:7070"),
        KEYS.move(3), KEYS.sent(3), KEYS.received(3), KEYS.wish(3), KEYS.settings, KEYS.choice,
    ]  # fmt: skip
    assert keys == list(GOLDEN)
    for text, record in GOLDEN.values():
        assert dump(record) == text


def test_golden_records_are_read() -> None:
    texts = {key: text for key, (text, _) in GOLDEN.items()}
    texts |= {KEYS.map: MAP, KEYS.drained("h1:7070"): "{}", KEYS.rebalance: "{}"}
    texts[KEYS.switch] = '{"format": 1, "instance": "ranking@3"}'
    texts["/petps/models/ranking/a-key-of-later"] = "{"
    state = read_state(KEYS, texts, {})
    records = [record for _, record in GOLDEN.values()]
    assert [
        state.drops["h1:7070", 3], state.members["h1:7070"], state.registrations["h1:7070"],
        state.moves[3], state.sent[3], state.received[3], state.wishes[3],
        state.settings, state.choice,
    ] == records  # fmt: skip
    assert state.drained == {"h1:7070"}
    assert state.is_rebalancing
    assert state.switch == "ranking@3"
    assert state.map is not None
    assert state.map.owners == (("h1:7070",),) * 3 + (("h2:7070",),)
    assert state.map.follows == {"h2:7070": {0, 2}}


def test_members_of_later_releases_are_passed_over() -> None:
    state = read_state(KEYS, {KEYS.settings: '{"format": 1, "replicas": 2, "later": 1}'}, {})
    assert state.settings == Settings(2)


@pytest.mark.parametrize(("text", "kind", "message"), [
    ("[]", InvalidArgument, "settings has no valid record"),
    ("x", InvalidArgument, "settings has no valid record"),
    ('{"format": 0}', InvalidArgument, "format 0"),
    ('{"format": 2}', FailedPrecondition, "knows formats up to 1: upgrade"),
])  # fmt: skip
def test_bad_records_are_named(text: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        read_state(KEYS, {KEYS.settings: text}, {})


@pytest.mark.parametrize(("change", "message"), [
    ({"partitions": 3_000_000_000}, "3000000000 partitions on 2 servers; there may be 1 to 1024"),
    ({"partitions": 0}, "0 partitions on 2 servers"),
    ({"servers": [{"address": "h1:7070", "partitions": ["0-3000000000"]}]}, "'0-3000000000' is no"),
    ({"servers": [{"address": "h1:7070", "partitions": ["0-3"] * 2}]}, "'0-3' is no range of the"),
    ({"servers": [{"address": "h1:7070", "partitions": [4]}]}, "'4' is no range of the partitions"),
    ({"servers": [{"address": "h1:7070", "partitions": ["2-1"]}]}, "'2-1' is no range"),
    ({"servers": [{"address": "h1:7070", "partitions": ["0-3"], "follows": [9]}]}, "'9' is no"),
    ({"servers": [{}] * 1025}, "4 partitions on 1025 servers"),
    ({"servers": [{"address": 7, "partitions": ["0-3"]}]}, "7 is no name or address"),
    ({"model": None}, "None is no name or address"),
])  # fmt: skip
def test_a_map_without_sense_is_refused_before_it_takes_memory(change: Any, message: str) -> None:
    text = json.dumps({**json.loads(MAP), **change})
    with pytest.raises(InvalidArgument, match=f"orders/map has no valid record.*{message}"):
        read_state(KEYS, {KEYS.map: text}, {})


STRANGE: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1 << 70, 1.5, "", "x", "0-9999999999", "-", [], [None], [[]], {}, {"x": []},
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value of a document."""
    yield path
    if isinstance(value, dict | list):
        inner: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in inner:
            yield from places(below, (*path, key))


def changed(value: Any, path: tuple[Any, ...], strange: Any) -> Any:
    """Return a document with another value at a path."""
    if not path:
        return strange
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], strange)
    return copy


@pytest.mark.parametrize("key", [*GOLDEN, KEYS.map])
def test_whatever_is_in_a_record_is_an_error_of_petps_or_is_read(key: str) -> None:
    document = json.loads(MAP if key == KEYS.map else GOLDEN[key][0])
    errors = []
    for path in places(document):
        for strange in STRANGE:
            text = json.dumps(changed(document, path, strange))
            try:
                read_state(KEYS, {KEYS.map: MAP, key: text}, {})
            except (InvalidArgument, FailedPrecondition) as error:
                errors.append(str(error))
    assert errors
    assert all("/petps/models/ranking/" in error for error in errors)


def test_a_map_is_what_servers_read() -> None:
    cluster_map = ClusterMap.of(json.loads(MAP))
    assert ClusterMap.of(json.loads(cluster_map.dump())) == cluster_map
    for changed in (
        cluster_map.with_follower(1, "h2:7070"),
        cluster_map.with_owner(1, "h1:7070", "h2:7070"),
        cluster_map.without_follower(0, "h2:7070"),
    ):
        assert changed.version == 13
        served = parse(changed.dump().encode(), "etcd")
        for address in ("h1:7070", "h2:7070"):
            assert set(served.ingested_by(address)) == changed.ingested_by(address)
            owned = [p for p, present in enumerate(changed.owners) if address in present]
            assert served.owned_by(address) == owned
