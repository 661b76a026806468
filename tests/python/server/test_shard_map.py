"""The shard map: its file, and a server that uses it and reloads it."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps import _native
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.errors import FailedPrecondition, InvalidArgument, NotFound
from petps.publish import Publisher
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of
from petps.server.shard_map import MapFile, ShardMap, parse, ranges
from tests.python.server.conftest import Start, settings
from tests.python.server.test_http import request
from tests.python.waiting import wait_until

HERE = "here:7070"


def document(**changed: Any) -> dict[str, Any]:
    return {
        "model": "default",
        "version": 1,
        "partitions": 8,
        "servers": [
            {"address": HERE, "partitions": ["0-3"]},
            {"address": "there:7070", "partitions": [4, "5-6", 7]},
        ],
        **changed,
    }


def write(path: Path, **changed: Any) -> Path:
    """Write the map as an operator should: atomically, by a rename."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(document(**changed)))
    temporary.replace(path)
    return path


def owned_here(partitions: list[int | str], version: int) -> dict[str, Any]:
    rest = [p for p in range(8) if p not in partitions]
    servers = [{"address": HERE, "partitions": partitions}] if partitions else []
    servers += [{"address": "there:7070", "partitions": rest}] if rest else []
    return {"version": version, "servers": servers}


def test_a_parsed_map_writes_the_same_map() -> None:
    servers = document()["servers"]
    servers[0]["follows"] = [7, "3-4"]
    servers[1]["zone"] = "east"
    servers.append({"address": "new:7070", "partitions": [], "follows": [0], "zone": "west"})
    shard_map = parse(json.dumps(document(servers=servers)).encode(), "f")
    owners = shard_map.owners
    assert (owners.model, owners.version, owners.partitions) == ("default", 1, 8)
    assert owners.servers == [(HERE, [0, 1, 2, 3]), ("there:7070", [4, 5, 6, 7])]
    assert shard_map.owned_by("there:7070") == [4, 5, 6, 7]
    assert shard_map.owned_by("new:7070") == shard_map.owned_by("nobody:1") == []
    assert owners.zones == {"there:7070": "east"}
    assert shard_map.zones == {"there:7070": "east", "new:7070": "west"}
    copy = parse(json.dumps(shard_map.as_json()).encode(), "f")
    assert copy.owners == owners
    assert copy.zones == shard_map.zones
    for parsed in (shard_map, copy):
        assert parsed.ingested_by(HERE) == [0, 1, 2, 3, 4, 7]
        assert parsed.ingested_by("there:7070") == [4, 5, 6, 7]
        assert parsed.ingested_by("new:7070") == [0]
    assert ranges([7, 0, 2, 1]) == ["0-2", 7]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 0}, "version 0 means no map"),
        ({"version": -1}, "version: should be greater than or equal to 0, not -1"),
        ({"version": True}, "version: should be a valid integer, not True"),
        ({"model": 7}, "model: should be a valid string, not 7"),
        ({"model": ""}, "the model's name"),
        ({"partitions": 0}, "expected 1 to 1024"),
        ({"partitions": 9}, "partition 8 is owned by no server"),
        ({"servers": {}}, "servers: should be a valid list, not {}"),
        ({"servers": []}, "partition 0 is owned by no server"),
        ({"servers": [7]}, "servers[0] should be an object, not 7"),
        ({"servers": [{"address": HERE}]}, "servers[0].partitions is missing"),
        (
            {"servers": [{"address": 1, "partitions": []}]},
            "[0].address: should be a valid str",
        ),
        (
            {"servers": [{"address": HERE, "partitions": 3}]},
            "[0].partitions: should be a val",
        ),
        ({"servers": [{"address": HERE, "partitions": ["3-1"]}]}, "'3-1' is no range"),
        (
            {"servers": [{"address": HERE, "partitions": [1.5]}]},
            "[0].partitions[0]: should be",
        ),
        ({"servers": [{"address": HERE, "partitions": [1, "0-7"]}]}, "names partition 1 twice"),
        (
            {"servers": [{"address": HERE, "partitions": ["0-8"]}]},
            "owns partition 8, but the partitions are 0 to 7",
        ),
        ({"servers": [{"address": HERE, "partitions": [5000]}]}, "has at most 1024"),
        (
            {"servers": [{"address": HERE, "partitions": ["0-9999"] * 9}]},
            "has at most 1,024 partitions, each once",
        ),
        (
            {"servers": [{"address": HERE, "partitions": ["0-7"], "follows": 3}]},
            "follows: should be a valid list",
        ),
        ({"servers": [{"address": HERE, "partitions": ["0-7"], "follows": [8]}]}, "follows parti"),
        ({"servers": [{"address": HERE, "partitions": [], "follows": [0]}] * 2}, "appears twice"),
        (
            {"servers": [{"address": HERE, "partitions": [], "folows": [0]}]},
            "[0].folows is not a known",
        ),
        (
            {"servers": [{"address": HERE, "partitions": ["0-7"], "zone": ""}]},
            "a zone has 1 to 255 bytes, got 0",
        ),
        ({"colour": 1}, "colour is not a known key; known are model, version"),
    ],
)
def test_each_fault_of_a_map_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match="shard map the-file: ") as error:
        parse(json.dumps(document(**changed)).encode(), "the-file")
    assert message in str(error.value)


