"""The targets of the benchmarks, and how a result is judged by them."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["SECOND_TARGETS", "TARGETS", "bounds", "is_higher_better", "missed", "worst"]

Result = dict[str, Any]
Target = tuple[str, float, bool]  # field, bound, whether higher is better

# By name. The targets are those of the design.
TARGETS: Final[dict[str, Target]] = {
    "pull.inprocess": ("ratio", 0.75, True),
    "pull.inprocess.dram": ("ratio", 0.85, True),
    "pull.tcp": ("ratio", 0.8, True),
    "pull.tcp.dram": ("ratio", 0.8, True),
    "pull.tls": ("ratio", 0.8, True),
    "pull.tls.dram": ("ratio", 0.8, True),
    "pull.tcp.connections.1000": ("ratio", 0.7, True),  # throughput must not collapse
    "pull.tcp.connections.1000.dram": ("ratio", 0.7, True),
    "apply": ("ratio", 0.5, True),
    "apply.dram": ("ratio", 0.5, True),
    "apply.zipf.10m": ("ratio", 0.5, True),
    "apply.zipf.20m": ("ratio", 0.5, True),
    "push.zipf.10m": ("ratio", 0.5, True),
    "push.zipf.20m": ("ratio", 0.5, True),
    **{
        f"{how}.zipf.dirtied_bytes_per_row.{rows}": ("value", 2048.0, False)
        for how in ("apply", "push")
        for rows in ("2m", "10m", "20m")
    },
    "pull.p99_during_apply": ("ratio", 1.3, False),
    "pull.p99_during_apply.dram": ("ratio", 1.3, False),
    "capacity.grow.p99": ("ratio", 1.5, False),
    "capacity.grow.throughput": ("ratio", 0.85, True),
    "capacity.grow.unpaced": ("ratio", 3.0, False),
    "capacity.grow.paced": ("value", 60.0, False),
    "capacity.sampling": ("ratio", 0.97, True),
    "cluster.cpu_per_row.2": ("ratio", 1.15, False),
    "cluster.cpu_per_row.4": ("ratio", 1.15, False),
    "cluster.move.p99": ("ratio", 2.0, False),
    "cluster.move.p99.push_fed": ("ratio", 2.0, False),
    "cluster.move.failed_pulls": ("value", 0.0, False),
    "cluster.move.failed_pulls.push_fed": ("value", 0.0, False),
    "cluster.death.p999_seconds": ("value", 2.0, False),
    "cluster.death.failed_pulls": ("value", 0.0, False),
    "cluster.drain_error": ("ratio", 0.2, False),
    "router.cpu_per_row": ("ratio", 1.0, False),
    "router.throughput": ("ratio", 0.4, True),
    "peers.tcp.redis": ("ratio", 8.0, True),
    "peers.tcp.memcached": ("ratio", 5.0, True),
    "peers.inprocess.rocksdb": ("ratio", 2.5, True),
    "peers.inprocess.lmdb": ("ratio", 2.5, True),
    "peers.restart.redis": ("ratio", 0.1, False),
    "peers.restart.rocksdb": ("ratio", 0.1, False),
    "index.search.uniform": ("ratio", 0.9, True),
    "index.search.uniform.dram": ("ratio", 0.9, True),
    "index.search.zipf099": ("ratio", 0.9, True),
    "index.search.zipf099.dram": ("ratio", 0.9, True),
    "index.bucket_reads_per_hit.uniform": ("value", 1.05, False),
    "index.bucket_reads_per_hit.zipf099": ("value", 1.02, False),
    "index.bucket_reads_per_hit.churned": ("value", 1.05, False),
    "index.bucket_reads_per_hit.served": ("value", 1.02, False),
    "memory.overhead_bytes_per_row": ("value", 40.0, False),
    "reopen.ms.100k": ("value", 50.0, False),
    "reopen.ms.1m": ("value", 50.0, False),
    "reopen.ms.10m": ("value", 50.0, False),
    "reopen.ms.small_rows": ("ratio", 2.0, False),
    "reopen.first_pull": ("value", 100.0, False),
    "ingest.kafka": ("ratio", 0.7, True),
    "ingest.kafka_vs_apply": ("ratio", 0.8, True),
    "pull.p99_during_ingest.vs_consumer": ("ratio", 1.3, False),
    "checkpoint.recovery.2d": ("ratio", 1 / 4.7, False),
    "checkpoint.storage.2d": ("ratio", 0.4, False),
    "checkpoint.construct.2d": ("ratio", 1.15, False),
    "checkpoint.write_bytes.2": ("ratio", 1 / 17, False),  # Check-N-Run's Figure 17
    "checkpoint.write_bytes.8": ("ratio", 1 / 6, False),
    "checkpoint.capacity.2": ("ratio", 1 / 8, False),
    "checkpoint.capacity.8": ("ratio", 1 / 2.5, False),
    "checkpoint.loss.2.1": ("ratio", 1.0, False),  # within the noise that seeds make
    "checkpoint.loss.3.3": ("ratio", 1.0, False),
    "checkpoint.loss.4.20": ("ratio", 1.0, False),
    "checkpoint.loss.adam.4.20": ("ratio", 1.0, False),
    "codec.encode8": ("ratio", 0.3, True),
    "codec.adaptive4": ("ratio", 10.0, True),
    "codec.l2.adaptive.4": ("ratio", 1.05, False),
    "codec.l2.adaptive.3": ("ratio", 1.05, False),
    "codec.l2.adaptive.2": ("ratio", 1.05, False),
    "tracker.jagged_unique": ("ratio", 2.0, True),  # the worst cell of its grid
    "tracker.jagged_unique.hashed": ("ratio", 2.0, True),
    # Four buffers, and the encoder's and the filters' memory.
    "staging.process_peak_chunks": ("value", 4.5, False),
    "staging.pause": ("ratio", 1 / 3, False),
    "train.lookup_hidden": ("ratio", 0.95, True),
    # With one micro-batch nothing overlaps: less would mean that the measurement misses transfers.
    "train.exposed_communication.1": ("ratio", 0.95, True),
    "train.exposed_communication.2": ("ratio", 0.55, False),
    "train.exposed_communication.4": ("ratio", 0.3, False),
    "train.exposed_communication.8": ("ratio", 0.175, False),
    "train.simulator_error": ("ratio", 0.1, False),
    "train.checkpoint_stall.30s": ("ratio", 0.004, False),
    "train.checkpoint_stall.30steps": ("ratio", 0.02, False),
    "train.tracking": ("ratio", 0.01, False),
    "train.everything": ("ratio", 1.05, False),
}
# Results that must meet a second target too.
SECOND_TARGETS: Final[dict[str, Target]] = {"reopen.ms.small_rows": ("value", 50.0, False)}


def is_higher_better(result: Result) -> bool:
    """Return whether more of this result is better: its target says it, or else its unit."""
    target = TARGETS.get(result["name"])
    return str(result["unit"]).endswith("/s") if target is None else target[2]


def worst(results: list[Result]) -> list[Result]:
    """Return one result per name: the configuration with the worst ratio."""
    worst_by_name: dict[str, Result] = {}
    for result in results:
        name = result["name"]
        previous = worst_by_name.get(name)
        if previous is None:
            worst_by_name[name] = result
            continue
        pair = (result.get("ratio"), previous.get("ratio"))
        if pair[0] is None or pair[1] is None:
            raise SystemExit(f"{name} appears twice without a ratio to choose by")
        if (pair[0] < pair[1]) == is_higher_better(result):
            worst_by_name[name] = result
    fields = ("name", "medium", "value", "unit", "ratio_to", "ratio")
    return [{field: result.get(field) for field in fields} for result in worst_by_name.values()]


def _targets(result: Result) -> list[Target]:
    name = result["name"]
    return [targets[name] for targets in (TARGETS, SECOND_TARGETS) if name in targets]


def missed(result: Result) -> bool | None:
    """Return whether a result misses a target; None if it has no target."""
    targets = _targets(result)
    if not targets:
        return None
    return any(
        result[field] < bound if higher else result[field] > bound
        for field, bound, higher in targets
    )


def bounds(result: Result) -> str:
    """Return the bounds of a result as text; a bound of the value itself has its unit."""
    return " and ".join(
        f"{'>=' if higher else '<='} {bound:g}{' ' + result['unit'] if field == 'value' else ''}"
        for field, bound, higher in _targets(result)
    )
