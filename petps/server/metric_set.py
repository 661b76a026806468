"""Every metric of a server: name, type, labels and meaning.

docs/reference/metrics.md is made from this, and `Metrics` can show nothing else.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["METRICS", "MetricFacts", "metrics_markdown"]


class MetricFacts(NamedTuple):
    """Describes a metric as Prometheus shows it. ``kind``: counter, gauge, histogram or info."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


# A section has a title, a text in front of its table, and metrics: "NAME: TYPE by LABEL, LABEL",
# and below each its meaning.
_SECTIONS: Final = """\
## The build and the process
Beside this one there are `process_*` (memory, CPU seconds, start time, open files), `python_gc_*`
and `python_info`, as every Python program has them.
petps_build_info: info by version, revision, python
    Always 1; the labels say which build runs.

## Requests
Of the native port, of gRPC and of rdma together.
petps_server_ready: gauge
    1: the server is ready (/readyz).
petps_server_insecure: gauge
    1: the ports are open without TLS or without credentials (server.insecure).
petps_server_uptime_seconds: gauge
    Seconds since the server started.
petps_server_pulls_total: counter
    Pulls answered.
petps_server_keys_total: counter
    Keys requested by pulls.
petps_server_rows_found_total: counter
    Rows found by pulls.
petps_server_misses_total: counter
    Keys that pulls did not find.
petps_server_push_groups_total: counter
    Groups of pushes that were written together.
petps_server_pushes_total: counter
    Pushes answered.
petps_server_rows_pushed_total: counter
    Rows that pushes wrote or deleted.
petps_server_rows_refused_total: counter
    New keys of pushes that full tables refused.
petps_server_hot_sets_total: counter
    Hot sets received from clients.
petps_server_errors_total: counter by code
    Error replies, by the name of the code.
petps_server_latency_seconds: histogram by operation
    From the decoded request to the posted reply.
petps_server_waits_for_pin_total: counter
    Times a worker waited because its epoch list was full.
petps_server_waits_for_version_total: counter
    Times a pull waited until its version was applied.
petps_server_refused_for_memory_total: counter
    Requests and replies refused because of memory_bytes.
petps_server_memory_used_bytes: gauge
    Bytes that requests and replies of all connections hold.
petps_server_memory_limit_bytes: gauge
    Limit of petps_server_memory_used_bytes.
petps_server_pushes_waiting: gauge
    Pushes that wait to be written.
petps_server_clock_jumps_total: counter
    Times the system's clock moved against the monotonic clock by over a second.
petps_server_clock_last_jump_seconds: gauge
    By how much the clock moved the last time, forward above 0; 0: never.
petps_grpc_failed: gauge
    1: the gRPC server has ended, and its port cannot be opened again. Only with gRPC.
petps_grpc_restarts_total: counter
    Times the gRPC server had ended and was started again. Its connections were closed.

## Traces
They exist with `otel.endpoint`.
petps_otel_exported_spans_total: counter
    Spans that the collector took.
petps_otel_dropped_spans_total: counter by reason
    Spans that were lost. `full`: there were more than the server keeps until the next export;
    `export`: the collector did not take them.
petps_otel_export_failed: gauge
    1: the last export failed.

## Connections
Of the native port and of rdma.
petps_server_received_bytes_total: counter
    Bytes received.
petps_server_sent_bytes_total: counter
    Bytes sent.
petps_server_connections: gauge
    Connections open now.
petps_server_connections_opened_total: counter
    Connections opened.
petps_server_connections_refused_total: counter
    Connections refused: beyond the limit of connections.
petps_server_connections_closed_for_cause_total: counter
    Connections closed because they broke a rule or limit.
petps_server_connections_closed_idle_total: counter
    Connections closed after idle_seconds.
petps_server_connections_closed_for_room_total: counter
    Idle connections closed to make room for new ones.
petps_server_connections_kernel_tls_total: counter
    Connections opened whose TLS the kernel encrypts.
petps_server_handshakes_finished_total: counter
    TLS handshakes finished.
petps_server_handshakes_failed_total: counter
    TLS handshakes that failed or took too long.
petps_server_handshakes_refused_total: counter
    TLS handshakes refused: too many at once.
petps_transport_lists_copied_total: counter
    Replies that were copied, including those without rows.
petps_transport_lists_gathered_total: counter
    Replies whose rows the kernel gathered.
petps_transport_lists_zerocopy_total: counter
    Replies whose rows the network card gathered.
petps_transport_zerocopy_sends_total: counter
    Zero-copy sends.
petps_transport_zerocopy_copied_total: counter
    Zero-copy sends that the kernel copied nevertheless.
petps_transport_zerocopy_refused_total: counter
    Zero-copy sends that the kernel refused for lack of memory.

## The pool
`petps_pool_disk_*` exist only for a pool in a file.
petps_pool_size_bytes: gauge
    Bytes of the pool.
petps_pool_allocated_bytes: gauge
    Bytes of disk that a pool in a file takes; fewer than its size after petps shrink.
petps_pool_free_bytes: gauge
    Bytes of the pool that no table has. A pool in a file grows when it needs more.
petps_pool_disk_size_bytes: gauge
    Bytes of the file system that has the pool.
petps_pool_disk_free_bytes: gauge
    Bytes of that file system that the server's user may still write.
petps_pool_failed: gauge
    1: a write-back failed; the pool is read-only.
petps_pool_walked: gauge
    1: the background walk has finished.

## Tables
`model_instance` is `MODEL` or `MODEL@NAME`. A pull that names a table twice counts twice. A
latency exists after a table's first pull. `petps_table_expir*` and `petps_table_event_*` exist
for tables that expire.
petps_table_applied_version: gauge by model_instance
    Highest version committed in all partitions that this server owns.
petps_table_pulls_total: counter by model_instance, table
    Pulls that read the table.
petps_table_keys_total: counter by model_instance, table
    Keys that pulls requested of it.
petps_table_misses_total: counter by model_instance, table
    Keys that pulls did not find in it.
petps_table_latency_seconds: histogram by model_instance, table
    From the decoded request to the posted reply, of whole pulls that read the table.
petps_table_rows: gauge by model_instance, table
    Rows in the table.
petps_table_capacity_rows: gauge by model_instance, table
    Rows the table can hold.
petps_table_slots: gauge by model_instance, table
    Slots taken from the pool, used or free.
petps_table_free_slots: gauge by model_instance, table
    Free slots.
petps_table_retired_slots: gauge by model_instance, table
    Replaced rows whose slots wait for the last reader.
petps_table_displaced_rows: gauge by model_instance, table
    Rows outside their home buckets.
petps_table_index_bytes: gauge by model_instance, table
    Bytes of the index.
petps_table_header_bytes: gauge by model_instance, table
    Bytes of slot headers.
petps_table_allocator_bytes: gauge by model_instance, table
    Bytes of the allocator.
petps_table_evicted_rows_total: counter by model_instance, table
    Rows that a full table has evicted.
petps_table_missing_rows: gauge by model_instance, table
    Rows that were damaged and removed, and that nothing has written or deleted since.
petps_table_expired_rows_total: counter by model_instance, table
    Rows that have expired.
petps_table_expire_after_seconds: gauge by model_instance, table
    Seconds after which a row expires.
petps_table_expiry_delay_seconds: gauge by model_instance, table
    Event time for which a row may be served beyond expire_after; +Inf: no walk yet. Absent for
    instances that are frozen, which keep their rows.
petps_table_event_timestamp_seconds: gauge by model_instance, table
    The lowest event time of the partitions, in seconds since 1970; 0: no commit yet.
petps_table_expiry_failed: gauge by model_instance, table
    1: rows of the table cannot expire now; the status and the log say why.

## Scrubbing
petps_scrub_every_seconds: gauge
    Seconds from one pass over a table to the next (scrub.every); 0: no passes.
petps_scrub_rows_total: counter by model_instance, table
    Rows compared with their checksums.
petps_scrub_damaged_rows_total: counter by model_instance, table
    Damaged rows found.
petps_scrub_repaired_rows_total: counter by model_instance, table
    Missing rows restored from a base.
petps_scrub_last_pass_timestamp_seconds: gauge by model_instance, table
    When the last pass over the table was complete, in seconds since 1970; 0: never.
petps_scrub_failed: gauge by model_instance, table
    1: the table cannot be scrubbed, or its default row is damaged; the status says why.
petps_scrub_repair_failed: gauge
    1: missing rows cannot be restored from bases now; the status says why.

## Ingest
Only of a server that follows a log. The lag and the state need no answer of the log: while it is
away, the lag grows.
petps_ingest_log_reachable: gauge
    1: the log answered the last request for its end, which is made each second.
petps_ingest_lag_seconds: gauge by partition
    Seconds since everything in the log was applied; +Inf: never.
petps_ingest_lag_records: gauge by partition
    Messages that wait in the log, as of its last answer; +Inf: it has not answered.
petps_ingest_state: gauge by partition, state
    1: the state of the partition; others are not shown.
petps_ingest_partitions_not_following: gauge
    Partitions in any state but following and passing.
petps_ingest_paused: gauge
    1: an operator paused it.
petps_ingest_waiting_rows: gauge by table
    Rows that wait for room in a full table.
petps_ingest_freshness_seconds: histogram
    From publishing a message of rows, by the publisher's clock, to servable rows.
petps_ingest_version_timestamp_seconds: gauge by partition
    When the last commit that was applied was published, in seconds since 1970; before the first
    one since the start, when the server started.
petps_ingest_version: gauge by partition
    Last version committed.
petps_ingest_seq: gauge by partition
    Seq of the last applied message.
petps_ingest_records_total: counter by partition
    Messages applied.
petps_ingest_rows_total: counter by partition
    Rows and deletions applied.
petps_ingest_duplicates_total: counter by partition
    Messages skipped because they were applied before.
petps_ingest_gaps_total: counter by partition
    Times a partition stopped as incomplete.
petps_ingest_zombies_total: counter by partition
    Messages rejected because their run is older.
petps_ingest_conflicts_total: counter by partition
    Messages of another publisher of the same run.
petps_ingest_dead_letters_total: counter by partition
    Messages that could not be decoded.
petps_ingest_catch_ups_total: counter by partition
    Catch-ups from a base.
petps_ingest_refusals_total: counter by partition
    Times a partition stopped because its rows could not be stored.
petps_ingest_errors_total: counter
    Errors of the log, a base or a table.

## The shard map
`petps_shard_member_reachable` has the other servers of the map.
petps_shard_map_version: gauge
    Version of the shard map in use; 0: none, this server owns every partition.
petps_shard_map_failed: gauge
    1: a changed shard map cannot be used, and the one before stays in use.
petps_shard_member_reachable: gauge by member
    1: the native port of this other server of the map answers.
petps_cluster_etcd_silent_seconds: gauge
    Time since the etcd of [cluster] last answered and let this server do what it has to do; 0
    without [cluster].
petps_cluster_removing_partitions: gauge
    Partitions whose rows this server removes, because the map gives them to others.

## Backups
petps_backup_last_success_timestamp_seconds: gauge
    When the newest backup ended, in seconds since 1970; 0: none is known.
petps_backup_last_size_bytes: gauge
    Bytes that this server's last backup wrote; 0: it made none.
petps_backup_last_duration_seconds: gauge
    How long this server's last backup took; 0: it made none.
petps_backup_failed: gauge
    1: the newest try of a backup failed; the status and the log say why.
petps_backup_failures_total: counter
    Backups that failed.
petps_backup_written_total: counter
    Backups written.
petps_backup_every_seconds: gauge
    Seconds from one backup to the next; 0: no schedule.

## Credentials
`petps_tls_*` exist only with `[tls]`.
petps_access_logins_failed_total: counter
    Callers without a credential that the server knows, over all ports.
petps_access_requests_denied_total: counter
    Requests of callers without the role for them.
petps_access_requests_limited_total: counter
    Requests beyond the limits of their grant.
petps_access_reload_failed: gauge
    1: a changed access file cannot be used, and the grants before stay in use.
petps_access_grants: gauge
    Grants in use.
petps_access_expired_grants: gauge
    Grants that have ended.
petps_tls_reload_failed: gauge
    1: changed files of [tls] cannot be used, and the certificate before stays in use.
petps_tls_certificate_expiry_timestamp_seconds: gauge
    When the server's certificate in use expires, in seconds since 1970.
"""
_METRIC: Final = re.compile(r"^(petps_\w+): (\w+)(?: by (.*))?\n((?: {4}.*\n)+)", re.MULTILINE)