def test_a_group_is_the_partitions_with_the_same_owners() -> None:
    servers = [
        {"address": "a:1", "partitions": ["0-4"]},
        {"address": "b:1", "partitions": ["3-7"]},
        {"address": "c:1", "partitions": [0, 7]},
    ]
    groups = parse(json.dumps(document(servers=servers)).encode(), "f").groups()
    assert groups == [
        ([0], ["a:1", "c:1"]),
        ([1, 2], ["a:1"]),
        ([3, 4], ["a:1", "b:1"]),
        ([5, 6], ["b:1"]),
        ([7], ["b:1", "c:1"]),
    ]


def test_a_file_that_is_no_map_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    with pytest.raises(NotFound, match=r"shard map .*map\.json: No such file"):
        MapFile(path).read()
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match="not valid JSON"):
            MapFile(path).read()
    path.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(InvalidArgument, match="at most 1,048,576"):
        MapFile(path).read()
    with pytest.raises(InvalidArgument, match="it is a pipe, a folder or a device"):
        MapFile(tmp_path).read()


def test_a_map_is_used_once_for_each_change(tmp_path: Path) -> None:
    path = write(tmp_path / "map.json")
    file = MapFile(path)
    versions: list[int] = []

    def use(shard_map: ShardMap) -> None:
        version = shard_map.owners.version
        if version == 3 and len(versions) < 2:
            versions.append(-1)
            raise FailedPrecondition("not yet")
        versions.append(version)

    file.read()
    file.follow(use)
    assert versions == []
    write(path, version=2)
    file.follow(use)
    file.follow(use)
    assert versions == [2]
    write(path, version=3)
    with pytest.raises(FailedPrecondition, match="not yet"):
        file.follow(use)
    file.follow(use)  # retries a map that could not be used
    assert versions == [2, -1, 3]


def serve(start: Start, path: Path, **sections: Any) -> Serving:
    return start(server={"shard_map": path, "address": HERE}, **sections)


def followed_partitions(serving: Serving) -> list[int]:
    ingest = serving.status()["ingest"]
    return [entry["partition"] for entry in ingest["partitions"]] if ingest else []


def test_a_server_owns_what_the_map_says(start: Start, tmp_path: Path) -> None:
    path = write(tmp_path / "map.json")
    serving = serve(start, path)
    shard = serving.status()["shard"]
    assert shard == {"address": HERE, "map_version": 1, "partitions": 8, "owned": "0-3"}
    code, kind, body = request(serving, "/shard-map")
    assert (code, kind) == (200, "application/json; charset=utf-8")
    assert json.loads(body)["servers"][1] == {"address": "there:7070", "partitions": ["4-7"]}
    assert "petps_shard_map_version 1.0" in request(serving, "/metrics")[2]
    write(path, **owned_here([0, 7], 2))
    serving.follow_shard_map()
    assert serving.status()["shard"]["owned"] == "0, 7"
    write(path, **owned_here([], 3))
    serving.follow_shard_map()
    assert serving.status()["shard"]["owned"] == "none"


