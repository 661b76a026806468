"""How many servers a load needs, from the published measurements of one server.

`python -m bench.scale.cost --rows 195g --dim 128 --pulls 1m` prints what each resource alone needs;
the largest number counts. docs/explanation/cost-model.md has the formulas and an example.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from petps import _native
from petps.cli.options import parse_rows
from petps.cli.output import bytes_text

PUBLISHED: Final = Path(__file__).resolve().parents[1] / "published" / "all.json"
KEY_BYTES: Final = 8
CLUSTER_FACTOR: Final = 1.31  # cluster.cpu_per_row.4 on a busy machine; on a quiet one it is 0.94
REPLY_OVERHEAD: Final = 1.05  # frames, presence bits, TCP and IP, over the bytes of rows
PARTITIONS_OF_A_SERVER: Final = 4  # at least, so that a plan can balance
PARTITIONS_MAX: Final = 1024  # of a model


@dataclass(frozen=True)
class Measured:
    """One server of the published run. The times are of a processor, for a row."""

    pull_seconds: float
    cluster_factor: float
    """Processor time of a row over that of one server, in pulls of several servers."""
    apply_rows_per_second: float
    """Ingest from Kafka, on the two processors of the published run."""
    row_bytes: int


@dataclass(frozen=True)
class Load:
    """The rows, and what is asked of them. pulls, updates: a second. hot: the part of the rows
    that pulls ask for within an hour, which should fit the page cache.
    """

    rows: int
    dim: int
    dtype: str
    pulls: int
    keys: int
    updates: int
    replicas: int
    hot: float


@dataclass(frozen=True)
class Machine:
    """A server. filled, busy: the parts of its disk, and of its processors and network, to use."""

    cores: int
    memory_bytes: int
    pool_bytes: int
    network_bits: float
    filled: float = 0.7
    busy: float = 0.6


def read_measured(path: Path = PUBLISHED) -> Measured:
    """Return what the published run measured."""
    results: list[dict[str, Any]] = json.loads(path.read_text())

    def of(name: str, field: str) -> float:
        return float(next(result[field] for result in results if result["name"] == name))

    return Measured(
        pull_seconds=of("peers.tcp.redis", "petps_server_cpu_s_per_million_rows") / 1e6,
        cluster_factor=CLUSTER_FACTOR,
        apply_rows_per_second=of("ingest.kafka", "value"),
        row_bytes=int(of("ingest.kafka", "row_bytes")),
    )


def servers(load: Load, machine: Machine, measured: Measured) -> dict[str, int]:
    """Return the number of servers that each resource needs on its own."""
    row_bytes = _native.row_bytes(load.dtype, load.dim)
    rows_pulled = load.pulls * load.keys
    # The processor's part of a row that is copied grows with its bytes; lookups do not. Taking all
    # of it as growing is too much for short rows, and right for those that were measured.
    weight = max(row_bytes / measured.row_bytes, 0.5)
    pulling = rows_pulled * measured.pull_seconds * measured.cluster_factor * weight
    applying = load.replicas * load.updates * 2 / measured.apply_rows_per_second * weight
    sent = rows_pulled * (row_bytes * REPLY_OVERHEAD + KEY_BYTES) * 8
    received = load.replicas * load.updates * (row_bytes + KEY_BYTES) * 8
    pool = load.replicas * pool_bytes(load)
    needed = {
        "disk of the pools": pool / (machine.pool_bytes * machine.filled),
        "memory for the hot rows": pool * load.hot / machine.memory_bytes,
        "processors": (pulling + applying) / (machine.cores * machine.busy),
        "network": (sent + received) / (machine.network_bits * machine.busy),
        "replicas": float(load.replicas),
    }
    return {name: max(math.ceil(count), 1) for name, count in needed.items()}


def pool_bytes(load: Load) -> int:
    """Return the bytes of one copy of all rows."""
    footprint = _native.footprint_of(_native.row_bytes(load.dtype, load.dim), load.rows)
    return footprint["records"] + footprint["index"] + footprint["rows"]


def facts(load: Load, machine: Machine, measured: Measured, count: int) -> Iterator[str]:
    """Yield what follows for that many servers."""
    row_bytes = _native.row_bytes(load.dtype, load.dim)
    copies = load.replicas * load.rows / count
    bits = machine.network_bits * machine.busy
    # More processors than those of the published run may read faster; that was not measured.
    rate = min(measured.apply_rows_per_second, bits / 8 / (row_bytes + KEY_BYTES))
    alone, together = copies / rate, copies / rate / max(count - 1, 1)
    of_pool = load.replicas * pool_bytes(load) // count
    yield f"a server has {copies:,.0f} rows, {bytes_text(of_pool)}"
    yield (
        f"the rows of a lost server are read again in {alone / 60:,.1f} minutes by one new server, "
        f"in {together / 60:,.1f} by all others together, after replace_after"
    )
    wanted = PARTITIONS_OF_A_SERVER * count
    models = math.ceil(wanted / PARTITIONS_MAX)
    yield f"partitions: {wanted:,} or more" + (
        f", so at least {models} models: one has {PARTITIONS_MAX:,} at most" if models > 1 else ""
    )


def main() -> None:
    """Print what a load needs."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.scale.cost")
    parser.add_argument("--rows", required=True, help="such as 195g")
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--pulls", required=True, help="a second, such as 1m")
    parser.add_argument("--keys", type=int, default=500, help="of a pull")
    parser.add_argument("--updates", default="1", help="changed rows a second")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--hot", type=float, default=0.05, help="part of the rows that is hot")
    parser.add_argument("--cores", type=int, default=64)
    parser.add_argument("--memory-gib", type=int, default=512)
    parser.add_argument("--pool-gib", type=int, default=15_000)
    parser.add_argument("--network-gbit", type=float, default=100)
    given = parser.parse_args()
    load = Load(
        rows=parse_rows(given.rows, "--rows"),
        dim=given.dim,
        dtype=given.dtype,
        pulls=parse_rows(given.pulls, "--pulls"),
        keys=given.keys,
        updates=parse_rows(given.updates, "--updates"),
        replicas=given.replicas,
        hot=given.hot,
    )
    machine = Machine(
        given.cores, given.memory_gib << 30, given.pool_gib << 30, given.network_gbit * 1e9
    )
    measured = read_measured()
    needed = servers(load, machine, measured)
    table = Table("resource", "servers")
    for name, count in sorted(needed.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{count:,}")
    console = Console()
    console.print(table)
    for line in facts(load, machine, measured, max(needed.values())):
        console.print(line, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
