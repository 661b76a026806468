"""Attacks a real server for a while, and shows whether an honest client noticed.

`make soak ONLY=hostile` runs it, and ONLY=hostile-router a router before a server. The attackers of
tests/soak/attacks.py use every door at once. A good client pulls all the time and checks every row.
Its p99 is measured alone, while the same attackers attack an idle server beside it, and while they
attack the server. The second figure shows what the processor time of attackers and handshakes costs
on a small machine. The idle server has the same settings, because a listener that never answers
would slow the attackers down: each of their handshakes would wait for its time to end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import ssl
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import petps_client

import petps
from tests.certificates import Authority
from tests.soak.attacks import ADDRESSES, ATTACKS, HARMLESS, Result, Target, run_attack
from tests.system.routers import Router
from tests.system.servers import Server, connect, wait_until
from tests.system.servers import petps as run_petps

KEYS: Final = 100_000
DIM: Final = 64
FIRST_TABLE: Final = 1  # the id of a pool's first table, and at a router of a caller's
PULL: Final = 200
IDLE_CONNECTIONS: Final = 4096
MEMORY_BYTES: Final = 128 << 20
# What the server may hold beside limits.memory_bytes: sockets and calls of gRPC, the threads and
# TLS of HTTP, and what the allocator keeps for reuse.
OTHER_BYTES: Final = 256 << 20
# How long an honest peer of HTTP tries, while attackers take all places.
READ_SECONDS: Final = 60.0
ATTACKED_SECONDS: Final = 600.0  # until each attacker, a process of its own, has been refused
P99_OVER_ALONE: Final = 1.5
P99_OVER_IDLE: Final = 1.2
# The counters of the status that show that an attack was refused.
COUNTED: Final = {
    "slow native": "connections_closed_for_cause",
    "slow handshakes": "handshakes_failed",
    "half-open": "handshakes_failed",
    "never reading": "connections_closed_for_cause",
    "garbage": "handshakes_failed",
    "oversized": "connections_closed_for_cause",
    "idle": "connections_refused",
    "1,000 handshakes": "handshakes_refused",
    "bad tokens": "logins_failed",
}
CONTEXT: Final = multiprocessing.get_context("spawn")


@dataclass
class Report:
    """Holds what a run has found."""

    p99_ms: dict[str, float] = field(default_factory=dict)
    pulls: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """What must never happen: a wrong row, a failed pull, a limit that did not hold."""
    results: list[Result] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    during: dict[str, int] = field(default_factory=dict)
    memory_bytes: int = 0
    """The most that the server's memory grew."""
    probes: int = 0

    @property
    def over_alone(self) -> float:
        return self.p99_ms["attack"] / max(self.p99_ms["alone"], 1e-9)

    @property
    def over_idle(self) -> float:
        return self.p99_ms["attack"] / max(self.p99_ms["idle server"], 1e-9)

    def meets_targets(self) -> bool:
        """Return whether the good client noticed little enough."""
        if not all(self.pulls.values()):
            return False
        return self.over_alone <= P99_OVER_ALONE or self.over_idle <= P99_OVER_IDLE

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        lines = [f"{'attack':18} {'tried':>8} {'refused':>8}  counted by the server"]
        for result in self.results:
            name = COUNTED.get(result.name)
            grown = "" if name is None else f"{name} +{self.during[name] - self.before[name]}"
            lines.append(f"{result.name:18} {result.tried:8} {result.refused:8}  {grown}")
        for phase, p99 in self.p99_ms.items():
            lines.append(f"p99 {phase:14} {p99:8.2f} ms of {self.pulls[phase]} pulls")
        lines.append(f"p99 over alone: {self.over_alone:.2f}, target {P99_OVER_ALONE}, or")
        lines.append(f"    over the idle server: {self.over_idle:.2f}, target {P99_OVER_IDLE}")
        lines.append(f"memory grew by at most {self.memory_bytes >> 20} MiB")
        lines.append(f"/readyz answered {self.probes} times")
        return lines + [f"FAULT: {fault}" for fault in self.faults]


def rows_of(keys: np.ndarray) -> np.ndarray:
    """Return the row of each key, which no other key has."""
    rows: np.ndarray = keys[:, None].astype(np.float32) + np.arange(DIM, dtype=np.float32) / DIM
    return rows


def pull_and_check(url: str, ca: str, token: str, done: Any, found: Any, path: str) -> None:
    """Pull random keys until `done`. Write times and durations, and put faults into `found`."""
    random = np.random.default_rng(1)
    times, faults = [], []
    try:
        with connect(url, tls=petps_client.Tls(ca=ca), token=token) as client:
            while not done.is_set():
                keys = random.integers(0, KEYS, PULL).astype(np.uint64)
                start = time.monotonic()
                rows, present = client.pull("items", keys, return_mask=True)
                times.append((start, time.monotonic() - start))
                if not present.all() or not np.array_equal(rows, rows_of(keys)):
                    faults.append(f"wrong rows of keys {keys[:5]}...")
                    break
    except Exception as error:
        faults.append(f"the good client failed: {error!r}")
    np.save(path, np.array(times, np.float64).reshape(-1, 2))
    found.put(faults)