def _metrics_in(text: str) -> Iterator[MetricFacts]:
    for name, kind, labels, meaning in _METRIC.findall(text):
        words = " ".join(meaning.split())
        yield MetricFacts(name, kind, tuple(labels.split(", ")) if labels else (), words)


METRICS: Final = {facts.name: facts for facts in _metrics_in(_SECTIONS)}
_HEAD: Final = """\
# Metrics

<!-- Written by metrics_markdown() of petps/server/metric_set.py; a test compares the two. -->

A server answers `GET /metrics` on its HTTP port, in Prometheus' text format or in OpenMetrics,
whichever the scraper accepts, and compressed by gzip if it accepts that. A scrape waits neither for
the log's brokers nor for a client. [Watch a server](../how-to/monitor.md) has the alert rules and
the dashboards.

Counters count since the server's start. A label has a bounded number of values: tables, partitions,
codes, operations, and servers of the shard map. Prometheus adds `instance` and `job`.
"""


def metrics_markdown() -> str:
    """Return the page docs/reference/metrics.md."""
    lines = [_HEAD]
    for section in _SECTIONS.removeprefix("## ").split("\n## "):
        title, _, content = section.partition("\n")
        lines.append(f"## {title}\n")
        text = " ".join(_METRIC.sub("", content + "\n").split())
        if text:
            lines += [*textwrap.wrap(text, 100, break_on_hyphens=False), ""]
        lines += ["| metric | type | labels | meaning |", "|---|---|---|---|"]
        for name, kind, labels, meaning in _metrics_in(content + "\n"):
            shown = ", ".join(f"`{label}`" for label in labels)
            lines.append(f"| `{name}` | {kind} | {shown} | {meaning} |")
        lines.append("")
    return "\n".join(lines)
