"""The commands of petps cluster that speak to etcd, with an etcd in memory."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from petps.cli.app import app
from petps.cluster.maps import ClusterMap
from petps.cluster.records import (
    Choice,
    Drop,
    Keys,
    Member,
    Move,
    PartitionReport,
    Registration,
    Settings,
    dump,
)
from tests.ports import stable_port
from tests.python.cluster.simulated import FakeEtcd

KEYS = Keys("/petps", "ranking")


class Memory(FakeEtcd):
    """An etcd in memory, in which servers register as tests say."""

    def close(self) -> None:
        """See Etcd."""

    def register(self, address: str, **facts: Any) -> None:
        values: dict[str, Any] = {"zone": "", "weight": 1.0, "is_pushed": False, "partitions": 4}
        values |= facts
        version = values.pop("map_version", 1)
        record = Registration(
            address, None, values["zone"], values["weight"], f"pool of {address}", "petps 0.1.0",
            values["is_pushed"], values["partitions"], has_store=values.get("has_store", False),
        )  # fmt: skip
        member = Member(address, record.pool, version, "ranking", {0: PartitionReport(7, True)})
        self.commit((), {KEYS.registration(address): dump(record)})
        self.commit((), {KEYS.member(address): dump(member)})

    def put_map(self, *owners: str) -> None:
        cluster_map = ClusterMap("ranking", 5, tuple((owner,) for owner in owners))
        self.commit((), {KEYS.map: cluster_map.dump()})

    def text(self, key: str) -> str:
        return self.values[key].text


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr("petps.cluster.etcd.Etcd", lambda access, **_: memory)
    monkeypatch.setenv("PETPS_CLUSTER_ENDPOINTS", '["http://127.0.0.1:1"]')
    return memory


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["cluster", *map(str, arguments)])
    words = re.sub("[│┃]", " ", result.output).split()  # without the lines of tables
    return result.exit_code, " ".join(words)


def run(*arguments: object) -> str:
    code, output = invoke(*arguments)
    assert code == 0, output
    return output


def refused(*arguments: object) -> str:
    code, output = invoke(*arguments)
    assert code != 0
    return output


def report() -> dict[str, Any]:
    result = CliRunner().invoke(app, ["cluster", "status", "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_without_an_etcd_the_command_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PETPS_CLUSTER_ENDPOINTS", raising=False)
    assert "give --config FILE with endpoints in [cluster]" in refused("status")


def test_init_divides_the_partitions_by_weight(etcd: Memory) -> None:
    etcd.register("h1:7070", weight=3.0)
    etcd.register("h2:7070", map_version=6)
    run("init")
    cluster_map = ClusterMap.of(json.loads(etcd.text(KEYS.map)))
    assert cluster_map.version == 7  # above those that servers use
    owners = [present for (present,) in cluster_map.owners]
    assert (owners.count("h1:7070"), owners.count("h2:7070")) == (3, 1)
    assert json.loads(etcd.text(KEYS.settings))["replicas"] == 1
    assert "has a map already, version 7" in refused("init")


def test_init_takes_the_map_of_a_file(etcd: Memory, tmp_path: Path) -> None:
    path = tmp_path / "shards.json"
    servers = [{"address": "h1:7070", "partitions": ["0-3"]}]
    path.write_text(
        json.dumps({"model": "ranking", "version": 1, "partitions": 4, "servers": servers})
    )
    etcd.register("h2:7070")
    assert "h1:7070 of" in refused("init", path)
    assert KEYS.map not in etcd.values
    etcd.register("h1:7070")
    run("init", path)
    assert ClusterMap.of(json.loads(etcd.text(KEYS.map))).owners == (("h1:7070",),) * 4
    etcd.commit((), {}, (KEYS.map,))
    path.write_text(path.read_text().replace("ranking", "other"))
    assert "is of model 'other'" in refused("init", path)


def test_init_succeeds_if_a_try_whose_answer_was_lost_wrote_its_map(
    etcd: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in ("h1:7070", "h2:7070"):
        etcd.register(address, map_version=0)
    commit = etcd.commit

    def commit_twice(*arguments: Any, **options: Any) -> Any:
        """The answer of the first try never came."""
        commit(*arguments, **options)
        return commit(*arguments, **options)

    monkeypatch.setattr(etcd, "commit", commit_twice)
    assert "version 2 of the map" in run("init", "--model", "ranking")
    assert "has a map already" in invoke("init", "--model", "ranking")[1]


def test_init_puts_back_the_newest_map_and_ends_older_orders(
    etcd: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd.register("h1:7070", map_version=9)
    etcd.register("h2:7070", map_version=8)
    etcd.put_map("h1:7070", "h1:7070", "h1:7070", "h1:7070")  # version 5, of a backup
    etcd.commit((), {KEYS.drop("h2:7070", 3): dump(Drop("h2:7070", 3, 5))})
    path = tmp_path / "my.pool.map.json"
    newest = ClusterMap("ranking", 8, (("h1:7070",),) * 3 + (("h2:7070",),))
    path.write_text(newest.dump())
    assert "--restored needs MAP" in refused("init", "--restored")
    assert "h1:7070 uses version 9" in refused("init", path, "--restored")
    orders = {
        KEYS.drop("h9:7070", number): dump(Drop("h9:7070", number, 5)) for number in range(300)
    }
    etcd.commit((), orders)
    etcd.commit((), {KEYS.choice: dump(Choice("ranking@1", 4, "ranking@0"))})
    commit = etcd.commit

    def limited(compares: Any, puts: Any, deletes: Any = (), **options: Any) -> int | None:
        assert len(puts) + len(deletes) <= 128, "etcd's --max-txn-ops"
        return commit(compares, puts, deletes, **options)

    monkeypatch.setattr(etcd, "commit", limited)
    newest = ClusterMap("ranking", 9, newest.owners, {"h1:7070": frozenset({3})})
    path.write_text(newest.dump())
    assert "etcd was restored" in run("status")
    assert "is in etcd again, as version 10" in run("init", path, "--restored")
    put = ClusterMap.of(json.loads(etcd.text(KEYS.map)))
    assert (put.version, put.owners, put.follows) == (10, newest.owners, {})
    left = sorted(key for key in etcd.values if key.startswith(KEYS.orders))
    assert left == [KEYS.drop("h1:7070", 3), KEYS.map]
    assert json.loads(etcd.text(KEYS.drop("h1:7070", 3)))["is_copied"] is False
    assert KEYS.registration("h1:7070") in etcd.values


@pytest.mark.parametrize(("servers", "options", "reason"), [
    ([], (), "no server has registered below /petps"),
    ([{}], ("--replicas", 2), "2 replicas need as many servers, but 1 are registered"),
    ([{"is_pushed": True}] * 2, ("--replicas", 2), "each partition has one owner"),
    ([{}, {"partitions": 8}], (), "different numbers of partitions"),
])  # fmt: skip
def test_init_refuses(
    etcd: Memory, servers: list[dict[str, Any]], options: tuple[object, ...], reason: str
) -> None:
    for number, facts in enumerate(servers):
        etcd.register(f"h{number}:7070", **facts)
    assert reason in refused("init", *options)
    assert KEYS.map not in etcd.values


def test_status_shows_members_moves_and_what_is_left(etcd: Memory) -> None:
    for name in ("h1:7070", "h2:7070", "h3:7070"):
        etcd.register(name, zone="a", map_version=5)
    etcd.put_map("h1:7070", "h1:7070", "h2:7070", "h3:7070")
    etcd.commit((), {}, (KEYS.member("h3:7070"),))
    etcd.commit((), {
        KEYS.drained("h2:7070"): "{}",
        KEYS.move(2): dump(Move(2, "h2:7070", "h1:7070", "follow", "drain", 5)),
        KEYS.drop("h1:7070", 3): dump(Drop("h1:7070", 3, 5)),
        KEYS.election("/petps"): '{"name": "one"}',
    })  # fmt: skip
    output = run("status")
    for text in (
        "map version 5", "controller one", "to do partitions 2 move", "h1:7070 in a 1 5 0-1",
        "h2:7070 drained", "h3:7070 away", "partition 2: h2:7070 -> h1:7070, follow (drain)",
    ):  # fmt: skip
        assert text in output
    members = {member["address"]: member for member in report()["members"]}
    assert members["h1:7070"]["removing"] == [3]
    assert members["h3:7070"]["present"] is False
    assert report()["settled"] is False
    assert "partitions 2 move" in refused("status", "--wait", 0.1)


def test_status_waits_no_longer_than_necessary(etcd: Memory) -> None:
    etcd.register("h1:7070", map_version=5)
    etcd.put_map(*["h1:7070"] * 4)
    # A server that is away removes its rows when it is back.
    etcd.commit((), {KEYS.drop("h9:7070", 3): dump(Drop("h9:7070", 3, 5))})
    assert "to do nothing" in run("status", "--wait", 60)


def test_drain_and_undo(etcd: Memory) -> None:
    etcd.register("h1:7070")
    etcd.put_map(*["h1:7070"] * 4)
    assert "has never registered; known are h1:7070" in refused("drain", "h2:7070")
    assert "no other server is present" in refused("drain", "h1:7070")
    etcd.register("h2:7070")
    run("drain", "h1:7070")
    assert report()["members"][0]["drained"] is True
    run("drain", "h1:7070", "--undo")
    assert report()["members"][0]["drained"] is False


def test_drain_waits_until_the_server_owns_nothing(
    etcd: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("h1:7070", "h2:7070"):
        etcd.register(name)
    etcd.put_map("h1:7070", "h2:7070", "h1:7070", "h2:7070")
    message = refused("drain", "h1:7070", "--wait", 0)
    assert "after 0 s h1:7070 still owns partitions 0, 2" in message
    assert report()["members"][0]["drained"] is True

    def move_on(_: float) -> None:
        etcd.put_map(*["h2:7070"] * 4)

    monkeypatch.setattr("petps.cli.cluster_target.time.sleep", move_on)
    assert run("drain", "h1:7070", "--wait", 60) == "h1:7070 owns no partition"
    last = Move(1, "h1:7070", "h2:7070", "switch", "drain", 5)
    etcd.commit((), {KEYS.move(1): dump(last)})
    assert "still has the rows of a move" in refused("drain", "h1:7070", "--wait", 0)
    assert "leave one of them out" in refused("drain", "h1:7070", "--wait", 1, "--undo")


def test_move_writes_a_wish(etcd: Memory) -> None:
    for name in ("h1:7070", "h2:7070"):
        etcd.register(name)
    etcd.put_map(*["h1:7070"] * 4)
    assert "none of 0 to 3" in refused("move", 4, "--to", "h2:7070")
    assert "owns partition 1 already" in refused("move", 1, "--to", "h1:7070")
    run("move", 1, "--to", "h2:7070")
    assert json.loads(etcd.text(KEYS.wish(1)))["source"] == "h1:7070"
    cluster_map = ClusterMap("ranking", 6, (("h1:7070", "h2:7070"),) * 4)
    etcd.commit((), {KEYS.map: cluster_map.dump()})
    etcd.register("h3:7070")
    assert "--from ADDRESS" in refused("move", 2, "--to", "h3:7070")
    run("move", 2, "--from", "h2:7070", "--to", "h3:7070")


def test_a_pushed_model_without_a_store_is_refused_with_the_remedy(etcd: Memory) -> None:
    for name in ("h1:7070", "h2:7070"):
        etcd.register(name, is_pushed=True)
    etcd.put_map(*["h1:7070"] * 4)
    for command in (
        ("drain", "h1:7070"), ("move", 1, "--to", "h2:7070"), ("rebalance",), ("replicas", 2),
    ):  # fmt: skip
        output = refused(*command)
        assert "has tables that pushes feed" in output
        assert "set cluster.store of all its servers" in output
    assert not any("wishes" in key or "drained" in key for key in etcd.values)


def test_rebalance_and_replicas(etcd: Memory) -> None:
    etcd.register("h1:7070")
    assert "has no map yet: petps cluster init" in refused("rebalance")
    etcd.put_map(*["h1:7070"] * 4)
    run("rebalance")
    assert KEYS.rebalance in etcd.values
    run("rebalance", "--undo")
    assert KEYS.rebalance not in etcd.values
    assert "2 replicas need as many servers, but 1 are present" in refused("replicas", 2)
    etcd.register("h2:7070")
    run("replicas", 2)
    assert json.loads(etcd.text(KEYS.settings)) == json.loads(dump(Settings(2)))


def test_watch_shows_each_thing_once(etcd: Memory) -> None:
    etcd.register("h1:7070", map_version=5)
    etcd.put_map(*["h1:7070"] * 4)
    result = CliRunner().invoke(app, ["cluster", "watch", "--json", "--seconds", "0.5"])
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines == [
        {"key": "map", "text": "version 5"},
        {"key": "server h1:7070", "text": "in, uses map 5, owns 0-3"},
    ]


def test_a_model_is_named_if_there_are_several(etcd: Memory) -> None:
    etcd.register("h1:7070")
    etcd.commit((), {Keys("/petps", "other").settings: dump(Settings(1))})
    assert "the cluster has the models other, ranking: name one (--model)" in refused("status")
    run("status", "--model", "ranking")


def test_a_pushed_model_with_a_store_has_one_owner_of_each_partition(etcd: Memory) -> None:
    for name in ("h1:7070", "h2:7070"):
        etcd.register(name, is_pushed=True, has_store=True)
    etcd.put_map(*["h1:7070"] * 4)
    assert "each partition has one owner" in refused("replicas", 2)
    run("move", 1, "--to", "h2:7070")


@pytest.fixture
def listening() -> Iterator[str]:
    """Yield the address of a port that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_add_asks_for_a_rebalancing_and_ends_a_drain(etcd: Memory, listening: str) -> None:
    etcd.register("h1:7070")
    etcd.put_map(*["h1:7070"] * 4)
    etcd.register(listening)
    etcd.commit((), {KEYS.drained(listening): "{}"})
    assert "no controller is elected" in refused("add", listening)
    assert KEYS.rebalance not in etcd.values
    assert "written to etcd" in run("add", listening, "--wait", 0)
    assert KEYS.rebalance in etcd.values
    assert KEYS.drained(listening) not in etcd.values


