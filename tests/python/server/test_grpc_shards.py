"""ReadShardMap: the map as callers of gRPC see it, and the partition function of the documents."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

import petps.v1.petps_pb2 as messages
from petps import _native
from petps.errors import InvalidArgument
from petps.server import Serving
from petps.server.shard_map import parse
from tests.docs.pages import blocks_of
from tests.python.server.conftest import Start, Stub
from tests.python.server.grpc_calls import TIMEOUT, pack_keys, refusal_of
from tests.python.server.test_shard_map import HERE, document, write

ROOT = Path(__file__).resolve().parents[3]
READ = messages.ReadShardMapRequest
Connect = Callable[[Serving], Stub]

SERVERS = [
    {"address": "there:7070", "grpc_address": "there:7071", "partitions": [4, "5-6", 7]},
    {"address": HERE, "grpc_address": "here:7171", "partitions": ["0-3"]},
    {"address": "twin:7070", "partitions": ["0-3"]},
    {"address": "later:7070", "grpc_address": "later:7071", "partitions": [], "follows": [1]},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "map.json", servers=SERVERS, version=3)


@pytest.fixture
def serving(start: Start, path: Path) -> Serving:
    return start(server={"shard_map": path, "address": HERE})


def read(stub: Stub, known_version: int = 0, model: str = "default") -> Any:
    return stub.ReadShardMap(READ(model=model, known_version=known_version), timeout=TIMEOUT)


def groups_of(reply: Any) -> list[tuple[list[int], list[tuple[str, str, bool]]]]:
    return [
        (
            list(group.partitions),
            [(server.address, server.grpc_address, server.answered) for server in group.servers],
        )
        for group in reply.groups
    ]


def test_the_map_has_its_groups_and_the_addresses_of_both_doors(stub: Stub) -> None:
    for model in ("default", "default@0", ""):
        reply = read(stub, model=model)
        assert (reply.model, reply.version, reply.partitions) == ("default", 3, 8)
        assert reply.partitioning == messages.PARTITIONING_XXH3_64
        assert not reply.unchanged
        assert groups_of(reply) == [
            ([0, 1, 2, 3], [(HERE, "here:7171", True), ("twin:7070", "", False)]),
            ([4, 5, 6, 7], [("there:7070", "there:7071", False)]),
        ]


def test_without_a_map_the_server_owns_everything(start: Start, connect: Connect) -> None:
    reply = read(connect(start()))
    assert (reply.model, reply.version, reply.partitions) == ("default", 0, 8)
    assert reply.partitioning == messages.PARTITIONING_XXH3_64
    assert groups_of(reply) == [(list(range(8)), [("", "", True)])]


def test_a_known_map_is_not_sent_again(serving: Serving, stub: Stub, path: Path) -> None:
    assert read(stub, 2).groups
    reply = read(stub, 3)
    assert (reply.version, reply.unchanged, len(reply.groups)) == (3, True, 0)
    write(path, version=4, servers=document()["servers"])
    serving.follow_shard_map()
    reply = read(stub, 3)
    assert (reply.version, reply.unchanged) == (4, False)
    assert [server[0][0] for _, server in groups_of(reply)] == [HERE, "there:7070"]


def refuse_newer(stub: Stub, version: str) -> str:
    """Return the text of the error for a caller whose map is newer than the server's."""
    code, text, details = refusal_of(lambda: read(stub, 4))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert (details["petps-code"], details["petps-map-version"]) == ("UNAVAILABLE", version)
    return text


def test_a_server_with_an_older_map_says_so(stub: Stub) -> None:
    text = refuse_newer(stub, "3")
    assert "the server has shard map version 3, but the caller has version 4: retry" in text


def test_a_server_without_a_map_says_so_to_a_caller_that_has_one(
    start: Start, connect: Connect
) -> None:
    assert "the server has no shard map, but the caller has version 4" in refuse_newer(
        connect(start()), "0"
    )


