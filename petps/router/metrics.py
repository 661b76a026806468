"""Prometheus metrics of a router, computed at each scrape. docs/reference/router.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from petps.server.metrics import exposition, latency_buckets

__all__ = ["RouterMetrics"]

_COUNTERS: Final = {
    "pulls": "Pulls answered.",
    "pulls_without_thread": "Pulls that needed no thread of a call: they went well at once.",
    "keys": "Keys requested by pulls.",
    "rows_found": "Rows found by pulls.",
    "pushes": "Pushes answered.",
    "rows_pushed": "Rows that pushes wrote.",
    "waits_for_version": "Pulls that could wait for a version.",
    "hedges": "Requests to a second server, because the first was slow.",
    "hedges_won": "Requests whose keys these answered first.",
    "logins_failed": "Tokens that the servers did not know.",
    "connections_opened": "Connections of callers opened.",
    "connections_refused": "Connections refused: beyond a limit of connections.",
    "connections_closed_for_cause": "Connections closed because they broke a rule or limit.",
    "handshakes_failed": "TLS handshakes that failed or took too long.",
    "refused_for_memory": "Requests and replies refused because of memory_bytes.",
}
_GAUGES: Final = {
    "callers": "Tokens that the router serves now.",
    "calls_in_flight": "Requests at the servers now.",
    "logins_in_flight": "Logins of the native port at the servers now.",
    "connections": "Connections of callers open now.",
    "memory_used_bytes": "Bytes that requests and replies hold.",
    "memory_limit_bytes": "Limit of petps_router_memory_used_bytes.",
}
RELOAD_FAILED: Final = (
    "With [tls]. 1: changed files of it cannot be used, and the certificate before stays in use."
)
GRPC_FAILED: Final = (
    "1: the gRPC server has ended, and its port cannot be opened again. Only with gRPC."
)
GRPC_RESTARTS: Final = (
    "Times the gRPC server had ended and was started again. Its connections were closed."
)
EXPIRY: Final = "With [tls]. When the router's certificate expires."


class _Collector(Collector):
    def __init__(self, stats: Callable[[], dict[str, Any]], facts: dict[str, Callable[[], Any]]):
        self._stats, self._facts = stats, facts

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics as of now."""
        stats = self._stats()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"petps_router_{name}", text, value=stats[name])
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"petps_router_{name}", text, value=stats[name])
        ready = "1: the router is ready (/readyz)."
        yield GaugeMetricFamily("petps_router_ready", ready, value=self._facts["is_ready"]())
        insecure = "1: the ports are open without TLS or credentials (router.insecure)."
        yield GaugeMetricFamily(
            "petps_router_insecure", insecure, value=self._facts["is_insecure"]()
        )
        if (tls := self._facts["tls"]()) is not None:  # the names of a server's, for its alerts
            for name, text, value in (
                ("reload_failed", RELOAD_FAILED, bool(tls["error"])),
                ("certificate_expiry_timestamp_seconds", EXPIRY, tls["expires_at"]),
            ):
                yield GaugeMetricFamily(f"petps_tls_{name}", text, value=value)
        if (grpc := self._facts["grpc"]()) is not None:  # likewise
            failed, restarts = bool(grpc["error"]), grpc["restarts"]
            yield GaugeMetricFamily("petps_grpc_failed", GRPC_FAILED, value=failed)
            yield CounterMetricFamily("petps_grpc_restarts", GRPC_RESTARTS, value=restarts)
        errors = CounterMetricFamily(
            "petps_router_errors", "Error replies, by the name of the code.", labels=["code"]
        )
        for code, count in stats["errors_by_code"].items():
            errors.add_metric([code], count)
        yield errors
        latency = HistogramMetricFamily(
            "petps_router_latency_seconds",
            "From the decoded request to the posted reply.",
            labels=["operation"],
        )
        for operation, histogram in stats["latency"].items():
            buckets = latency_buckets(histogram)
            latency.add_metric([operation], buckets, sum_value=histogram["sum_ns"] / 1e9)
        yield latency
        servers = GaugeMetricFamily(
            "petps_router_server_live",
            "1: the server answers, as the callers of now have seen it.",
            labels=["member"],
        )
        for address, is_live in stats["servers"].items():
            servers.add_metric([address], is_live)
        yield servers


class RouterMetrics:
    """The text of /metrics."""

    def __init__(
        self,
        stats: Callable[[], dict[str, Any]],
        *,
        is_ready: Callable[[], bool],
        is_insecure: Callable[[], bool],
        tls: Callable[[], dict[str, Any] | None],
        grpc: Callable[[], dict[str, Any] | None],
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        facts = {"is_ready": is_ready, "is_insecure": is_insecure, "tls": tls, "grpc": grpc}
        self._registry.register(_Collector(stats, facts))

    def text(self, accepted: str) -> tuple[bytes, str]:
        """Return the metrics and their content type, for the value of an Accept header."""
        return exposition(self._registry, accepted)
