"""Texts that an operator writes: the shard map's file (JSON) and the configuration (TOML)."""

from __future__ import annotations

import json
from typing import Final

from petps import config
from petps.errors import InvalidArgument
from petps.server import shard_map

MAP: Final = {
    "model": "m",
    "version": 3,
    "partitions": 8,
    "servers": [
        {"address": "a:1", "partitions": ["0-3", 4]},
        {"address": "b:1", "partitions": ["5-7"], "follows": [0]},
    ],
}
CONFIG: Final = """
[pool]
path = "p"
[server]
port = 7070
[tables.items]
dim = 16
dtype = "f16"
default = 0.5
capacity = 1000
expire_after = "7d"
[ingest]
log = "kafka://h:9092/t"
[scrub]
every = "1d"
"""


def seeds() -> list[bytes]:
    """Return valid inputs."""
    texts = [b"C" + CONFIG.encode(), b"C[limits]\nin_flight = 4\n", b"M" + json.dumps(MAP).encode()]
    deep = [b"M" + b"[" * 4000, b"Ca=" + b"[" * 4000]
    return [*texts, *deep, b'M{"model":"m","version":0,"partitions":1,"servers":[]}']


def run(data: bytes) -> None:
    """Parse a text. Any exception but InvalidArgument is a finding."""
    try:
        if data[:1] == b"C":
            text = data[1:].decode("utf-8", errors="replace")
            parsed = config.parse(text, "fuzz")
            config.merge(parsed, {}, "fuzz")
        elif data[:1] == b"M":
            use(shard_map.parse(data[1:], "fuzz"))
    except InvalidArgument:
        return


def use(parsed: shard_map.ShardMap) -> None:
    """Ask a map what servers do, and write it as a file again."""
    again = shard_map.parse(json.dumps(parsed.as_json()).encode(), "again")
    assert again.as_json() == parsed.as_json()
    for address in [*(known for known, _ in parsed.owners.servers), *parsed.follows, "none:1"]:
        assert parsed.owned_by(address) == again.owned_by(address)
        assert parsed.ingested_by(address) == again.ingested_by(address)
        parsed.names(address)
