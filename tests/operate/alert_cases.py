"""What each alert must see: the series of a healthy server, and of one with the failure.

Series are in promtool's notation, a value a minute: "5x180" stays 5 for three hours, "0+60x180"
grows by one each second. Failures that need no hour begin after minute 15.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["CASES", "HEALTHY", "Case"]

HOURS: Final = 180  # minutes of each series
WHO: Final = 'job="petps",instance="a:7072"'
DAY: Final = 86400


class Case(NamedTuple):
    """A failure: the series that it changes, and what the alert says then.

    ``labels`` are those beside alertname, severity, job and instance. ``after``: the minute at
    which the alert fires; before ``silent`` it does not.
    """

    alert: str
    series: dict[str, str]
    labels: dict[str, str]
    summary: str
    after: int = 30
    silent: int | None = None


def _constant(value: float) -> str:
    return f"{value:g}x{HOURS}"


def _growing(per_minute: float) -> str:
    return f"0+{per_minute:g}x{HOURS}"


def _series(name: str, **labels: str) -> str:
    own = [f'{key}="{value}"' for key, value in labels.items()]
    return f"{name}{{{','.join([WHO, *own])}}}"


_TABLE: Final = {"model_instance": "default@0", "table": "items"}
_PARTITION: Final = {"partition": "3"}

# time() begins at 0 in these tests, so timestamps count from there.
HEALTHY: Final[dict[str, str]] = {
    _series("up"): _constant(1),
    _series("process_start_time_seconds"): _constant(1),
    _series("petps_build_info", version="1"): _constant(1),
    _series("petps_server_ready"): _constant(1),
    _series("petps_server_insecure"): _constant(0),
    _series("petps_server_uptime_seconds"): _growing(60),
    _series("petps_server_errors_total", code="STALE"): _growing(1),
    _series("petps_server_latency_seconds_count", operation="pull"): _growing(6000),
    _series("petps_server_latency_seconds_bucket", operation="pull", le="0.001"): _growing(6000),
    _series("petps_server_latency_seconds_bucket", operation="pull", le="+Inf"): _growing(6000),
    _series("petps_server_connections_refused_total"): _constant(7),
    _series("petps_server_handshakes_refused_total"): _constant(7),
    _series("petps_server_refused_for_memory_total"): _constant(7),
    _series("petps_server_rows_refused_total"): _constant(7),
    _series("petps_server_clock_jumps_total"): _constant(1),
    _series("petps_grpc_failed"): _constant(0),
    _series("petps_grpc_restarts_total"): _constant(7),
    _series("petps_pool_failed"): _constant(0),
    _series("petps_pool_size_bytes"): _constant(1000),
    _series("petps_pool_free_bytes"): _constant(300),
    _series("petps_pool_disk_size_bytes"): _constant(1000),
    _series("petps_pool_disk_free_bytes"): _constant(300),
    _series("petps_table_rows", **_TABLE): _constant(800),
    _series("petps_table_capacity_rows", **_TABLE): _constant(1000),
    _series("petps_table_evicted_rows_total", **_TABLE): _constant(0),
    _series("petps_table_pulls_total", **_TABLE): _growing(6000),
    _series("petps_table_keys_total", **_TABLE): _growing(6000),
    _series("petps_table_misses_total", **_TABLE): _growing(600),
    _series("petps_table_missing_rows", **_TABLE): _constant(0),
    _series("petps_table_expiry_failed", **_TABLE): _constant(0),
    _series("petps_table_expire_after_seconds", **_TABLE): _constant(1000),
    _series("petps_table_expiry_delay_seconds", **_TABLE): _constant(100),
    _series("petps_scrub_every_seconds"): _constant(600),
    _series("petps_scrub_last_pass_timestamp_seconds", **_TABLE): _growing(60),
    _series("petps_scrub_damaged_rows_total", **_TABLE): _constant(0),
    _series("petps_scrub_failed", **_TABLE): _constant(0),
    _series("petps_scrub_repair_failed"): _constant(0),
    _series("petps_ingest_state", **_PARTITION, state="following"): _constant(1),
    _series("petps_ingest_lag_seconds", **_PARTITION): _constant(1),
    _series("petps_ingest_log_reachable"): _constant(1),
    _series("petps_ingest_version_timestamp_seconds", **_PARTITION): _growing(60),
    _series("petps_ingest_paused"): _constant(0),
    _series("petps_shard_map_failed"): _constant(0),
    _series("petps_cluster_etcd_silent_seconds"): _constant(0),
    _series("petps_shard_member_reachable", member="b:7070"): _constant(1),
    _series("petps_backup_failed"): _constant(0),
    _series("petps_backup_every_seconds"): _constant(600),
    _series("petps_backup_last_success_timestamp_seconds"): _growing(60),
    _series("petps_access_logins_failed_total"): _growing(1),
    _series("petps_access_reload_failed"): _constant(0),
    _series("petps_access_expired_grants"): _constant(0),
    _series("petps_tls_reload_failed"): _constant(0),
    _series("petps_tls_certificate_expiry_timestamp_seconds"): _constant(30 * DAY),
}

CASES: Final = (
    Case(
        "PetpsDown",
        {_series("up"): _constant(0)},
        {},
        "a:7072 has not answered a scrape for a minute (up = 0).",
    ),
    Case(
        "PetpsNotReady",
        {_series("petps_server_ready"): "1x15 0x160"},
        {},
        "a:7072 is not ready (ready = 0); /readyz says why.",
        silent=17,
    ),
    Case(
        "PetpsRestartsOften",
        {_series("process_start_time_seconds"): "1x5 2x5 3x5 4x160"},
        {},
        "a:7072 has started 3 times again within an hour.",
        after=25,
        silent=17,
    ),
    Case(
        "PetpsPoolFailed",
        {_series("petps_pool_failed"): _constant(1)},
        {},
        "A write-back of a:7072 failed: its pool is read-only (failed = 1).",
    ),
    Case(
        "PetpsPoolNearlyFull",
        {
            _series("petps_pool_free_bytes"): "300x15 20x160",
            _series("petps_pool_disk_free_bytes"): "100x15 20x160",
            _series("petps_pool_disk_size_bytes"): _constant(150),
        },
        {},
        "The pool of a:7072 has room for 4% more.",
        silent=20,
    ),
    Case(
        "PetpsPoolNearlyFull",  # on a device
        {
            _series("petps_pool_free_bytes"): "300x15 40x160",
            _series("petps_pool_disk_free_bytes"): "_x160",
            _series("petps_pool_disk_size_bytes"): "_x160",
        },
        {},
        "The pool of a:7072 has room for 4% more.",
        silent=20,
    ),
    Case(
        "PetpsDiskNearlyFull",
        {_series("petps_pool_disk_free_bytes"): "300x15 90x160"},
        {},
        "The file system of the pool of a:7072 has 9% free.",
        silent=20,
    ),
    Case(
        "PetpsTableNearlyFull",
        {_series("petps_table_rows", **_TABLE): _constant(900)},
        _TABLE,
        "Table items of default@0 on a:7072 is 90% full.",
        silent=5,
    ),
    Case(
        "PetpsTableFull",
        {_series("petps_ingest_waiting_rows", table="items"): "_x15 12x160"},
        {"table": "items"},
        "12 rows have no room in table items of a:7072.",
        silent=14,
    ),
    Case(
        "PetpsTableFull",
        {_series("petps_server_rows_refused_total"): "7x15 7+60x160"},
        {},
        "300 rows have no room in a:7072.",
        silent=15,
    ),
    Case(
        "PetpsExpiryBehind",
        {_series("petps_table_expiry_delay_seconds", **_TABLE): _constant(300)},
        _TABLE,
        "Rows of table items on a:7072 do not expire in time (1: expiry failed; else seconds "
        "late): 300.",
        after=70,
        silent=50,
    ),
    Case(
        "PetpsExpiryBehind",
        {_series("petps_table_expiry_failed", **_TABLE): _constant(1)},
        _TABLE,
        "Rows of table items on a:7072 do not expire in time (1: expiry failed; else seconds "
        "late): 1.",
        after=70,
        silent=50,
    ),
    *(
        Case(
            "PetpsPartitionStopped",
            {
                _series("petps_ingest_state", **_PARTITION, state="following"): "1x15",
                _series("petps_ingest_state", **_PARTITION, state=state): "_x15 1x160",
            },
            {**_PARTITION, "state": state},
            f"Partition 3 of a:7072 has stopped: it is {state}.",
            silent=15,
        )
        for state in ("stale", "full", "conflict", "blocked")
    ),
    Case(
        "PetpsIngestLagHigh",
        {_series("petps_ingest_lag_seconds", **_PARTITION): "1x15 1+60x160"},
        _PARTITION,
        "Partition 3 of a:7072 is 14m 1s behind the log.",
        silent=16,
    ),
    Case(
        "PetpsBrokerUnreachable",
        {_series("petps_ingest_log_reachable"): "1x15 0x160"},
        {},
        "The log of a:7072 does not answer (reachable = 0).",
        silent=16,
    ),
    Case(
        "PetpsStaleRows",
        {_series("petps_ingest_version_timestamp_seconds", **_PARTITION): "0+60x10 600x170"},
        _PARTITION,
        "Partition 3 of a:7072 has had no new version for 1h 20m 0s.",
        after=90,
        silent=69,
    ),
    Case(
        "PetpsIngestPaused",
        {_series("petps_ingest_paused"): "0x5 1x175"},
        {},
        "Ingest of a:7072 has been paused for over an hour (paused = 1).",
        after=80,
        silent=60,
    ),
    Case(
        "PetpsDamagedRows",
        {_series("petps_table_missing_rows", **_TABLE): "0x15 2x160"},
        _TABLE,
        "2 rows of table items on a:7072 were damaged.",
        silent=15,
    ),
    Case(
        "PetpsDamagedRows",  # they have been restored already
        {_series("petps_scrub_damaged_rows_total", **_TABLE): "0x10 1x170"},
        _TABLE,
        "1 rows of table items on a:7072 were damaged.",
        silent=10,
    ),
    Case(
        "PetpsScrubOverdue",
        {_series("petps_scrub_last_pass_timestamp_seconds", **_TABLE): _constant(0)},
        _TABLE,
        "The last check of all rows of table items on a:7072 was 1h 30m 0s ago.",
        after=90,
        silent=79,
    ),
    Case(
        "PetpsScrubFailed",
        {_series("petps_scrub_failed", **_TABLE): _constant(1)},
        _TABLE,
        "Rows of a:7072 cannot be checked or restored (failed = 1); the status says why.",
        silent=4,
    ),
    Case(
        "PetpsScrubFailed",
        {_series("petps_scrub_repair_failed"): _constant(1)},
        {},
        "Rows of a:7072 cannot be checked or restored (failed = 1); the status says why.",
        silent=4,
    ),
    Case(
        "PetpsBackupFailed",
        {_series("petps_backup_failed"): _constant(1)},
        {},
        "The newest backup of a:7072 failed (failed = 1); the status says why.",
        silent=4,
    ),
    Case(
        "PetpsBackupOverdue",
        {_series("petps_backup_last_success_timestamp_seconds"): "0+60x10 600x170"},
        {},
        "a:7072 has had no backup for 40m 0s, over twice backup.every.",
        after=50,
        silent=30,
    ),
    Case(
        "PetpsBackupOverdue",  # there has never been one
        {_series("petps_backup_last_success_timestamp_seconds"): _constant(0)},
        {},
        "a:7072 has had no backup for 40m 0s, over twice backup.every.",
        after=40,
        silent=20,
    ),
    Case(
        "PetpsInsecure",
        {_series("petps_server_insecure"): _constant(1)},
        {},
        "The ports of a:7072 are open without TLS or credentials (insecure = 1).",
        silent=14,
    ),
    Case(
        "PetpsCertificateExpires",
        {_series("petps_tls_certificate_expiry_timestamp_seconds"): _constant(2 * DAY)},
        {},
        "The certificate of a:7072 expires in 1d 23h 30m 0s.",
    ),
    Case(
        "PetpsCertificateReloadFailed",
        {_series("petps_tls_reload_failed"): _constant(1)},
        {},
        "a:7072 cannot use its changed certificate (failed = 1); the status says why.",
    ),
    Case(
        "PetpsAccessReloadFailed",
        {_series("petps_access_reload_failed"): _constant(1)},
        {},
        "a:7072 cannot use its changed access file (failed = 1); the status says why.",
    ),
    Case(
        "PetpsGrantsExpired",
        {_series("petps_access_expired_grants"): _constant(2)},
        {},
        "2 grants of a:7072 have ended.",
        silent=14,
    ),
    Case(
        "PetpsLoginsFailing",
        {_series("petps_access_logins_failed_total"): "0x15 0+60x160"},
        {},
        "1 callers a second show a:7072 a credential that it does not know.",
        after=35,
        silent=20,
    ),
    Case(
        "PetpsErrorsHigh",
        {_series("petps_server_errors_total", code="STALE"): "0x15 0+600x160"},
        {"code": "STALE"},
        "a:7072 answers 10% of its requests with STALE.",
        silent=16,
    ),
    Case(
        "PetpsLatencyHigh",
        {
            _series("petps_server_latency_seconds_bucket", operation="pull", le="0.001"): _constant(
                0
            ),
            _series("petps_server_latency_seconds_bucket", operation="pull", le="0.1"): _constant(
                0
            ),
            _series("petps_server_latency_seconds_bucket", operation="pull", le="0.2"): _growing(
                6000
            ),
        },
        {},
        "1 % of the pulls of a:7072 take over 199ms.",
        silent=9,
    ),
    Case(
        "PetpsMissesHigh",
        {_series("petps_table_misses_total", **_TABLE): _growing(6000)},
        _TABLE,
        "100% of the keys that clients pull from table items of a:7072 are not there.",
        silent=14,
    ),
    Case(
        "PetpsConnectionsRefused",
        {_series("petps_server_connections_refused_total"): "7x15 7+60x160"},
        {},
        "a:7072 has refused 300 connections within 5 minutes.",
        silent=16,
    ),
    Case(
        "PetpsMemoryShort",
        {_series("petps_server_refused_for_memory_total"): "7x15 7+60x160"},
        {},
        "a:7072 has refused 300 requests within 5 minutes for lack of memory_bytes.",
        silent=15,
    ),
    Case(
        "PetpsShardUnreachable",
        {_series("petps_shard_member_reachable", member="b:7070"): "1x15 0x160"},
        {"member": "b:7070"},
        "a:7072 cannot reach b:7070 of its shard map (reachable = 0).",
        silent=16,
    ),
    Case(
        "PetpsShardMapFailed",
        {_series("petps_shard_map_failed"): _constant(1)},
        {},
        "a:7072 cannot use its changed shard map (failed = 1); the status says why.",
    ),
    Case(
        "PetpsEtcdSilent",
        {_series("petps_cluster_etcd_silent_seconds"): "0x15 90x160"},
        {},
        "a:7072 has taken no part in its cluster for 1m 30s: etcd does not answer, or the status "
        "says why.",
        silent=16,
    ),
    Case(
        "PetpsGrpcFailed",
        {_series("petps_grpc_failed"): _constant(1)},
        {},
        "The gRPC port of a:7072 is closed (failed = 1); the status says why.",
    ),
    Case(
        "PetpsGrpcRestarted",
        {_series("petps_grpc_restarts_total"): "7x20 8x160"},
        {},
        "The gRPC server of a:7072 has ended and was started again 1 times within 15 minutes.",
        silent=20,
    ),
    Case(
        "PetpsClockJumped",
        {_series("petps_server_clock_jumps_total"): "0x20 1x160"},
        {},
        "The clock of a:7072 has jumped 1 times within 15 minutes.",
        silent=20,
    ),
)
