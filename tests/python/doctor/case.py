"""Cases of findings: a change of a fact or of the configuration, and what follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from petps.doctor import Level
from petps.doctor.facts import (
    FileFacts,
    GrantFacts,
)
from petps.errors import Unavailable
from tests.python.doctor.fake import (
    POOL,
    FakeFacts,
    mountinfo,
    serve,
    superblock,
    topic,
    with_text,
)

FAULT, WARNING, NOTE = Level.FAULT, Level.WARNING, Level.NOTE
KAFKA = {"log": "kafka://k1:9092/t"}
TLS = {"certificate": "/tls/c.pem", "key": "/tls/k.pem"}
ACCESS = {"file": "/etc/access.json"}
DAY = 86_400.0
ONE_NODE = {"/sys/devices/system/node": ["node0", "node1"]}
GRANTS = [GrantFacts("fleet", ["read"])]
DEFAULT = "MemTotal: 67108864 kB\nSwapTotal: 0 kB\n"


@dataclass
class Case:
    """A change of a fact or of the configuration, and the finding that follows."""

    name: str
    level: Level
    seen: str
    change: Callable[[FakeFacts], Any] = lambda facts: None
    config: dict[str, Any] | None = None
    """Before and after the change."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Sections that the configuration has only after it."""

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}"


def mounted(*arguments: str) -> Callable[[FakeFacts], None]:
    return with_text("/proc/self/mountinfo", mountinfo(*arguments))


def on_device(**texts: str) -> Callable[[FakeFacts], None]:
    def change(facts: FakeFacts) -> None:
        facts.files[POOL] = FileFacts("device", 0o600)
        for name, text in texts.items():
            facts.texts[f"/sys/bus/dax/devices/my.pool/{name}"] = text

    return change


def with_file(path: str, **values: Any) -> Callable[[FakeFacts], None]:
    return lambda facts: facts.files.update({path: FileFacts(**{"kind": "file", **values})})


def served(**status: Any) -> Callable[[FakeFacts], None]:
    return lambda facts: serve(facts, **status)


def listener(port: int, address: str = "0100007F") -> str:
    line = f"   0: {address}:{port:04X} 00000000:0000 0A 0:0 00:0 0 0 0 99 1 x\n"
    return "  sl  local_address\n" + line


def every(*changes: Callable[[FakeFacts], Any]) -> Callable[[FakeFacts], None]:
    def change(facts: FakeFacts) -> None:
        for one_change in changes:
            one_change(facts)

    return change


def held_without_answer(facts: FakeFacts) -> None:
    serve(facts)
    facts.status = Unavailable("no answer")


def give_capacity(facts: FakeFacts, capacity: int) -> None:
    block = superblock()
    table = dataclasses.replace(block.tables[0], capacity=capacity)
    facts.pool = dataclasses.replace(block, tables=(table,))


def without_settings() -> Any:
    return dataclasses.replace(topic(), settings={})
