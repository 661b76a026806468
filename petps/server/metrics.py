"""Prometheus metrics, computed at each scrape from the status and the counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

__all__ = ["Metrics"]

# Bounds of the latency buckets, from 16 us to 17 s: powers of two in ns, because these are also
# bounds of the native histogram's buckets.
BOUND_BITS: Final = range(14, 35)

_COUNTERS: Final = {
    "pulls": "Pulls answered.",
    "keys": "Keys requested by pulls.",
    "rows_found": "Rows found by pulls.",
    "misses": "Keys that pulls did not find.",
    "push_groups": "Groups of pushes that were written together.",
    "pushes": "Pushes answered.",
    "rows_pushed": "Rows that pushes wrote or deleted.",
    "rows_refused": "New keys of pushes that full tables refused.",
    "hot_sets": "Hot sets received from clients.",
    "errors": "Error replies.",
    "stale": "Error replies STALE.",
    "wrong_shard": "Error replies WRONG_SHARD.",
    "waits_for_pin": "Times a worker waited because its epoch list was full.",
    "waits_for_version": "Times a pull waited until its version was applied.",
    "bytes_received": "Bytes received.",
    "bytes_sent": "Bytes sent.",
    "connections_opened": "Connections opened since the start.",
    "connections_refused": "Connections refused.",
    "connections_closed_for_cause": "Connections closed because they broke a rule or limit.",
    "connections_closed_idle": "Connections closed after idle_seconds.",
    "connections_closed_for_room": "Idle connections closed to make room for new ones.",
    "handshakes_finished": "TLS handshakes of the native port that have finished.",
    "handshakes_failed": "TLS handshakes of the native port that failed or took too long.",
    "handshakes_refused": "TLS handshakes of the native port beyond those at once.",
    "refused_for_memory": "Requests and replies refused because of memory_bytes.",
}
_SERVER_GAUGES: Final = {
    "connections": "Connections open now.",
    "pushes_waiting": "Pushes that wait to be written.",
    "memory_used_bytes": "Bytes that requests and replies of all connections hold.",
    "memory_limit_bytes": "Limit of petps_server_memory_used_bytes.",
}
_GATHER_COUNTERS: Final = {
    "lists_copied": "Replies that were copied, including those without rows.",
    "lists_gathered": "Replies whose rows the kernel gathered.",
    "lists_zerocopy": "Replies whose rows the network card gathered.",
    "zerocopy_sends": "Zero-copy sends.",
    "zerocopy_copied": "Zero-copy sends that the kernel copied nevertheless.",
    "zerocopy_refused": "Zero-copy sends that the kernel refused for lack of memory.",
}
_TABLE_GAUGES: Final = {
    "rows": "Rows in the table.",
    "capacity": "Rows the table can hold.",
    "slots": "Slots taken from the pool, used or free.",
    "free_slots": "Free slots.",
    "retired_slots": "Replaced rows whose slots wait for the last reader.",
    "displaced": "Rows outside their home buckets.",
    "index_bytes": "Bytes of the index.",
    "header_bytes": "Bytes of slot headers.",
    "allocator_bytes": "Bytes of the allocator.",
}
_EXPIRY_GAUGES: Final = {
    "expire_after": ("expire_after_seconds", "Seconds after which a row expires."),
    "expiry_delay": (
        "expiry_delay_seconds",
        "Event time for which a row may be served beyond expire_after; +Inf: no walk yet.",
    ),
    "event_time_ns": (
        "event_time_seconds",
        "The lowest event time of the partitions, in seconds since 1970; 0: no commit yet.",
    ),
}
_ACCESS_COUNTERS: Final = {
    "logins_failed": "Callers without a credential that the server knows, over all doors.",
    "requests_denied": "Requests of callers without the role for them.",
    "requests_limited": "Requests beyond the limits of their grant.",
}
_SCRUB_COUNTERS: Final = {
    "rows": ("petps_scrub_rows", "Rows compared with their checksums since the start."),
    "damaged": ("petps_scrub_damaged_rows", "Damaged rows found since the start."),
    "restored": ("petps_scrub_repaired_rows", "Missing rows restored from a base since the start."),
}
_SCRUB_GAUGES: Final = {
    "missing": (
        "petps_table_missing_rows",
        "Rows that were damaged and removed, and that nothing has written or deleted since.",
    ),
    "last_pass": (
        "petps_scrub_last_pass_time_seconds",
        "When the last pass over the table was complete, in seconds since 1970; 0: never.",
    ),
}
_INGEST_COUNTERS: Final = {
    "records": "Messages applied.",
    "rows": "Rows and deletions applied.",
    "duplicates": "Messages skipped because they were applied before.",
    "gaps": "Times a partition stopped as incomplete, since the process started.",
    "zombies": "Messages rejected because their run is older.",
    "conflicts": "Messages of another publisher of the same run.",
    "dead_letters": "Messages that could not be decoded.",
    "catch_ups": "Catch-ups from a base.",
    "refusals": "Times a partition stopped because its rows could not be stored.",
}
_INGEST_GAUGES: Final = {
    "version": "Last version committed.",
    "seq": "Seq of the last applied message.",
    "lag_records": "Messages that wait in the log.",
    "lag_seconds": "Seconds since everything in the log was applied; +Inf: never.",
}


class _Collector(Collector):
    def __init__(
        self,
        status: Callable[[], dict[str, Any]],
        stats: Callable[[], dict[str, Any]],
        unready: Callable[[], str | None],
    ) -> None:
        self._status = status
        self._stats = stats
        self._unready = unready

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics as of now."""
        status = self._status()
        stats = self._stats()
        yield from _server_metrics(stats)
        yield GaugeMetricFamily(
            "petps_server_ready",
            "1: the server is ready (/readyz).",
            float(self._unready() is None),
        )
        yield from _door_metrics(status)
        for name, text in _GATHER_COUNTERS.items():
            yield CounterMetricFamily(f"petps_transport_{name}", text, value=status["gather"][name])
        yield from _pool_metrics(status)
        yield from _table_metrics(status)
        yield from _scrub_metrics(status)
        yield from _ingest_metrics(status.get("ingest") or {})
        yield from _backup_metrics(status.get("backup"))


