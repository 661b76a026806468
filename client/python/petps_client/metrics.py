"""Prometheus metrics of clients, for programs that have prometheus_client.

petps-client does not depend on it: this module is imported only if connect() gets a registry.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

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
        self._name = name
        self._metrics = _metrics_of(registry)

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
            labels = self._name, operation
            self._metrics.latency.labels(*labels).observe(time.perf_counter() - begun)
            if code is not None:
                self._metrics.errors.labels(*labels, code).inc()


def _error_of_push(outcome: tuple[str | None, Any]) -> str | None:
    """Return the code of a push to a full table, which has a result and an error text."""
    return None if outcome[0] is None else ResourceExhausted.code