@contextmanager
def attackers(target: Target) -> Iterator[tuple[list[Result], Any]]:
    """Attack until the end of the block, which then has the results.

    The second value has what each attack has counted as refused so far.
    """
    done, queue = CONTEXT.Event(), CONTEXT.Queue()
    refused = CONTEXT.Array("q", len(ATTACKS))
    processes = [
        CONTEXT.Process(target=run_attack, args=(name, target, done, queue, refused), daemon=True)
        for name in ATTACKS
    ]
    results: list[Result] = []
    for process in processes:
        process.start()
    try:
        yield results, refused
        done.set()
        results += [queue.get(timeout=120) for _ in processes]
        results.sort(key=lambda result: list(ATTACKS).index(result.name))
    finally:
        done.set()
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()


def raise_file_limit() -> None:
    """Let this process and its children open as many files as they may."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


class Rig:
    """A server with TLS and an access file, or a router before it, to be attacked."""

    def __init__(
        self, folder: Path, idle: int = IDLE_CONNECTIONS, *, is_router: bool = False
    ) -> None:
        raise_file_limit()
        folder.mkdir(exist_ok=True)
        self.authority = Authority(folder)
        pair = self.authority.issue("server")
        access = folder / "access.json"
        self.tokens = {}
        for role in ("read", "admin"):
            out = folder / f"{role}.token"
            run_petps("token", "new", role, "--role", role, "--file", access, "--out", out)
            self.tokens[role] = out.read_text().strip()
        pool = folder / "pool"
        with petps.create(pool, durability="process") as opened:
            opened.create_table("items", dim=DIM, capacity=KEYS)
            for start in range(0, KEYS, 10_000):
                keys = np.arange(start, start + 10_000, dtype=np.uint64)
                opened.push("items", keys, rows_of(keys))
        limits = f"""