def _server_metrics(stats: dict[str, Any]) -> Iterator[Metric]:
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"petps_server_{name}", text, value=stats[name])
    for name, text in _SERVER_GAUGES.items():
        yield GaugeMetricFamily(f"petps_server_{name}", text, value=stats[name])
    latency = HistogramMetricFamily(
        "petps_server_latency_seconds",
        "From the decoded request to the posted reply.",
        labels=["operation"],
    )
    for operation, histogram in stats["latency"].items():
        latency.add_metric([operation], _buckets(histogram), sum_value=histogram["sum_ns"] / 1e9)
    yield latency


def _door_metrics(status: dict[str, Any]) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "petps_insecure",
        "1: the ports are open without TLS or without credentials (server.insecure).",
        float(status.get("insecure", False)),
    )
    access = status.get("access")
    if access is not None:
        for name, text in _ACCESS_COUNTERS.items():
            yield CounterMetricFamily(f"petps_access_{name}", text, value=access[name])
        yield GaugeMetricFamily(
            "petps_access_reload_failed",
            "1: a changed access file cannot be used, and the grants before stay in use.",
            float(bool(access["error"])),
        )
        yield GaugeMetricFamily("petps_access_grants", "Grants in use.", access["grants"])
        yield GaugeMetricFamily(
            "petps_access_expired_grants", "Grants that have ended.", len(access["expired"])
        )
    tls = status.get("tls")
    if tls is None:
        return
    yield GaugeMetricFamily(
        "petps_tls_reload_failed",
        "1: changed files of [tls] cannot be used, and the certificate before stays in use.",
        float(bool(tls["error"])),
    )
    yield GaugeMetricFamily(
        "petps_tls_certificate_expiry_timestamp_seconds",
        "When the server's certificate in use expires, in seconds since 1970.",
        tls["expires_at"],
    )


def _buckets(histogram: dict[str, Any]) -> list[tuple[str, float]]:
    """Return cumulative counts at the bounds. `buckets` has (value, count up to it)."""
    result: list[tuple[str, float]] = []
    for bits in BOUND_BITS:
        counts = [count for upper, count in histogram["buckets"] if upper <= 1 << bits]
        result.append((repr((1 << bits) / 1e9), float(counts[-1]) if counts else 0.0))
    result.append(("+Inf", float(histogram["count"])))
    return result


