"""The process of a server: its signals, its ready file, and the settings that it reads again."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from petps import _native
from petps.config import Config
from petps.errors import InvalidArgument, IoError, PetpsError
from petps.log import ERROR, WARNING, Line
from petps.regular_file import read_regular_file
from petps.server.lifecycle import Log, Serving
from petps.server.notify import Notifier
from petps.server.progress import Progress
from petps.wake import Wake

__all__ = [
    "Signals",
    "forbid_core_dumps",
    "raise_file_limit",
    "remove_ready_file",
    "serve",
    "write_ready_file",
]

HANDLED_SIGNALS: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# Descriptors that all doors of a server can take (native 4,096, gRPC and administration 1,024 each,
# HTTP 64), and files of the log, the pool and stores. A router takes more for its connections to
# servers: up to 32 for each token at each server.
OPEN_FILES: Final = 8192
PR_SET_DUMPABLE: Final = 4  # linux/prctl.h
READY_BYTES_MAX: Final = 1 << 16  # of a ready file, which has two paths
REPORT_SECONDS: Final = 1.0  # between two updates of ingest's state in the status
# A server that is not ready for a shorter time, such as one that catches up, leaves no line.
UNREADY_SECONDS: Final = 5.0


class Signals:
    """Handlers of the process's signals while the context is entered.

    SIGTERM and SIGINT request a drain and a close; a second SIGINT exits at once. SIGHUP requests a
    reload. SIGUSR1 and SIGUSR2 do nothing.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._is_reload_pending = False
        self._wake = Wake()
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in HANDLED_SIGNALS:
            self._old_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._is_reload_pending = True
        elif number in (signal.SIGTERM, signal.SIGINT):
            if number == signal.SIGINT and self.stopped_by == signal.SIGINT:
                os._exit(128 + number)  # as after a crash: the next open serves at once
            self.stopped_by = self.stopped_by or number
        self._wake.send()

    def wait(self, seconds: float) -> bool:
        """Wait ``seconds``, or until a signal arrives. Return False if the process must stop."""
        self._wake.wait(seconds)
        return self.stopped_by is None

    def wake(self) -> None:
        """End the running wait(), from any thread."""
        self._wake.send()

    def take_reload(self) -> bool:
        """Return whether a SIGHUP arrived since the last call."""
        reload, self._is_reload_pending = self._is_reload_pending, False
        return reload


