"""The schedule of faults, which follows from a seed: what is broken when, and for how long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

SERVERS: Final = ("s0", "s1", "s2", "s3")
PUSH_SERVERS: Final = ("u0", "u1")
ETCD: Final = ("e0", "e1", "e2")
KAFKA: Final = "k0"
CONTROLLERS: Final = ("m0", "m1")
TRAINER: Final = "t0"
CLIENTS: Final = ("c0", "c1")
NODES: Final = (*SERVERS, *PUSH_SERVERS, *ETCD, KAFKA, *CONTROLLERS, TRAINER, *CLIENTS)

# How often each kind comes, relative to the others, and on which nodes.
KINDS: Final[dict[str, tuple[int, Sequence[str]]]] = {
    "kill": (6, (*SERVERS * 2, *PUSH_SERVERS, *ETCD, KAFKA, *CONTROLLERS, TRAINER)),
    "pause": (5, (*SERVERS * 2, *PUSH_SERVERS, *ETCD, KAFKA, *CONTROLLERS, TRAINER)),
    "restart": (2, (*SERVERS, *PUSH_SERVERS, *CONTROLLERS)),
    "cut": (4, (*SERVERS * 2, *PUSH_SERVERS, *ETCD, KAFKA, *CONTROLLERS)),
    "one-way": (4, (*SERVERS * 2, *PUSH_SERVERS, *ETCD, KAFKA, *CONTROLLERS)),
    "slow": (3, (*SERVERS * 2, *PUSH_SERVERS, *ETCD, KAFKA, *CLIENTS)),
    "clock": (2, (*SERVERS, *PUSH_SERVERS, *CONTROLLERS)),
    "disk": (2, (*SERVERS, *PUSH_SERVERS)),
}
GAP_SECONDS: Final = (2.0, 6.0)  # between the beginnings of two faults
LENGTH_SECONDS: Final = (0.5, 9.0)
LONG_SECONDS: Final = 25.0  # longer than a lease and replace_after: others get its partitions
LONG_EVERY: Final = 12  # one kill in this number
AT_ONCE: Final = 2  # faults at the same time
JUMPS_SECONDS: Final = (-86_400, -600, -5, 5, 600, 86_400)


@dataclass(frozen=True)
class Planned:
    """A fault of the schedule. begin and length: in seconds, from the start of the run.

    peers: the other ends of links; amount: of a delay in ms, or of a clock's jump in seconds.
    inward: of a one-way link, whether the node hears nothing (else nobody hears it).
    """

    kind: str
    node: str
    begin: float
    length: float
    peers: tuple[str, ...] = ()
    amount: float = 0.0
    loss: float = 0.0
    inward: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def make_schedule(seed: int, seconds: float, kinds: Sequence[str] = tuple(KINDS)) -> list[Planned]:
    """Return the faults of a run, in the order of their beginnings.

    Every kind comes once before any comes twice, so that a short run has them all. No node has two
    faults at the same time.
    """
    chance = random.Random(seed)
    faults: list[Planned] = []
    deck: list[str] = []
    at = chance.uniform(*GAP_SECONDS)
    while kinds and at < seconds - LENGTH_SECONDS[1]:
        if not deck:
            deck = _deck(chance, kinds, is_first=not faults)
        running = [fault for fault in faults if fault.begin + fault.length + 1.0 > at]
        if len(running) < AT_ONCE:
            fault = _planned(chance, deck.pop(), at, seconds)
            if fault.node not in {other.node for other in running}:
                faults.append(fault)
        at += chance.uniform(*GAP_SECONDS)
    return faults


def _deck(chance: random.Random, kinds: Sequence[str], *, is_first: bool) -> list[str]:
    deck = list(kinds) if is_first else [kind for kind in kinds for _ in range(KINDS[kind][0])]
    chance.shuffle(deck)
    return deck


def _planned(chance: random.Random, kind: str, at: float, seconds: float) -> Planned:
    node = chance.choice(KINDS[kind][1])
    length = chance.uniform(*LENGTH_SECONDS)
    if kind == "kill" and node in SERVERS and chance.randrange(LONG_EVERY) == 0:
        length = LONG_SECONDS
    length = min(length, seconds - at - 1.0)
    if kind in ("cut", "one-way", "slow"):
        others = [other for other in NODES if other != node]
        is_all = chance.random() < 0.4
        peers = others if is_all else chance.sample(others, chance.randint(1, 6))
        return Planned(
            kind, node, at, length, tuple(sorted(peers)),
            amount=round(chance.uniform(20, 300), 1) if kind == "slow" else 0.0,
            loss=round(chance.uniform(0, 0.05), 3) if kind == "slow" else 1.0,
            inward=chance.random() < 0.5,
        )  # fmt: skip
    amount = chance.choice(JUMPS_SECONDS) if kind == "clock" else 0.0
    return Planned(kind, node, at, length, amount=amount)


def links_of(fault: Planned) -> frozenset[tuple[str, str]]:
    """Return the (source, target) that a fault of links disturbs."""
    outward = {(fault.node, peer) for peer in fault.peers}
    inward = {(peer, fault.node) for peer in fault.peers}
    if fault.kind == "one-way":
        return frozenset(inward if fault.inward else outward)
    return frozenset(inward | outward)