def _pool_metrics(status: dict[str, Any]) -> Iterator[Metric]:
    pool = status["pool"]
    yield GaugeMetricFamily("petps_pool_size_bytes", "Bytes of the pool.", value=pool["bytes"])
    yield GaugeMetricFamily(
        "petps_pool_allocated_bytes",
        "Bytes of disk that a pool in a file takes; fewer than its size after petps shrink.",
        value=pool["allocated_bytes"],
    )
    yield GaugeMetricFamily(
        "petps_pool_free_bytes", "Bytes of the pool that no table has.", value=pool["free_bytes"]
    )
    yield GaugeMetricFamily(
        "petps_pool_failed", "1: a write-back failed; the pool is read-only.", float(pool["failed"])
    )
    yield GaugeMetricFamily(
        "petps_pool_walked", "1: the background walk has finished.", float(pool["walked"])
    )
    yield GaugeMetricFamily(
        "petps_server_uptime_seconds", "Seconds since the server started.", status["uptime_s"]
    )
    yield GaugeMetricFamily(
        "petps_server_shard_map_version",
        "Version of the shard map in use; 0: none, this server owns every partition.",
        status["shard"]["map_version"],
    )
    versions = GaugeMetricFamily(
        "petps_table_applied_version",
        "Highest version committed in all partitions that this server owns.",
        labels=["instance"],
    )
    for instance in status["instances"]:
        versions.add_metric([instance["name"]], instance["applied_version"])
    yield versions


def _table_metrics(status: dict[str, Any]) -> Iterator[Metric]:
    for name, text in _TABLE_GAUGES.items():
        family = GaugeMetricFamily(f"petps_table_{name}", text, labels=["instance", "table"])
        for table in status["tables"]:
            family.add_metric([table["instance"], table["name"]], table[name])
        yield family
    expiring = [table for table in status["tables"] if table["expire_after"] > 0]
    for name, (metric, text) in _EXPIRY_GAUGES.items():
        family = GaugeMetricFamily(f"petps_table_{metric}", text, labels=["instance", "table"])
        for table in expiring:
            value = table[name] / 1e9 if name == "event_time_ns" else table[name]
            family.add_metric([table["instance"], table["name"]], math.inf if value < 0 else value)
        yield family
    evicted = CounterMetricFamily(
        "petps_table_evicted_rows",
        "Rows that a full table has evicted since the start.",
        labels=["instance", "table"],
    )
    for table in status["tables"]:
        evicted.add_metric([table["instance"], table["name"]], table["evicted"])
    yield evicted
    faults = status.get("expiry_faults", {})
    failed = GaugeMetricFamily(
        "petps_table_expiry_failed",
        "1: rows of the table cannot expire now; the status and the log say why.",
        labels=["instance", "table"],
    )
    for table in expiring:
        is_failed = str(table["id"]) in faults or "0" in faults
        failed.add_metric([table["instance"], table["name"]], float(is_failed))
    yield failed
    expired = CounterMetricFamily(
        "petps_table_expired_rows",
        "Rows that have expired since the start.",
        labels=["instance", "table"],
    )
    for table in expiring:
        expired.add_metric([table["instance"], table["name"]], table["expired"])
    yield expired


def _scrub_metrics(status: dict[str, Any]) -> Iterator[Metric]:
    scrub = status.get("scrub", {"tables": {}, "faults": {}})
    tables = [table for table in status["tables"] if str(table["id"]) in scrub["tables"]]
    kinds: list[tuple[type[CounterMetricFamily | GaugeMetricFamily], dict[str, tuple[str, str]]]]
    kinds = [(CounterMetricFamily, _SCRUB_COUNTERS), (GaugeMetricFamily, _SCRUB_GAUGES)]
    for kind, families in kinds:
        for name, (metric, text) in families.items():
            family = kind(metric, text, labels=["instance", "table"])
            for table in tables:
                value = scrub["tables"][str(table["id"])][name]
                family.add_metric([table["instance"], table["name"]], value or 0)
            yield family
    failed = GaugeMetricFamily(
        "petps_scrub_failed",
        "1: the table cannot be scrubbed, or its default row is damaged; the status says why.",
        labels=["instance", "table"],
    )
    for table in status["tables"]:
        is_failed = str(table["id"]) in scrub["faults"] or "0" in scrub["faults"]
        failed.add_metric([table["instance"], table["name"]], float(is_failed))
    yield failed
    yield GaugeMetricFamily(
        "petps_scrub_repair_failed",
        "1: missing rows cannot be restored from bases now; the status says why.",
        value=float("repair" in scrub["faults"]),
    )