def test_a_model_that_the_map_is_not_of_has_none(serving: Serving, stub: Stub) -> None:
    other = serving._tables.create_instance("other", "other@1", 8)
    code, text, _ = refusal_of(lambda: read(stub, model=other.name))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "the shard map of this server is not of model 'other'" in text


def test_an_unknown_model_is_refused(stub: Stub) -> None:
    code, message, details = refusal_of(lambda: read(stub, model="none"))
    assert (code, details["petps-code"]) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND")
    assert "none" in message
    assert "petps-map-version" not in details


def test_the_error_for_a_foreign_key_names_the_call(stub: Stub) -> None:
    keys = np.arange(100, dtype=np.uint64)
    foreign = int(keys[_native.partition_of(keys, 8) == 5][0])
    request = messages.PullRequest(table="items", keys=pack_keys(foreign))
    code, message, details = refusal_of(lambda: stub.Pull(request))
    assert (code, details["petps-map-version"]) == (grpc.StatusCode.ABORTED, "3")
    assert message.endswith("read the shard map again (gRPC: ReadShardMap)")


def test_reflection_knows_the_call(
    serving: Serving, channels: Callable[[Serving], grpc.Channel]
) -> None:
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channels(serving)))
    method = pool.FindServiceByName("petps.v1.Petps").methods_by_name["ReadShardMap"]
    assert method.output_type.fields_by_name["groups"].message_type.name == "ShardGroup"


def test_the_file_keeps_grpc_addresses() -> None:
    shard_map = parse(json.dumps(document(servers=SERVERS)).encode(), "f")
    assert shard_map.grpc == {
        "there:7070": "there:7071", HERE: "here:7171", "later:7070": "later:7071"
    }  # fmt: skip
    assert parse(json.dumps(shard_map.as_json()).encode(), "f") == shard_map


@pytest.mark.parametrize("text", ["", "here", "here:", ":7071", "here:0", "here:65536", "a b:1"])
def test_a_wrong_grpc_address_is_refused(text: str) -> None:
    servers = document()["servers"]
    servers[1]["grpc_address"] = text
    with pytest.raises(InvalidArgument, match=r"servers\[1\].grpc_address: .*write HOST:PORT"):
        parse(json.dumps(document(servers=servers)).encode(), "f")


def test_servers_of_different_partitions_have_different_grpc_addresses() -> None:
    servers = document()["servers"]
    servers[0]["grpc_address"] = servers[1]["grpc_address"] = "proxy:7071"
    with pytest.raises(InvalidArgument, match="here:7070 and there:7070 own different partitions"):
        parse(json.dumps(document(servers=servers)).encode(), "f")
    replicas = [{**server, "partitions": ["0-7"]} for server in servers]
    assert parse(json.dumps(document(servers=replicas)).encode(), "f").grpc[HERE] == "proxy:7071"


def test_the_partition_function_of_the_page_is_that_of_the_servers(seed: int) -> None:
    page = (ROOT / "docs/how-to/grpc.md").read_text()
    (code,) = [block.code for block in blocks_of(page) if "def partition_of" in block.code]
    names: dict[str, Any] = {}
    exec(code[: code.index("def packed")], names)  # the functions before the first call
    keys = np.random.default_rng(seed).integers(0, 1 << 64, 2000, np.uint64)
    keys[:4] = (0, 1, (1 << 32) - 1, (1 << 64) - 1)
    for partitions in (1, 8, 1000, 1024):
        expected = _native.partition_of(keys, partitions).tolist()
        assert [names["partition_of"](int(key), partitions) for key in keys] == expected


def test_the_format_gives_the_hashes_of_the_native_tests() -> None:
    golden = (ROOT / "tests/native/base/base_test.cc").read_text()
    text = (ROOT / "petps/server/FORMAT.md").read_text()
    rows = re.findall(r"^\| ([0-9^ -]+) \| (0x[0-9A-F]{16}) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for key, value in rows:
        number = (1 << 64) - 1 if "^" in key else int(key)
        assert f"partition_hash({number:#X}u), {value}u)".replace("0X", "0x") in golden
