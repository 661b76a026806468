"""Prometheus metrics of clients, for programs that have prometheus_client.

petps-client does not depend on it: this module is imported only if connect() gets a registry.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter as Sums
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from petps_client import _native
from petps_client.errors import PetpsError, ResourceExhausted

__all__ = ["CollectorRegistry", "MeasuredClient"]

T = TypeVar("T")
LABELS: Final = ("client", "operation")
# Upper bounds in seconds: from a pull over a local network to beyond the default deadline.
BOUNDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip


class _Metrics:
    """The metrics of all clients of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.latency = Histogram(
            "petps_client_latency_seconds",
            "From a call to its result or its error, with all retries.",
            LABELS,
            buckets=BOUNDS,
            registry=registry,
        )
        self.errors = Counter(
            "petps_client_errors",
            "Calls that failed, by the name of the code.",
            (*LABELS, "code"),
            registry=registry,
        )
        self.servers = _Servers()
        registry.register(self.servers)


class _Servers(Collector):
    """How each server was for the clients of one registry. Asks no server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # over all that follows
        self._clients: weakref.WeakSet[MeasuredClient] = weakref.WeakSet()
        self._failures: Sums[tuple[str, str]] = Sums()  # by client and server; they never fall
        self._hedges: Sums[str] = Sums()  # by client

    def add(self, client: MeasuredClient) -> None:
        """Count the failures of this client too."""
        with self._lock:
            self._clients.add(client)

    def remove(self, client: MeasuredClient) -> None:
        """Count its last failures. Call it before the client is closed."""
        with self._lock:
            if client in self._clients:
                self._take(client)
                self._clients.discard(client)

    def _take(self, client: MeasuredClient) -> list[tuple[str, bool]]:
        """Add what is new. Return whether each server is live."""
        counts = client.server_counts()
        for server, failures, _ in counts:
            before = client.failures_taken.get(server, 0)
            # Fewer than before: the client has found the server again, at another address.
            self._failures[client.name, server] += failures - (before if failures >= before else 0)
            client.failures_taken[server] = failures
        hedges = client.pull_counts()["hedges"]
        self._hedges[client.name] += hedges - client.hedges_taken
        client.hedges_taken = hedges
        return [(server, is_live) for server, _, is_live in counts]

    def describe(self) -> list[Metric]:
        """Return the metrics without values."""
        return [
            CounterMetricFamily(
                "petps_client_server_failures",
                "Requests that a server left without a reply, also if another one answered.",
                labels=("client", "server"),
            ),
            GaugeMetricFamily(
                "petps_client_server_live",
                "1, or 0 after several failures or a long silence, until the next reply.",
                labels=("client", "server"),
            ),
            CounterMetricFamily(
                "petps_client_hedges",
                "Requests to a second server, because the first one was slow.",
                labels=("client",),
            ),
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        failures, live, hedges = self.describe()
        assert isinstance(hedges, CounterMetricFamily)
        assert isinstance(failures, CounterMetricFamily)
        assert isinstance(live, GaugeMetricFamily)
        is_live: dict[tuple[str, str], bool] = {}
        with self._lock:
            for client in list(self._clients):
                for server, state in self._take(client):
                    labels = client.name, server
                    is_live[labels] = is_live.get(labels, True) and state
            for labels, count in self._failures.items():
                failures.add_metric(labels, count)
            for name, count in self._hedges.items():
                hedges.add_metric((name,), count)
        for labels, state in is_live.items():
            live.add_metric(labels, float(state))
        yield from (failures, live, hedges)


_of_registry: weakref.WeakKeyDictionary[CollectorRegistry, _Metrics] = weakref.WeakKeyDictionary()
_registering = threading.Lock()


def _metrics_of(registry: CollectorRegistry) -> _Metrics:
    """Return the metrics of a registry, which are registered at the first call."""
    with _registering:
        if registry not in _of_registry:
            _of_registry[registry] = _Metrics(registry)
        return _of_registry[registry]


class MeasuredClient:
    """A native client whose calls are counted. It has the methods of ``_native.Client``.

    ``name`` is the label `client`. Clients of one name are counted together.
    """

    def __init__(self, native: _native.Client, name: str, registry: CollectorRegistry) -> None:
        self._native = native
        self.name = name
        self.failures_taken: dict[str, int] = {}  # by server; of _Servers
        self.hedges_taken = 0
        self._metrics = _metrics_of(registry)
        self._metrics.servers.add(self)

    def close(self) -> None:
        """Count the last failures, and close the client."""
        self._metrics.servers.remove(self)
        self._native.close()

    def server_counts(self) -> list[tuple[str, int, bool]]:
        """Return the address, the failures and the state of each server that is asked now."""
        return self._native.server_counts()

    def pull_counts(self) -> dict[str, int]:
        """Return the counts of pulls and hedges."""
        return self._native.pull_counts()

    def pull(self, *arguments: Any) -> Any:
        """Pull, and count it."""
        return self._measure("pull", lambda: self._native.pull(*arguments))

    def push(self, *arguments: Any) -> Any:
        """Push, and count it."""
        return self._measure("push", lambda: self._native.push(*arguments), _error_of_push)

    def erase(self, *arguments: Any) -> Any:
        """Erase, and count it."""
        return self._measure("erase", lambda: self._native.erase(*arguments), _error_of_push)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def _measure(
        self,
        operation: str,
        call: Callable[[], T],
        error_of: Callable[[T], str | None] = lambda result: None,
    ) -> T:
        begun = time.perf_counter()
        code = None
        try:
            result = call()
            code = error_of(result)
            return result
        except PetpsError as error:
            code = error.code
            raise
        finally:
            labels = self.name, operation
            self._metrics.latency.labels(*labels).observe(time.perf_counter() - begun)
            if code is not None:
                self._metrics.errors.labels(*labels, code).inc()


def _error_of_push(outcome: tuple[str | None, Any]) -> str | None:
    """Return the code of a push to a full table, which has a result and an error text."""
    return None if outcome[0] is None else ResourceExhausted.code