def test_a_grant_of_another_model_does_not_see_the_map(start: Start, tmp_path: Path) -> None:
    access = AccessFile(tmp_path / "access.json")
    for name, models in (("here", ["default"]), ("elsewhere", ["other"])):
        access.add(Entry(name=name, token_sha256=hash_of(name), roles=["write"], models=models))
    serving = serve(start, write(tmp_path / "map.json"), access={"file": tmp_path / "access.json"})

    def asked_by(token: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", serving.http_port or 0, timeout=60)
        with closing(connection):
            connection.request("GET", "/shard-map", headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    assert json.loads(asked_by("here")[1])["model"] == "default"
    code, text = asked_by("elsewhere")
    assert code == 403
    assert "'elsewhere' has no role for the map's model" in text
    assert "there:7070" not in text


def test_a_server_that_its_map_does_not_name_says_so(pool: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "map.json")
    for address, is_named in ((HERE, True), ("elsewhere:7070", False)):
        lines: list[str] = []
        server = {"shard_map": path, "address": address}
        with Serving(settings(pool, server=server), log=lines.append):
            pass
        assert any("does not name elsewhere:7070" in line for line in lines) != is_named


def test_without_a_map_a_server_owns_everything(start: Start) -> None:
    serving = start()
    serving.follow_shard_map()
    assert serving.status()["shard"]["owned"] == "all"
    assert request(serving, "/shard-map")[::2] == (
        404, "there is no shard map: this server owns every partition\n",
    )  # fmt: skip


def test_a_map_that_cannot_be_used_changes_nothing(start: Start, tmp_path: Path) -> None:
    path = write(tmp_path / "map.json")
    serving = serve(start, path)
    for changed, message in (
        (
            {"version": 1, "servers": owned_here([0], 1)["servers"]},
            "version 1 is in use: a changed",
        ),
        ({"version": 2, "model": "other"}, "of model 'other'"),
        ({"version": 2, "servers": []}, "owned by no server"),
    ):
        write(path, **changed)
        for _ in range(2):
            serving.follow_shard_map()
            assert message in serving.status()["shard_map_error"]
        assert serving.status()["shard"]["owned"] == "0-3"
    path.unlink()
    serving.follow_shard_map()
    assert "No such file" in serving.status()["shard_map_error"]
    write(path, **owned_here([5], 2))
    serving.follow_shard_map()
    assert serving.status()["shard_map_error"] == ""
    assert serving.status()["shard"]["owned"] == "5"


def test_a_map_of_another_model_or_with_other_partitions(pool: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    servers = [{"address": HERE, "partitions": [0]}]
    for changed, message in (
        ({"model": "m"}, "is of model 'm', but this pool also has instance 'default@0'"),
        ({"partitions": 1, "servers": servers}, "has 1 partitions, but instance 'default@0' has 8"),
    ):
        write(path, **changed)
        with pytest.raises(InvalidArgument, match=message):
            Serving(settings(pool, server={"shard_map": path, "address": HERE}))


def test_ingest_follows_the_owned_and_followed_partitions(start: Start, tmp_path: Path) -> None:
    path = write(tmp_path / "map.json")
    serving = serve(start, path, ingest={"log": tmp_path / "log"})
    keys = np.arange(100, dtype=np.uint64)
    with DirectoryLog(tmp_path / "log") as log:
        publisher = Publisher(log, "default", tables=[TableSchema("fed", "f32", 4)])
        publisher.begin_continue(None)
        publisher.publish("fed", keys, np.full((100, 4), 2.5, np.float32))
        version = publisher.commit()

    def is_applied() -> bool:
        return bool(serving.status()["instances"][0]["applied_version"] >= version)

    wait_until(is_applied)
    assert followed_partitions(serving) == [0, 1, 2, 3]
    own_rows = int(np.count_nonzero(_native.partition_of(keys, 8) < 4))
    # Rows are served before they are counted.
    wait_until(lambda: serving.status()["ingest"]["rows"] == own_rows)
    write(path, **owned_here([1, 6], 2))
    serving.follow_shard_map()
    wait_until(is_applied)  # for partition 6, from the start of the log
    assert followed_partitions(serving) == [1, 6]
    there = {"address": "there:7070", "partitions": ["0-7"]}
    write(path, version=3, servers=[{"address": HERE, "partitions": [], "follows": [4]}, there])
    serving.follow_shard_map()
    assert serving.status()["shard"]["owned"] == "none"
    wait_until(lambda: followed_partitions(serving) == [4])
    write(path, **owned_here([], 4))
    serving.follow_shard_map()
    assert followed_partitions(serving) == []
    assert serving.status()["instances"][0]["applied_version"] == 0


def test_a_failed_restart_of_ingest_is_retried(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "map.json")
    serving = serve(start, path, ingest={"log": tmp_path / "log"})
    with monkeypatch.context() as patch:

        def fail(*args: object, **options: object) -> None:
            raise FailedPrecondition("the broker is away")

        patch.setattr("petps.server.ingest_part.start_ingest", fail)
        write(path, **owned_here([2], 2))
        for _ in range(2):
            serving.follow_shard_map()
            assert serving.status()["shard_map_error"] == "the broker is away"
    assert serving.status()["shard"]["owned"] == "2"
    serving.follow_shard_map()
    assert serving.status()["shard_map_error"] == ""
    wait_until(lambda: followed_partitions(serving) == [2])
