"""Prometheus metrics, computed at each scrape from the status and the counters."""

from __future__ import annotations

import math
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from petps import _native
from petps.server.metric_set import METRICS

__all__ = ["Metrics", "exposition", "latency_buckets"]

# Bounds of the latency buckets, from 16 us to 17 s: powers of two in ns, because these are also
# bounds of the native histogram's buckets.
BOUND_BITS: Final = range(14, 35)
FOLLOWED_STATES: Final = ("following", "passing")

# Names of the metrics, by the keys of the status where the two differ. `_total` is added below.
_SERVER_COUNTERS: Final = (
    "pulls", "keys", "rows_found", "misses", "push_groups", "pushes", "rows_pushed",
    "rows_refused", "hot_sets", "waits_for_pin", "waits_for_version", "connections_opened",
    "connections_refused", "connections_closed_for_cause", "connections_closed_idle",
    "connections_closed_for_room", "connections_kernel_tls", "handshakes_finished",
    "handshakes_failed", "handshakes_refused", "refused_for_memory",
)  # fmt: skip
_SERVER_GAUGES: Final = (
    "connections", "pushes_waiting", "memory_used_bytes", "memory_limit_bytes",
)  # fmt: skip
_GATHER_COUNTERS: Final = (
    "lists_copied", "lists_gathered", "lists_zerocopy", "zerocopy_sends", "zerocopy_copied",
    "zerocopy_refused",
)  # fmt: skip
_TABLE_COUNTERS: Final = {
    "pulls": "pulls", "keys": "keys", "misses": "misses", "evicted": "evicted_rows",
}  # fmt: skip
_TABLE_GAUGES: Final = {
    "rows": "rows",
    "capacity": "capacity_rows",
    "slots": "slots",
    "free_slots": "free_slots",
    "retired_slots": "retired_slots",
    "displaced": "displaced_rows",
    "index_bytes": "index_bytes",
    "header_bytes": "header_bytes",
    "allocator_bytes": "allocator_bytes",
}
_SCRUB: Final = {
    "rows": "petps_scrub_rows_total",
    "damaged": "petps_scrub_damaged_rows_total",
    "restored": "petps_scrub_repaired_rows_total",
    "missing": "petps_table_missing_rows",
    "last_pass": "petps_scrub_last_pass_timestamp_seconds",
}
_INGEST_COUNTERS: Final = (
    "records", "rows", "duplicates", "gaps", "zombies", "conflicts", "dead_letters", "catch_ups",
    "refusals",
)  # fmt: skip
_INGEST_GAUGES: Final = ("version", "seq", "lag_records", "lag_seconds")
_ACCESS_COUNTERS: Final = ("logins_failed", "requests_denied", "requests_limited")

_KINDS: Final = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": InfoMetricFamily,
}
Status = dict[str, Any]


class _Families:
    """The metrics of one scrape. Only those of METRICS can be added."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add a sample."""
        self._of(name).add_metric(labels, value)

    def add_histogram(
        self, name: str, buckets: Sequence[tuple[str, float]], total: float, *labels: str
    ) -> None:
        """Add a histogram: (upper bound, count of all values up to it), and the sum of all."""
        self._of(name).add_metric(labels, buckets, sum_value=total)

    def add_info(self, name: str, *labels: str) -> None:
        """Add a metric that is always 1."""
        facts = METRICS[name]
        self._of(name).add_metric([], dict(zip(facts.labels, labels, strict=True)))

    def all(self) -> Iterable[Metric]:
        """Return what was added."""
        return self._families.values()

    def _of(self, name: str) -> Any:
        if name not in self._families:
            facts = METRICS[name]
            is_info = facts.kind == "info"  # its name gets a suffix, and its labels are the value
            self._families[name] = _KINDS[facts.kind](
                name.removesuffix("_info") if is_info else name,
                facts.text,
                labels=() if is_info else facts.labels,
            )
        return self._families[name]