def serve(
    config: Config,
    *,
    ready_file: Path | None = None,
    log: Log = print,
    reread: Callable[[], Config] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and close. Call it from the main thread.

    Args:
        config: The settings.
        ready_file: File to write atomically once every door is open, and to remove before the doors
            close. It is JSON with pid, host, port, http_port, grpc_port, admin_port, pool,
            opened_at (CLOCK_MONOTONIC seconds when the open of the pool began) and open_ms (from
            then until the server could answer pulls).
        log: Function that prints a line for the operator.
        reread: Function that reads the settings again, for SIGHUP.
    """
    if ready_file is not None and not ready_file.parent.is_dir():
        raise InvalidArgument(f"--ready-file: there is no folder {ready_file.parent}")
    raise_file_limit(log)
    if config.has_secrets():
        forbid_core_dumps()
    if config.ingest.log is not None:
        import petps.delta  # noqa: F401

        # Exclude the imported objects from garbage collection: a full collection over them would
        # pause the first apply for 25 ms.
        gc.freeze()
    notifier = Notifier(os.environ)
    try:
        with Signals() as signals:
            announce = partial(_announce, config=config, ready_file=ready_file, log=log)
            with notifier.extending():
                serving = Serving(config, log=log, on_serving=announce)
            serving.wake = signals.wake
            try:
                _run(serving, signals, notifier, reread, log)
                assert signals.stopped_by is not None
                log(Line(f"{signal.Signals(signals.stopped_by).name}: draining", "draining"))
                notifier.stopping()
                remove_ready_file(ready_file)
            finally:
                with notifier.extending():
                    serving.close()
            log(Line("closed cleanly", "closed"))
    finally:
        remove_ready_file(ready_file)


def _run(
    serving: Serving,
    signals: Signals,
    notifier: Notifier,
    reread: Callable[[], Config] | None,
    log: Log,
) -> None:
    """Report, reload and watch until a signal stops the server."""
    watch = Progress(serving.progress, notifier.watchdog_seconds)
    serving.watch(watch.stuck)
    notifier.ready(_sentence(serving))
    stuck = ""
    readiness = _Readiness(log)
    period = min(REPORT_SECONDS, (notifier.watchdog_seconds or REPORT_SECONDS * 4) / 4)
    while signals.wait(period):
        if signals.take_reload():
            notifier.reloading()
            _reload(serving, reread, log)
            watch.look()  # this thread has made progress: it does the reload
            notifier.ready(_sentence(serving))
        serving.follow_shard_map()
        serving.report()
        serving.log_incidents()
        before, stuck = stuck, watch.look()
        if stuck and not before:
            log(Line(f"{stuck}: this server is not healthy, restart it", "stuck", ERROR))
        elif before and not stuck:
            log(Line("all threads make progress again", "unstuck"))
        if not stuck:
            notifier.alive()
        readiness.look(serving.unready(), time.monotonic())
        notifier.set_status(_sentence(serving))
    serving.watch(lambda: "")  # this thread looks no more


class _Readiness:
    """The lines of the log that say when the server is not ready, and when it is ready again."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._since: float | None = None
        self._is_logged = False

    def look(self, reason: str | None, now: float) -> None:
        """Note why the server is not ready at ``now``; None if it is ready."""
        if reason is None:
            if self._is_logged:
                self._log(Line("ready again", "ready"))
            self._since, self._is_logged = None, False
        elif self._since is None:
            self._since = now
        elif not self._is_logged and now - self._since >= UNREADY_SECONDS:
            self._is_logged = True
            self._log(Line(f"not ready: {reason}", "not_ready", WARNING, reason=reason))


def _sentence(serving: Serving) -> str:
    """Return how the server is, for the status of the service manager."""
    reason = serving.unready()
    return "ready" if reason is None else f"not ready: {reason}"


def raise_file_limit(log: Log) -> None:
    """Let this process open as many files as the system permits.

    At the limit no door accepts a peer, and no file is read: also not the one of the grants.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass  # fs.nr_open was lowered below the limit that this process inherited
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        log(
            f"WARNING: this process may open {soft} files (ulimit -n), and all doors together "
            f"may take {OPEN_FILES}: raise the limit (systemd: LimitNOFILE), or whoever opens that "
            "many connections keeps others out"
        )


def forbid_core_dumps() -> None:
    """Keep the memory of this process, which has secrets, from core dumps and debuggers.

    The kernel then gives this process's files in /proc to root. Of ours, only the sample of pages
    in the status needs one (/proc/self/pagemap): another user's server then reports no pages.
    """
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise IoError(f"prctl(PR_SET_DUMPABLE): {os.strerror(ctypes.get_errno())}")


def _reload(serving: Serving, reread: Callable[[], Config] | None, log: Log) -> None:
    log(Line("SIGHUP: reloading", "reloading"))
    if reread is None:
        serving.follow_shard_map()
        return
    try:
        serving.reload(reread())
    except PetpsError as error:
        text = f"nothing is reloaded, and the current settings stay: {error}"
        log(Line(text, "reload_failed", WARNING, code=error.code))


def remove_ready_file(ready_file: Path | None) -> None:
    """Remove this process's ready file, but not that of a server that opened the pool since."""
    if ready_file is None or not ready_file.exists():
        return
    with contextlib.suppress(OSError, ValueError, KeyError):
        if json.loads(read_regular_file(ready_file, READY_BYTES_MAX))["pid"] == os.getpid():
            ready_file.unlink()


def _write_facts(serving: Serving, *, config: Config, ready_file: Path | None) -> None:
    if ready_file is None:
        return
    facts = {
        "pid": os.getpid(),
        "host": config.server.host,
        "port": serving.port,
        "http_port": serving.http_port,
        "grpc_port": serving.grpc_port,
        "admin_port": serving.admin_port,
        "pool": str(config.pool.path),
        "opened_at": serving.opened_at,
        "open_ms": round(serving.open_ms, 3),
    }
    write_ready_file(ready_file, facts)


def write_ready_file(ready_file: Path, facts: dict[str, Any]) -> None:
    """Write what others want to know of a process that serves, atomically."""
    # In a folder that all may write, a link may be at each name that others can guess.
    temporary = ready_file.with_name(f".{ready_file.name}.{os.urandom(8).hex()}")
    file = temporary.open("x")  # "x" follows no link
    try:
        with file:
            file.write(json.dumps(facts) + "\n")
        temporary.replace(ready_file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _announce(serving: Serving, *, config: Config, ready_file: Path | None, log: Log) -> None:
    _write_facts(serving, config=config, ready_file=ready_file)
    host = config.server.host
    host = f"[{host}]" if ":" in host else host
    is_encrypted = config.tls.certificate is not None
    doors = [f"petps{'+tls' if is_encrypted else ''}://{host}:{serving.port}"]
    if serving.http_port is not None:
        doors.append(f"http{'s' if is_encrypted else ''}://{host}:{serving.http_port}/")
    if serving.grpc_port is not None:
        doors.append(f"gRPC on {host}:{serving.grpc_port}")
    if serving.admin_port is not None:
        doors.append(f"administration on {host}:{serving.admin_port}")
    if risks := config.risks():
        log(Line(f"INSECURE: {'; '.join(risks)}", "insecure", WARNING, risks=risks))
    text = f"serving {', '.join(doors)} from {config.pool.path}"
    log(
        Line(
            f"{text} (opened in {serving.open_ms:.1f} ms)",
            "serving",
            software=_native.software,
            pool=str(config.pool.path),
            doors=doors,
            open_ms=round(serving.open_ms, 1),
        )
    )