def _ingest_metrics(ingest: dict[str, Any]) -> Iterator[Metric]:
    partitions = ingest.get("partitions", [])
    kinds: list[tuple[type[CounterMetricFamily | GaugeMetricFamily], dict[str, str]]] = [
        (CounterMetricFamily, _INGEST_COUNTERS),
        (GaugeMetricFamily, _INGEST_GAUGES),
    ]
    for kind, texts in kinds:
        for name, text in texts.items():
            family = kind(f"petps_ingest_{name}", text, labels=["partition"])
            for partition in partitions:
                value = math.inf if partition[name] is None else partition[name]
                family.add_metric([str(partition["partition"])], value)
            yield family
    if ingest:
        yield CounterMetricFamily(
            "petps_ingest_errors", "Errors of the log, a base or a table.", value=ingest["errors"]
        )
        yield GaugeMetricFamily(
            "petps_ingest_paused", "1: an operator paused it.", value=int(ingest["paused"])
        )
        followed_states = ("following", "passing")
        not_following = sum(partition["state"] not in followed_states for partition in partitions)
        yield GaugeMetricFamily(
            "petps_ingest_partitions_not_following",
            "Partitions in any state but following and passing.",
            value=not_following,
        )
        states = GaugeMetricFamily(
            "petps_ingest_state", "1: the state of the partition.", labels=["partition", "state"]
        )
        for partition in partitions:
            states.add_metric([str(partition["partition"]), partition["state"]], 1)
        yield states
        rows_waiting = GaugeMetricFamily(
            "petps_ingest_rows_waiting", "Rows that wait for room in a table.", labels=["table"]
        )
        for table, rows in ingest["refused"].items():
            rows_waiting.add_metric([table], rows)
        yield rows_waiting
    freshness = GaugeMetricFamily(
        "petps_ingest_freshness_milliseconds",
        "Time from publishing to servable, over the last messages.",
        labels=["quantile"],
    )
    for name, value in (ingest.get("freshness") or {}).items():
        if value is not None:
            freshness.add_metric([name.removesuffix("_ms")], value)
    yield freshness


def _backup_metrics(backup: dict[str, Any] | None) -> Iterator[Metric]:
    if backup is None:
        return
    last = backup["last"] or {}
    yield GaugeMetricFamily(
        "petps_backup_last_success_time_seconds",
        "When this server ended its last backup, in seconds since 1970; 0: it made none.",
        value=last.get("finished_at", 0),
    )
    yield GaugeMetricFamily(
        "petps_backup_last_bytes", "Bytes that the last backup wrote.", value=last.get("bytes", 0)
    )
    yield GaugeMetricFamily(
        "petps_backup_last_duration_seconds",
        "How long the last backup took.",
        value=last.get("seconds", 0),
    )
    yield GaugeMetricFamily(
        "petps_backup_failed",
        "1: the newest try of a backup failed; the status and the log say why.",
        value=float(backup["error"] is not None),
    )
    yield CounterMetricFamily(
        "petps_backup_failures", "Backups that failed.", value=backup["failures"]
    )
    yield CounterMetricFamily("petps_backup_written", "Backups written.", value=backup["written"])
    yield GaugeMetricFamily(
        "petps_backup_every_seconds",
        "Seconds from one backup to the next; 0: no schedule.",
        value=backup["every_seconds"],
    )


class Metrics:
    """The text of /metrics."""

    def __init__(
        self,
        status: Callable[[], dict[str, Any]],
        stats: Callable[[], dict[str, Any]],
        unready: Callable[[], str | None],
    ) -> None:
        """``status`` returns a normalised status, ``stats`` that of the native server.

        ``unready`` returns why the server is not ready, or None.
        """
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(status, stats, unready))

    def text(self) -> bytes:
        """Return the metrics in the Prometheus exposition format."""
        return generate_latest(self._registry)