class _Collector(Collector):
    def __init__(
        self,
        status: Callable[[], Status],
        stats: Callable[[], Status],
        unready: Callable[[], str | None],
    ) -> None:
        self._status = status
        self._stats = stats
        self._unready = unready

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics as of now."""
        status, stats = self._status(), self._stats()
        families = _Families()
        families.add_info("petps_build_info", *_build())
        families.add("petps_server_ready", self._unready() is None)
        _add_server(families, status, stats)
        _add_pool(families, status)
        _add_tables(families, status, stats)
        _add_scrub(families, status)
        if status.get("ingest"):
            _add_ingest(families, status["ingest"], time.time() - status["uptime_s"])
        _add_shard(families, status)
        if status.get("backup") is not None:
            _add_backup(families, status["backup"])
        _add_credentials(families, status)
        if status.get("otel") is not None:
            _add_otel(families, status["otel"])
        return families.all()


def _build() -> tuple[str, str, str]:
    """Return the version and the revision of this build, and the version of Python."""
    match = re.fullmatch(r"petps (\S+)(?: \((\S+)\))?", _native.software)
    version, revision = (_native.software, None) if match is None else match.groups()
    return version or "", revision or "", platform.python_version()


def _add_server(families: _Families, status: Status, stats: Status) -> None:
    families.add("petps_server_insecure", bool(status.get("insecure", False)))
    families.add("petps_server_uptime_seconds", status["uptime_s"])
    for name in _SERVER_COUNTERS:
        families.add(f"petps_server_{name}_total", stats[name])
    for name in ("received", "sent"):
        families.add(f"petps_server_{name}_bytes_total", stats[f"bytes_{name}"])
    for name in _SERVER_GAUGES:
        families.add(f"petps_server_{name}", stats[name])
    for code, errors in stats["errors_by_code"].items():
        families.add("petps_server_errors_total", errors, code)
    for operation, latency in stats["latency"].items():
        _add_latency(families, "petps_server_latency_seconds", latency, operation)
    for name in _GATHER_COUNTERS:
        families.add(f"petps_transport_{name}_total", status["gather"][name])
    clock = status.get("clock")
    if clock is not None:
        families.add("petps_server_clock_jumps_total", clock["jumps"])
        families.add("petps_server_clock_last_jump_seconds", clock["last_jump_seconds"])
    grpc = status.get("grpc")
    if grpc is not None:
        families.add("petps_grpc_failed", bool(grpc["error"]))
        families.add("petps_grpc_restarts_total", grpc["restarts"])


def _add_latency(families: _Families, name: str, latency: Status, *labels: str) -> None:
    families.add_histogram(name, latency_buckets(latency), latency["sum_ns"] / 1e9, *labels)


def latency_buckets(latency: Status) -> list[tuple[str, float]]:
    """Return the counts of all values up to each bound.

    Native ``buckets`` are (largest value in ns, count of all values up to it), without empty ones.
    """
    result: list[tuple[str, float]] = []
    counted = iter(latency["buckets"])
    upper, count = next(counted, (math.inf, 0))
    below = 0
    for bits in BOUND_BITS:
        while upper <= 1 << bits:
            below = count
            upper, count = next(counted, (math.inf, 0))
        result.append((repr((1 << bits) / 1e9), below))
    result.append(("+Inf", latency["count"]))
    return result


def _add_pool(families: _Families, status: Status) -> None:
    pool, disk = status["pool"], status.get("disk")
    families.add("petps_pool_size_bytes", pool["bytes"])
    families.add("petps_pool_allocated_bytes", pool["allocated_bytes"])
    families.add("petps_pool_free_bytes", pool["free_bytes"])
    if disk is not None:
        families.add("petps_pool_disk_size_bytes", disk["bytes"])
        families.add("petps_pool_disk_free_bytes", disk["free_bytes"])
    families.add("petps_pool_failed", pool["failed"])
    families.add("petps_pool_walked", pool["walked"])


def _add_tables(families: _Families, status: Status, stats: Status) -> None:
    for instance in status["instances"]:
        families.add("petps_table_applied_version", instance["applied_version"], instance["name"])
    faults = status.get("expiry_faults", {})
    frozen = {entry["name"] for entry in status["instances"] if entry.get("frozen")}
    for table in status["tables"]:
        labels = table["instance"], table["name"]
        for key, name in _TABLE_COUNTERS.items():
            families.add(f"petps_table_{name}_total", table[key], *labels)
        for key, name in _TABLE_GAUGES.items():
            families.add(f"petps_table_{name}", table[key], *labels)
        pulled = stats["tables"].get(table["id"])
        if pulled is not None:
            _add_latency(families, "petps_table_latency_seconds", pulled["latency"], *labels)
        if table["expire_after"] > 0:
            has_failed = str(table["id"]) in faults or "0" in faults
            _add_expiry(families, table, has_failed, table["instance"] in frozen)


def _add_expiry(families: _Families, table: Status, has_failed: bool, is_frozen: bool) -> None:
    labels = table["instance"], table["name"]
    families.add("petps_table_expired_rows_total", table["expired"], *labels)
    families.add("petps_table_expire_after_seconds", table["expire_after"], *labels)
    if not is_frozen:  # a frozen instance keeps its rows, so nothing is late
        delay = table["expiry_delay"]
        late = math.inf if delay < 0 else delay
        families.add("petps_table_expiry_delay_seconds", late, *labels)
    families.add("petps_table_event_timestamp_seconds", table["event_time_ns"] / 1e9, *labels)
    families.add("petps_table_expiry_failed", has_failed, *labels)


def _add_scrub(families: _Families, status: Status) -> None:
    scrub = status.get("scrub", {"tables": {}, "faults": {}})
    faults = scrub["faults"]
    families.add("petps_scrub_every_seconds", scrub.get("every_seconds", 0))
    for table in status["tables"]:
        number, labels = str(table["id"]), (table["instance"], table["name"])
        families.add("petps_scrub_failed", number in faults or "0" in faults, *labels)
        for key, value in scrub["tables"].get(number, {}).items():
            families.add(_SCRUB[key], value or 0, *labels)
    families.add("petps_scrub_repair_failed", "repair" in faults)


def _add_ingest(families: _Families, ingest: Status, started_at: float) -> None:
    partitions = ingest["partitions"]
    for partition in partitions:
        number = str(partition["partition"])
        for name in _INGEST_COUNTERS:
            families.add(f"petps_ingest_{name}_total", partition[name], number)
        for name in _INGEST_GAUGES:
            value = partition[name]
            families.add(f"petps_ingest_{name}", math.inf if value is None else value, number)
        version_time = partition["version_time"] or started_at
        families.add("petps_ingest_version_timestamp_seconds", version_time, number)
        families.add("petps_ingest_state", 1, number, partition["state"])
    not_following = sum(partition["state"] not in FOLLOWED_STATES for partition in partitions)
    families.add("petps_ingest_partitions_not_following", not_following)
    families.add("petps_ingest_log_reachable", ingest["log_reachable"])
    families.add("petps_ingest_paused", ingest["paused"])
    families.add("petps_ingest_errors_total", ingest["errors"])
    for table, rows in ingest["refused"].items():
        families.add("petps_ingest_waiting_rows", rows, table)
    freshness = ingest["freshness_histogram"]
    bounds = [*map(repr, freshness["bounds"]), "+Inf"]
    counts = [*freshness["counts"], freshness["count"]]
    buckets = list(zip(bounds, counts, strict=True))
    families.add_histogram("petps_ingest_freshness_seconds", buckets, freshness["sum"])


def _add_shard(families: _Families, status: Status) -> None:
    families.add("petps_shard_map_version", status["shard"]["map_version"])
    families.add("petps_shard_map_failed", bool(status.get("shard_map_error")))
    cluster = status.get("cluster") or {"silent_seconds": 0, "removing": []}
    families.add("petps_cluster_etcd_silent_seconds", cluster["silent_seconds"])
    families.add("petps_cluster_removing_partitions", len(cluster["removing"]))
    for member in status.get("members") or []:
        if member["answers"] is not None:
            families.add("petps_shard_member_reachable", member["answers"], member["address"])


def _add_backup(families: _Families, backup: Status) -> None:
    last = backup["last"] or {}
    newest = backup["newest_at"] or 0
    families.add("petps_backup_last_success_timestamp_seconds", newest)
    families.add("petps_backup_last_size_bytes", last.get("bytes", 0))
    families.add("petps_backup_last_duration_seconds", last.get("seconds", 0))
    families.add("petps_backup_failed", backup["error"] is not None)
    families.add("petps_backup_failures_total", backup["failures"])
    families.add("petps_backup_written_total", backup["written"])
    families.add("petps_backup_every_seconds", backup["every_seconds"])


def _add_credentials(families: _Families, status: Status) -> None:
    access, tls = status.get("access"), status.get("tls")
    if access is not None:
        for name in _ACCESS_COUNTERS:
            families.add(f"petps_access_{name}_total", access[name])
        families.add("petps_access_reload_failed", bool(access["error"]))
        families.add("petps_access_grants", access["grants"])
        families.add("petps_access_expired_grants", len(access["expired"]))
    if tls is not None:
        families.add("petps_tls_reload_failed", bool(tls["error"]))
        families.add("petps_tls_certificate_expiry_timestamp_seconds", tls["expires_at"])


def _add_otel(families: _Families, otel: Status) -> None:
    families.add("petps_otel_exported_spans_total", otel["exported"])
    for reason, spans in otel["dropped"].items():
        families.add("petps_otel_dropped_spans_total", spans, reason)
    families.add("petps_otel_export_failed", bool(otel["error"]))


class Metrics:
    """The text of /metrics."""

    def __init__(
        self,
        status: Callable[[], Status],
        stats: Callable[[], Status],
        unready: Callable[[], str | None],
    ) -> None:
        """``status`` returns a normalised status, ``stats`` that of the native server.

        ``unready`` returns why the server is not ready, or None.
        """
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._registry.register(_Collector(status, stats, unready))

    def text(self, accepted: str) -> tuple[bytes, str]:
        """Return the metrics and their content type, for the value of an Accept header."""
        return exposition(self._registry, accepted)


def exposition(registry: CollectorRegistry, accepted: str) -> tuple[bytes, str]:
    """Return the metrics of a registry and their content type, for the value of an Accept header.

    The format is OpenMetrics if the header names it, and Prometheus' text format otherwise.
    """
    try:
        encoder, content_type = choose_encoder(accepted)
    except (ValueError, TypeError):  # a version that is no number
        encoder, content_type = choose_encoder("")
    return encoder(registry), content_type
