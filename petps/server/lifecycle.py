"""The life of a server: open -> recover -> serve -> ingest -> drain -> close."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from petps import log as process_log
from petps.config import Config
from petps.errors import FailedPrecondition, NotFound, PetpsError, Unavailable
from petps.log import ERROR, WARNING, Line
from petps.server.credentials import Credentials
from petps.server.native_lines import NativeLines
from petps.server.native_server import open_tables, start_server
from petps.server.readiness import partition_reason
from petps.server.reload import Reload
from petps.server.status import normalise_status
from petps.server.tables import ignored_tables

if TYPE_CHECKING:
    from petps.pool.export import Bar
    from petps.server.cluster import ClusterPart
    from petps.server.shard_map import MapFile, ShardMap
    from petps.server.traces import Traces

__all__ = ["Log", "Serving"]

# How long HTTP and gRPC wait until ingest has read the log to its end. Their imports occupy the
# interpreter for 0.2 s, which would delay the newest version. If the log takes longer, they start.
READ_FIRST_SECONDS: Final = 0.5
HOLD_SECONDS: Final = 10.0  # how long rows to be loaded wait for the end of ingest's batch

Log = Callable[[str], None]


class Serving:
    """A running server of a pool. Use it as a context manager, or call close().

    The constructor first imports most of what ingest needs, so that the newest version of the log
    is served soon after the first pull. Then it opens the pool, and from then on the server answers
    pulls. Then it starts ingest, and after the log is read, HTTP and gRPC. Finally it calls
    ``on_serving``.

    The constructor raises the errors of the pool, of the ports and of ingest's settings. Before
    that, it closes everything that it has opened.
    """

    def __init__(
        self,
        config: Config,
        *,
        log: Log = print,
        on_serving: Callable[[Serving], None] = lambda serving: None,
    ) -> None:
        config.check_doors()
        self._config = config
        self._log = log
        self._draining = self._is_open = False  # _is_open: every door is open
        self._ingest: Any = None
        self._is_paused = False  # ingest, by set_ingest()
        # Held while the ingest is replaced, and while its state is written to the status.
        self._ingest_lock = threading.Lock()
        self._watch: Any = None
        self._http: Any = None
        self._grpc: Any = None
        self._admin: list[Any] = []
        self._expiry: Any = None
        self._scrub: Any = None
        self._backups: Any = None
        self._growth: Any = None
        self._stuck: Callable[[], str] = lambda: ""
        self._surroundings: Any = None
        self._upkeep: list[Any] = []  # what runs beside the requests, until close()
        self._metrics: Any = None
        self._credentials = Credentials(config, log)
        self._traces: Traces | None = None
        if config.otel.endpoint is not None:
            from petps.server.traces import Traces, check_packages

            check_packages(config.otel)
            self._traces = Traces(config.otel, log)
        self._cluster: ClusterPart | None = None
        self.wake: Callable[[], None] = lambda: None  # the thread that calls follow_shard_map()
        self._map_file: MapFile | ClusterPart | None = None
        self._map: ShardMap | None = None
        if config.server.shard_map is not None:
            from petps.server.shard_map import MapFile

            self._map_file = MapFile(config.server.shard_map)
            self._map = self._map_file.read()
        self._map_error = self._report_error = ""
        self._ingested_partitions: list[int] | None = []
        if config.ingest.log is not None:
            import petps.delta  # noqa: F401
        self.opened_at = time.monotonic()
        self._tables = open_tables(config)
        try:
            if config.cluster.endpoints:
                from petps.server.cluster.start import open_cluster

                self._map_file = self._cluster = open_cluster(config, self._tables, log)
                self._map = self._cluster.read()
            owners = None if self._map is None else self._map.owners
            self._server = start_server(
                config, self._tables, owners, self._credentials.native_tls, self._credentials.gate,
                ([], []) if self._cluster is None else self._cluster.pauses.at_start(),
            )  # fmt: skip
            self._lines = NativeLines(self._server, log)
            self.open_ms = 1e3 * (time.monotonic() - self.opened_at)
            try:
                for line in ignored_tables(config, self._tables):
                    self._log(line)
                self._warn_of_unknown_address()
                self._server.set_status_member("insecure", json.dumps(bool(config.risks())))
                self._report_unready()
                self._follow_log()
                self._open_doors()
                on_serving(self)
            except BaseException:
                self._stop()
                raise
        except BaseException:
            self._tables.close()
            raise

    @property
    def port(self) -> int:
        """Return the native port."""
        return self._server.port

    @property
    def http_port(self) -> int | None:
        """Return the HTTP port, or None without HTTP."""
        return None if self._http is None else self._http.port

    @property
    def grpc_port(self) -> int | None:
        """Return the gRPC port; None without gRPC, or before the server serves it."""
        return None if self._grpc is None else int(self._grpc.port)

    @property
    def admin_port(self) -> int | None:
        """Return the admin port, or None without one."""
        return next((door.port for door in self._admin if door.port is not None), None)

    def status(self) -> dict[str, Any]:
        """Return what `petps status` shows, with ingest's current state and what is wrong."""
        self.report()
        status = self._counters()
        return status if self._watch is None else self._watch.complete(status)

    def _counters(self) -> dict[str, Any]:
        """Return the status without what the watch adds."""
        status: dict[str, Any] = normalise_status(json.loads(self._server.status_json()))
        status["unready"] = self.unready()  # also while it stops, when report() does nothing
        return status

    def report(self) -> None:
        """Update, in the status, ingest's state and why the server is not ready.

        serve() calls this each second.
        """
        if self._draining:
            return
        self._report_unready()
        for name, member in self._credentials.status().items():
            self._server.set_status_member(name, json.dumps(member))
        if self._expiry is not None:
            faults = {str(table): text for table, text in self._expiry.faults.items()}
            self._server.set_status_member("expiry_faults", json.dumps(faults))
        parts = {"backup": self._backups, "scrub": self._scrub, "otel": self._traces}
        for name, part in (parts | {"cluster": self._cluster, "grpc": self._grpc}).items():
            if part is not None:
                self._server.set_status_member(name, json.dumps(part.status()))
        if self._surroundings is not None:
            for name, member in self._surroundings.status().items():
                self._server.set_status_member(name, json.dumps(member))
        ingest = self._ingest  # a change of the shard map replaces it
        if ingest is None:
            return
        error = ""
        try:
            state = json.dumps(ingest.status())
            with self._ingest_lock:
                if self._ingest is ingest:
                    self._server.set_status_member("ingest", state)
        except Exception as failure:  # report any error, but continue to serve
            error = (
                "the status lacks ingest's state, but serving continues: "
                f"{type(failure).__name__}: {failure}"
            )
        if error != self._report_error:
            self._server.set_status_member("report_error", json.dumps(error))
            if error:
                self._log(Line(error, "status_incomplete", ERROR))
        self._report_error = error

    def _report_unready(self) -> None:
        self._server.set_status_member("unready", json.dumps(self.unready()))

    def follow_shard_map(self) -> None:
        """Apply a changed shard map: first to the served partitions, then to the ingested ones.

        If the map cannot be used, report the reason in the status and in the log, and keep the
        current map. serve() calls this about every second, always from the same thread.
        """
        if self._map_file is None:
            return
        error = ""
        try:
            self._map_file.follow(self._use_shard_map)
            self._follow_log()
        except PetpsError as failure:
            error = str(failure)
        if error != self._map_error:
            self._map_error = error
            self._server.set_status_member("shard_map_error", json.dumps(error))
            if error:
                self._log(Line(error, "shard_map_unusable", WARNING))
            else:
                self._log(Line("the shard map can be used again", "shard_map_usable"))

    def progress(self) -> dict[str, int | None]:
        """Return a count for each thread of this server, which grows; None: it has nothing to do.

        petps.server.progress compares them. It never waits.
        """
        from petps.server.progress import counts_of

        ingest = self._ingest
        return counts_of(self._server, None if ingest is None else ingest.ingest)

    def watch(self, stuck: Callable[[], str]) -> None:
        """Report what ``stuck`` returns as a fault: which thread makes no progress, or ''."""
        self._stuck = stuck

    def log_incidents(self) -> None:
        """Write the native server's new incidents to the log. serve() calls this each second."""
        self._lines.write()

    def follow_credentials(self) -> None:
        """Look at the files of [tls] and [access] now, as a thread does four times a second."""
        self._credentials.check()

    def reload(self, config: Config) -> None:
        """Apply the settings that can change while serving, and log those that need a restart.

        The shard map and the files of [tls] and [access] are read again too. Raises PetpsError if
        the configuration or one of these files cannot be used. Then nothing has changed.
        """
        config.check_doors()
        with self._ingest_lock:
            reload = Reload(self._config, config)
            merged = reload.merged
            self._credentials.move(merged)
            old, self._config = self._config, merged
            if self._ingest is not None:
                self._ingest.ingest.set_rate(self._config.ingest.rows_per_second or None)
        if old.log != merged.log:
            process_log.set_up(merged.log.format, merged.log.level)
        self._scrub.configure(merged.scrub)
        self._backups.configure(merged)
        self._growth.configure(merged)
        self.follow_credentials()
        self.follow_shard_map()
        for line in (*reload.lines(), *ignored_tables(config, self._tables)):
            self._log(line)

    def set_ingest(self, *, paused: bool | None = None, rows_per_second: int | None = None) -> None:
        """Pause, continue or limit ingest (0: do not limit) until the server ends or reloads.

        None: as it is. Raises FailedPrecondition if the server follows no log.
        """
        if self._config.ingest.log is None:
            raise FailedPrecondition("this server follows no log, so there is no ingest")
        with self._ingest_lock:
            if rows_per_second is not None:
                ingest = self._config.ingest.model_copy(update={"rows_per_second": rows_per_second})
                self._config = self._config.model_copy(update={"ingest": ingest})
            self._is_paused = self._is_paused if paused is None else paused
            if self._ingest is None:
                return
            (self._ingest.ingest.pause if self._is_paused else self._ingest.ingest.resume)()
            self._ingest.ingest.set_rate(self._config.ingest.rows_per_second or None)

    @contextmanager
    def ingest_held(self) -> Iterator[None]:
        """Apply no delta inside the context. Raises Unavailable if ingest does not give way."""
        ingest = self._ingest  # the lock keeps one from beginning
        with self._ingest_lock if ingest is None else ingest.ingest.held(HOLD_SECONDS):
            if self._ingest is not ingest:
                raise Unavailable("the shard map changed just now: try again")
            yield

    @contextmanager
    def loading(self, table: str, feed: str) -> Iterator[None]:
        """Hold ingest for rows to be loaded. Raises the errors of ClusterPart.check_load too."""
        with self.ingest_held():
            if self._cluster is not None:
                self._cluster.check_load(table, feed)
            yield

    def back_up(
        self, store: str, model: str | None, *, full: bool, bar: Bar, goes_on: Callable[[], bool]
    ) -> dict[str, Any]:
        """Write a backup. See petps.server.backups."""
        return dict(self._backups.run(store, model, full=full, bar=bar, goes_on=goes_on))

    def scrub(
        self, table: str, model: str | None, progress: Callable[[str, int, int], bool], paced: bool
    ) -> list[dict[str, Any]]:
        """Scrub a table, or all of a model, now. See petps.server.scrub."""
        return list(self._scrub.scrub(table, model, progress, paced=paced))

    def close(self) -> None:
        """Drain and close. Raises an error if the pool could not be closed cleanly."""
        if self._tables.closed:
            return
        self._stop()
        self._tables.close()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- steps

    def _use_shard_map(self, new_map: ShardMap) -> None:
        if new_map == self._map:
            return
        from petps.server.shard_map import ranges

        self._server.set_shard_map(new_map.owners)
        self._map = new_map
        partitions = ranges(new_map.owned_by(self._server.address))
        owned = ", ".join(map(str, partitions)) or "none"
        version = new_map.owners.version
        text = f"shard map version {version}: owned partitions are {owned}"
        self._log(Line(text, "shard_map_used", version=version, partitions=owned))
        self._warn_of_unknown_address()

    def _warn_of_unknown_address(self) -> None:
        """Say so if the map does not name this server, which then serves nothing."""
        address = self._server.address
        if self._map is not None and self._cluster is None and not self._map.names(address):
            text = (
                f"WARNING: the shard map does not name {address}, so this server owns nothing; "
                "--address must be an address of the map"
            )
            self._log(Line(text, "address_unknown", WARNING, address=address))

    def _shard_map(self) -> dict[str, Any]:
        if self._map is None:
            raise NotFound("there is no shard map: this server owns every partition")
        return self._map.as_json()

    def _open_doors(self) -> None:
        if self._ingest is not None:
            self._ingest.ingest.wait_for_end(READ_FIRST_SECONDS)
        self._credentials.open()
        self._start_watch()
        self._start_http()
        self._start_grpc()
        if self._traces is not None:
            self._traces.start(self._server, self._tables)
        from petps.server.admin import open_admin_door
        from petps.server.backups import Backups
        from petps.server.expiry import Expiry
        from petps.server.growth import Growth
        from petps.server.scrub import Scrubbing
        from petps.server.surroundings import Surroundings

        self._expiry = Expiry(self._tables, self._log)
        self._scrub = Scrubbing(self._config, self._tables, self._between_applies, self._log)
        self._backups = Backups(self._config, self._tables, self._log, ingest=lambda: self._ingest)
        self._surroundings = Surroundings(self._config.pool.path, self._log)
        self._growth = Growth(self._config, self._tables, self._log)
        self._upkeep += [self._growth, self._expiry, self._scrub, self._backups, self._surroundings]
        server = self._config.server
        address = None if server.admin_port is None else (server.host, server.admin_port)
        self._admin = open_admin_door(
            self._config.pool.path, self._tables, self, self._log, address, self._credentials.tls,
            gate=self._credentials.gate, has_admin=self._credentials.has_admin,
        )  # fmt: skip
        self._upkeep += self._admin
        self._join_cluster()
        self.report()  # a status that says ready then has all its parts
        self._is_open = True
        if self._grpc is not None:
            self._grpc.update_health()
        self.report()

    def _join_cluster(self) -> None:
        if self._cluster is None:
            return
        from petps.server.cluster.start import join

        join(
            self._cluster, self._config, self._tables, self._server,
            grpc_port=self.grpc_port, held=self.ingest_held, wake=lambda: self.wake(),
            now=lambda: (self._map, self._ingest, self._ingested_partitions), log=self._log,
        )  # fmt: skip
        self._upkeep.insert(0, self._cluster)

    def _between_applies(self, action: Callable[[], None], timeout: float) -> bool:
        ingest = self._ingest
        return ingest is not None and bool(ingest.ingest.between_applies(action, timeout))

    def _start_watch(self) -> None:
        from petps.server.members import Members, find_fault, others_of
        from petps.server.watch import Watch

        gate = self._credentials.gate
        members = Members(
            lambda: others_of(self._map, self._server.address),
            partial(find_fault, tls=self._config.tls, says_hello=gate.mode == "open"),
            self._log,
        )
        self._watch = Watch(
            stats=self._server.stats,
            status=self._counters,
            unready=self.unready,
            members=members.status,
            set_member=self._server.set_status_member,
            log=self._log,
            can_switch=gate.mode == "grants",
        )
        self._upkeep += [members, self._watch]

    def _start_http(self) -> None:
        server = self._config.server
        if not server.http:
            return
        # Imported late, so that it does not delay the first pull.
        from petps.server.changes import Changes, PageSwitch
        from petps.server.http import HttpServer

        gate = self._credentials.gate

        self._http = HttpServer(
            server.host,
            server.http_port,
            tls=self._credentials.tls,
            gate=gate,
            status=self.status,
            metrics=self._metrics_text,
            fault=self._fault,
            ready=self._unready,
            stuck=lambda: self._stuck() or None,
            shard_map=self._shard_map,
            history=self._watch.history,
            switch=PageSwitch(Changes(self._tables, gate, self._log), gate),
        )

    def _start_grpc(self) -> None:
        server = self._config.server
        if not server.grpc:
            return
        from petps.server.grpc import GrpcServer

        self._grpc = GrpcServer(
            server.host,
            server.grpc_port,
            self._tables,
            self._server.calls,
            body_bytes=server.limits.body_bytes,
            in_flight=server.limits.in_flight,
            status=self.status,
            shard_map=lambda: self._map,
            address=self._server.address,
            is_ready=lambda: self.unready() is None,
            tls=self._credentials.tls,
            gate=self._credentials.gate,
            has_traces=self._traces is not None,
        )

    def _metrics_text(self, accepted: str) -> tuple[bytes, str]:
        if self._metrics is None:
            from petps.server.metrics import Metrics  # imported at the first scrape

            self._metrics = Metrics(self.status, self._server.stats, self.unready)
        text: tuple[bytes, str] = self._metrics.text(accepted)
        return text

    def _follow_log(self) -> None:
        """Ingest the partitions that the map assigns to this server; without a map, all.

        Does nothing if ingest already runs for these partitions.
        """
        location = self._config.ingest.log
        partitions = self._own_partitions()
        if location is None or partitions == self._ingested_partitions:
            return
        self._stop_ingest()
        if partitions != []:
            from petps.server.ingest_part import start_ingest

            with self._ingest_lock:
                self._ingest = start_ingest(
                    self._config, self._tables, location, partitions, paused=self._is_paused,
                    trace=None if self._traces is None else self._traces.add_version,
                )  # fmt: skip
        self._ingested_partitions = partitions
        if self._is_open:  # otherwise _open_doors() reports, after the log is read
            self.report()

    def _own_partitions(self) -> list[int] | None:
        """Return the partitions that this server ingests, or None for all."""
        return None if self._map is None else self._map.ingested_by(self._server.address)

    def _stop_ingest(self) -> None:
        with self._ingest_lock:
            ingest, self._ingest = self._ingest, None
            if ingest is not None:
                self._server.set_status_member("ingest", "null")
        try:
            if ingest is not None:
                ingest.stop()
        finally:
            self._ingested_partitions = []  # not before: until then it may apply rows

    def _fault(self) -> str | None:
        if self._tables.info().failed:
            return (
                "a write-back of the pool failed: it is read-only until the server is restarted; "
                "check the disk first"
            )
        if stuck := self._stuck():
            return f"{stuck}: restart the server"
        return None

    def unready(self) -> str | None:
        """Return why the server is not ready, or None if it is. Never waits."""
        return self._fault() or self._unready()

    def _unready(self) -> str | None:
        """Return why the server is not ready, except for faults of the pool.

        It is ready if every door is open, every partition is followed and no partition lags more
        than ready_lag_seconds.
        """
        if self._draining:
            return "draining"
        if not self._is_open:
            return "starting: not every port is open yet"
        if self._config.ingest.log is None:
            return None
        ingest = self._ingest
        if ingest is None:
            return None if self._own_partitions() == [] else "the log is not followed yet"
        served = self._tables.resolve(self._config.ingest_model())
        reason = partition_reason(
            ingest.health(),
            served.name,
            self._config.server.ready_lag_seconds,
            served_progress=lambda partition: self._tables.progress(served.id, partition),
            shard_map=None if self._cluster is None else self._map,
            address=self._server.address,
        )
        if reason and self._is_paused:
            reason += "; an operator paused ingest: petps ingest resume POOL"
        return reason

    def _stop(self) -> None:
        """Stop administration, ingest, the native server, then HTTP.

        gRPC refuses new calls before the native server stops, and closes after it, because the
        native server answers the gRPC calls in flight.
        """
        self._draining = True
        self._credentials.close()
        for part in self._upkeep:
            part.close()
        if self._grpc is not None:
            self._grpc.drain()
        drain_seconds = self._config.server.drain_seconds
        for name, stop in (
            ("ingest", self._ingest.stop if self._ingest is not None else lambda: None),
            ("server", lambda: self._server.stop(round(1e3 * drain_seconds))),
        ):
            try:
                stop()
            except PetpsError as error:
                self._log(Line(f"{name}: {error}", "stop_incomplete", WARNING, code=error.code))
        if self._traces is not None:
            self._traces.close()
        if self._grpc is not None:
            self._grpc.close(drain_seconds)
        if self._http is not None:
            self._http.close()
