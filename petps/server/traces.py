"""Spans of this server, and the thread that exports them to an OpenTelemetry collector.

Owns:        the spans that wait, their number, the exporter, the counts of what was dropped.
Never does:  make a request or an apply wait: what finds no room is dropped and counted.
Called by:   lifecycle.
Invariants:  OpenTelemetry is imported only if the configuration has an endpoint.
Threads:     any thread may call add_version() and status(); start() and close() one thread.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from petps import _native
from petps.config import OtelConfig
from petps.errors import FailedPrecondition
from petps.log import ERROR, WARNING, Line

if TYPE_CHECKING:
    from petps.server.ingest.trace import VersionSpan

__all__ = ["Traces", "check_packages"]

PERIOD_SECONDS: Final = 0.5  # between two looks for spans
BATCH: Final = 512  # spans of one request to the collector
# Batches of one look. More spans than these wait for the next one, so that a flood of sampled
# requests takes a bounded share of the interpreter.
BATCHES: Final = 8
VERSIONS: Final = 4096  # spans of versions that may wait
EXPORT_SECONDS: Final = 5.0  # for one request to the collector, with the exporter's retries
CLOSE_SECONDS: Final = 2.0  # for the last spans, when the server stops
# Where the exporters of the extra are, by the scheme of the endpoint.
PACKAGES: Final = {
    "http": "opentelemetry.exporter.otlp.proto.http",
    "https": "opentelemetry.exporter.otlp.proto.http",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "grpcs": "opentelemetry.exporter.otlp.proto.grpc",
}


def check_packages(config: OtelConfig) -> None:
    """Raise FailedPrecondition if spans shall be exported and the extra is not installed."""
    if config.endpoint is None:
        return
    package = PACKAGES[urlsplit(config.endpoint).scheme]
    for name in ("opentelemetry.sdk", package):
        try:
            is_installed = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # a package above it is missing
            is_installed = False
        if not is_installed:
            raise FailedPrecondition(
                f"otel.endpoint needs the Python package {name}, which is not installed: "
                "pip install 'petps[otel]', or leave otel.endpoint out"
            )


class Traces:
    """The spans of a server. They wait until start(), and are exported until close()."""

    def __init__(self, config: OtelConfig, log: Callable[[str], None]) -> None:
        self._config = config
        self._log = log
        self._lock = threading.Lock()  # over the next three
        self._versions: deque[VersionSpan] = deque()
        self._exported = 0
        self._dropped = {"full": 0, "export": 0}
        self._dropped_by_workers = 0
        self._error = ""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._exporter: Any = None
        self._spans: Any = None

    def add_version(self, span: VersionSpan) -> None:
        """Export this span of ingest. Never waits for the collector."""
        with self._lock:
            if len(self._versions) < VERSIONS:
                self._versions.append(span)
            else:
                self._dropped["full"] += 1

    def start(self, server: _native.Server, tables: _native.Tables) -> None:
        """Begin to export. Raises FailedPrecondition if the exporter cannot be made."""
        from petps.server.spans import Spans, open_exporter

        try:
            self._exporter = open_exporter(self._config, EXPORT_SECONDS)
        except Exception as error:  # a wrong OTEL_* variable, such as the path of a certificate
            raise FailedPrecondition(
                f"otel.endpoint {self._config.endpoint}: {error or type(error).__name__}; look at "
                "the variables OTEL_EXPORTER_OTLP_*"
            ) from error
        self._spans = Spans(self._config, server.address, tables)
        self._server = server
        self._failures = _Failures()
        self._thread = threading.Thread(target=self._run, name="petps-otel", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the member ``otel`` of the status."""
        with self._lock:
            dropped = {**self._dropped}
            dropped["full"] += self._dropped_by_workers
            return {
                "endpoint": self._config.endpoint,
                "exported": self._exported,
                "dropped": dropped,
                "error": self._error,
            }

    def close(self) -> None:
        """Export what waits, if the collector takes it within CLOSE_SECONDS.

        Call it after the native server has stopped.
        """
        self._stopping.set()
        if self._thread is None:
            return
        self._thread.join(CLOSE_SECONDS)
        self._exporter.shutdown()  # ends the wait before a retry
        self._thread.join(CLOSE_SECONDS / 2)  # a daemon: a collector that is silent keeps nobody
        self._failures.close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.wait(PERIOD_SECONDS)
            try:
                self._export_waiting()
            except Exception as error:  # go on to serve, and to export the next spans
                self._note(f"{type(error).__name__}: {error}")

    def _export_waiting(self) -> None:
        for _ in range(BATCHES):
            batch = self._take()
            if not batch:
                return
            self._failures.last = ""
            is_exported = self._export(batch)
            with self._lock:
                if is_exported:
                    self._exported += len(batch)
                else:
                    self._dropped["export"] += len(batch)
            if not is_exported:
                self._note(self._failures.last or "the collector took no spans")
                return
            self._note("")

    def _take(self) -> list[Any]:
        """Return the next batch; an empty list if no span waits."""
        spans, dropped = self._server.spans(BATCH)
        batch = [self._spans.of_pull(span) for span in spans]
        with self._lock:
            self._dropped_by_workers = dropped
            versions = [self._versions.popleft() for _ in range(min(BATCH, len(self._versions)))]
        batch += [self._spans.of_version(version) for version in versions]
        return batch

    def _export(self, batch: Sequence[Any]) -> bool:
        try:
            return bool(self._exporter.export(batch).name == "SUCCESS")
        except Exception as error:  # whatever the exporter did not expect
            self._failures.last = f"{type(error).__name__}: {error}"
            return False

    def _note(self, error: str) -> None:
        """Log that exporting begins to fail, or that it works again; not each failure."""
        with self._lock:
            before, self._error = self._error, error
        if error and not before:
            text = (
                f"spans are not exported to {self._config.endpoint}, and are dropped until it "
                f"works again: {error}"
            )
            self._log(Line(text, "spans_not_exported", WARNING, reason=error))
        elif before and not error:
            self._log(Line(f"spans are exported to {self._config.endpoint}", "spans_exported"))


class _Failures(logging.Handler):
    """Keeps the last message of OpenTelemetry's loggers, which would write one for each failure."""

    def __init__(self) -> None:
        super().__init__(ERROR)
        self.last = ""
        self._logger = logging.getLogger("opentelemetry")
        self._propagated = self._logger.propagate
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.last = record.getMessage()

    def close(self) -> None:
        """Let the loggers write again."""
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated
        super().close()