memory_bytes = {MEMORY_BYTES}
frame_ms = 2000
output_stall_ms = 2000
connections_per_peer = {idle // ADDRESSES}
"""
        tls = f"""
[tls]
certificate = "{pair.certificate}"
key = "{pair.key}"
"""
        config = folder / "petps.toml"
        config.write_text(f"""
[pool]
path = "{pool}"
[server]
admin_port = 0
workers = 2
[server.limits]{"" if is_router else limits}
[access]
file = "{access}"
{tls}""")
        self.folder = folder
        self._trust = self.authority.client_context()
        self._processes: list[Server | Router] = [Server(pool, "--config", config)]
        facts = self._processes[0].wait_ready()
        if is_router:
            config = folder / "router.toml"
            config.write_text(f"""
[router]
ca = "{self.authority.certificate}"
workers = 2
[router.limits]{limits}{tls}""")
            url = f"petps+tls://127.0.0.1:{facts['port']}"
            router = Router(url, folder, "--config", config, deadline_seconds=1.5)
            self._processes.append(router)
            facts = router.wait_ready()
        self.port, self._http_port = facts["port"], facts["http_port"]
        self.target = Target(
            native=self.port,
            http=self._http_port,
            grpc=facts["grpc_port"],
            admin=facts["grpc_port" if is_router else "admin_port"],
            ca=str(self.authority.certificate),
            token=self.tokens["read"],
            table=FIRST_TABLE,
            keys=KEYS,
            idle=idle,
        )

    def close(self) -> None:
        """End the processes."""
        for process in reversed(self._processes):
            process.kill()

    def read(self, path: str) -> bytes:
        """Return a page of HTTPS; a peer that came too late to be accepted tries again."""
        request = urllib.request.Request(
            f"https://127.0.0.1:{self._http_port}/{path}",
            headers={"Authorization": f"Bearer {self.tokens['admin']}"},
        )
        deadline = time.monotonic() + READ_SECONDS
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60, context=self._trust) as answer:
                    page: bytes = answer.read()
                return page
            except (ConnectionError, urllib.error.URLError) as error:
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                is_refused = isinstance(reason, ConnectionError | ssl.SSLEOFError)
                if not is_refused or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def status(self) -> Any:
        """Return the status by HTTPS."""
        return json.loads(self.read("status.json"))

    def counters(self) -> dict[str, int]:
        """Return the counters of the process, and of its access file if it has one."""
        status = self.status()
        both = status["stats"] | status.get(
            "access", {"logins_failed": status.get("logins_failed")}
        )
        return {name: value for name, value in both.items() if isinstance(value, int)}

    def memory(self) -> int:
        """Return the memory of the attacked process in bytes, without the pool's pages."""
        text = Path(f"/proc/{self._processes[-1].child.pid}/status").read_text()
        (line,) = [line for line in text.splitlines() if line.startswith("RssAnon:")]
        return int(line.split()[1]) << 10


class Watch(threading.Thread):
    """Measures the server's memory and asks whether it is ready, until the end of a block."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(daemon=True)
        self.memory = 0
        self.probes = 0
        self.faults: list[str] = []
        self._rig = rig
        self._done = threading.Event()

        self._of_memory = threading.Thread(target=self._watch_memory, daemon=True)

    def __enter__(self) -> Watch:
        self.start()
        self._of_memory.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self.join()
        self._of_memory.join()

    def _watch_memory(self) -> None:
        while not self._done.wait(0.2):
            self.memory = max(self.memory, self._rig.memory())

    def run(self) -> None:
        """Probe until the end."""
        while not self._done.wait(0.2):
            try:
                if self._rig.read("readyz") != b"ok\n":
                    self.faults.append("/readyz was not ok")
                self.probes += 1
            except (OSError, ssl.SSLError) as error:
                self.faults.append(f"/readyz did not answer: {error!r}")


def attack_for(seconds: float, rig: Rig, idle: Rig) -> Report:
    """Attack the idle server, then the server, for most of this time, and report."""
    report = Report()
    report.before = rig.counters()
    memory = rig.memory()
    done, found, path = CONTEXT.Event(), CONTEXT.Queue(), rig.folder / "pulls.npy"
    url = f"petps+tls://127.0.0.1:{rig.port}/default"
    arguments = (url, rig.target.ca, rig.tokens["read"], done, found, str(path))
    client = CONTEXT.Process(target=pull_and_check, args=arguments, daemon=True)
    client.start()
    phases: dict[str, tuple[float, float]] = {}
    try:
        wait_until("the client pulls", lambda: rig.counters()["pulls"] > report.before["pulls"])
        start = time.monotonic()
        time.sleep(0.15 * seconds)
        phases["alone"] = (start, time.monotonic())
        with attackers(idle.target):
            start = time.monotonic()
            time.sleep(0.25 * seconds)
            phases["idle server"] = (start, time.monotonic())
        with attackers(rig.target) as (report.results, refused), Watch(rig) as watch:
            start = time.monotonic()
            time.sleep(0.6 * seconds)
            wait_until(
                "each attack was refused",
                lambda: all(
                    n > 0 or name in HARMLESS for name, n in zip(ATTACKS, refused, strict=True)
                ),
                ATTACKED_SECONDS,
            )
            phases["attack"] = (start, time.monotonic())
        report.during = rig.counters()
    finally:
        done.set()
    report.faults += found.get(timeout=120)
    client.join()
    times = np.load(path)
    for phase, (start, end) in phases.items():
        durations = times[(times[:, 0] >= start) & (times[:, 0] < end), 1]
        report.pulls[phase] = len(durations)
        if len(durations) == 0:
            report.faults.append(f"the good client pulled nothing in the phase {phase}")
        report.p99_ms[phase] = 1e3 * float(np.quantile(durations, 0.99)) if len(durations) else 0.0
    report.memory_bytes = watch.memory - memory
    report.probes = watch.probes
    report.faults += watch.faults
    check(report)
    before = report.before["connections"]
    wait_until(
        "the attackers' connections are gone", lambda: rig.counters()["connections"] <= before
    )
    return report


def check(report: Report) -> None:
    """Add what the limits should have prevented to the report's faults."""
    if report.memory_bytes > MEMORY_BYTES + OTHER_BYTES:
        report.faults.append(f"the server's memory grew by {report.memory_bytes >> 20} MiB")
    if report.probes == 0:
        report.faults.append("/readyz never answered")
    for result in report.results:
        report.faults += [f"{result.name}: {error}" for error in result.errors]
        if result.refused == 0 and result.name not in HARMLESS:
            report.faults.append(f"{result.name}: the server refused none of {result.tried}")
        counter = COUNTED.get(result.name)
        if counter is not None and report.during[counter] <= report.before[counter]:
            report.faults.append(f"{result.name}: the counter {counter} did not change")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the report, and return 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--router", action="store_true", help="attack a router before a server")
    options = parser.parse_args(arguments)
    make = partial(Rig, is_router=options.router)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(make(Path(folder) / "hostile")) as rig,
        closing(make(Path(folder) / "idle")) as idle,
    ):
        report = attack_for(options.seconds, rig, idle)
    print("\n".join(report.lines()))
    print("targets met" if report.meets_targets() else "TARGETS MISSED")
    return 0 if not report.faults and report.meets_targets() else 1


if __name__ == "__main__":
    sys.exit(main())