def test_add_shows_progress_until_nothing_moves(etcd: Memory, listening: str) -> None:
    etcd.register("h1:7070", map_version=5)
    etcd.put_map(*["h1:7070"] * 4)
    etcd.register(listening, map_version=5)
    etcd.commit((), {KEYS.election("/petps"): '{"name": "one"}'})
    output = refused("add", listening, "--wait", 0.1)
    assert f"{listening} owns none; moving: none" in output
    assert "after 0.1 s: partitions are being balanced. The moves go on" in output

    def move(state: Any) -> str:
        etcd.put_map(listening, *["h1:7070"] * 3)
        etcd.commit((), {}, (KEYS.rebalance,))
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("petps.cli.commands.cluster_add.unsettled", move)
        output = run("add", listening)
    assert f"{listening} is in the cluster, and owns" in output


@pytest.mark.parametrize(("facts", "reason"), [
    (None, "has not registered; known are h1:7070"),
    ({"partitions": 8}, "has 8 partitions, and model 'ranking' has 4"),
    ({"is_away": True}, "is away: etcd has not heard of it"),
    ({"error": "no such model"}, " reports: no such model"),
    ({"is_owner": True}, "is in the cluster already, and owns partitions 3"),
    ({"is_closed": True}, "does not answer: Connection refused"),
    ({"model": "other"}, "serves model 'other', and not 'ranking'"),
])  # fmt: skip
def test_add_refuses(
    etcd: Memory, listening: str, facts: dict[str, Any] | None, reason: str
) -> None:
    address, facts = listening, facts if facts is None else dict(facts)
    if facts is not None and facts.pop("is_closed", False):
        address = f"127.0.0.1:{stable_port()}"
    etcd.register("h1:7070")
    etcd.put_map(*["h1:7070"] * 3, address if facts and facts.get("is_owner") else "h1:7070")
    if facts is not None:
        etcd.register(address, partitions=facts.get("partitions", 4))
        if error := facts.get("error"):
            member = Member(address, "pool", 1, "ranking", {}, error)
            etcd.commit((), {KEYS.member(address): dump(member)})
        if facts.get("is_away"):
            etcd.commit((), {}, (KEYS.member(address),))
        if other := facts.get("model"):
            registration = etcd.text(KEYS.registration(address))
            keys = Keys("/petps", other)
            etcd.commit(
                (), {keys.registration(address): registration},
                (KEYS.registration(address), KEYS.member(address)),
            )  # fmt: skip
    etcd.commit((), {KEYS.election("/petps"): '{"name": "one"}'})
    assert reason in refused("add", address, "--model", "ranking")
    assert KEYS.rebalance not in etcd.values
