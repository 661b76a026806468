"""The failures of the drill. Each makes a healthy server, breaks it, and mends it as its runbook
page says.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final, Literal

import numpy as np
import petps_client

import petps
from petps.delta import TableSchema, open_log
from petps.delta.log import DeltaLog
from petps.publish import Publisher
from tests import certificates
from tests.kafka.broker import Broker, NotAvailable
from tests.operate.prometheus import NotInstalled
from tests.system.servers import PARTITIONS, Fleet, Server, connect, wait_until
from tests.system.servers import petps as run_petps

DIM: Final = 4
ROWS: Final = 100
KEYS: Final = np.arange(ROWS, dtype=np.uint64)
DISK_BYTES: Final = 96 << 20
SHORT_SECONDS: Final = 20  # of a certificate that ends during the drill
FAKETIME: Final = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
CLOCK_JUMP_SECONDS: Final = 3600


def rows_of(keys: np.ndarray) -> np.ndarray:
    """Return rows float32[n, DIM] that identify their keys."""
    rows: np.ndarray = keys.astype(np.float32)[:, None] + np.arange(1, DIM + 1, dtype=np.float32)
    return rows


class Scenario(ABC):
    """One failure.

    The class has what is promised: the alert, and whether the server stays ready. `servers` are
    those that Prometheus watches.
    """

    name: ClassVar[str]
    alert: ClassVar[str]
    is_ready: ClassVar[bool] = True
    """Whether /readyz says ready while it lasts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = folder / "pool"
        self._closing = contextlib.ExitStack()
        self.servers: list[Server] = []
        try:
            self.start()
        except BaseException:
            self._closing.close()
            raise

    @abstractmethod
    def start(self) -> None:
        """Start servers in health. Raises NotInstalled if the machine cannot run it."""

    @abstractmethod
    def fail(self) -> None:
        """Cause the failure."""

    @abstractmethod
    def mend(self) -> None:
        """Do what the runbook page says."""

    def close(self) -> None:
        """End all that was started."""
        self._closing.close()

    @property
    def server(self) -> Server:
        """Return the server that shows the failure."""
        return self.servers[0]

    @property
    def scheme(self) -> str:
        """Return the scheme of its HTTP door."""
        return "http"

    def serve(self, config: str = "", pool: Path | None = None) -> Server:
        """Start a server with this configuration."""
        pool = pool or self.pool
        file = pool.parent / "petps.toml"
        file.write_text(f'[pool]\npath = "{pool}"\n{config}')
        return self.watch(Server(pool, "--config", file, folder=self.folder))

    def watch(self, server: Server) -> Server:
        """Let Prometheus scrape the server, and end it at the end."""
        self._closing.callback(server.kill)
        server.wait_ready()
        self.servers.append(server)
        return server

    def create(self, capacity: int, feed: Literal["push", "delta"] = "push") -> None:
        """Create the pool with a table `items`."""
        with petps.create(self.pool, durability="process") as opened:
            opened.create_table("items", dim=DIM, capacity=capacity, feed=feed)

    def push(self, keys: np.ndarray) -> None:
        """Push the keys' rows to the server."""
        with connect(self.server.url) as client:
            client.push("items", keys, rows_of(keys))


class _Fed(Scenario):
    """A server that follows a log."""

    def follow(self, place: str, capacity: int, log: DeltaLog) -> None:
        self._log = log
        self._closing.callback(log.close)
        schema = TableSchema("items", "f32", DIM)
        self.publisher = Publisher(log, "default", tables=[schema])
        self.publisher.begin_continue(None)
        self.create(capacity, "delta")
        self.publish(KEYS[:2])
        self.serve(f'[server]\nready_lag_seconds = 2\n[ingest]\nlog = "{place}"\n')

    def publish(self, keys: np.ndarray) -> None:
        self.publisher.publish("items", keys, rows_of(keys))
        self.publisher.commit()

    def wait_for_rows(self, rows: int) -> None:
        wait_until(
            f"{rows} rows are served", lambda: self.server.status()["tables"][0]["rows"] == rows
        )


class BrokerAway(_Fed):
    name = "Kafka is gone, then back"
    alert = "PetpsBrokerUnreachable"
    is_ready = False

    def start(self) -> None:
        try:
            self._broker = Broker(self.folder / "broker")
        except NotAvailable as error:
            raise NotInstalled(str(error)) from None
        self._closing.callback(self._broker.kill)
        place = f"kafka://{self._broker.address}/drill"
        self.follow(place, 2 * ROWS, open_log(place, partitions=PARTITIONS))

    def fail(self) -> None:
        self._broker.kill()

    def mend(self) -> None:
        self._broker.start()
        self.publish(KEYS)
        self.wait_for_rows(ROWS)


class PartitionStopped(_Fed):
    name = "a partition has stopped: its table is full"
    alert = "PetpsPartitionStopped"
    is_ready = False

    def start(self) -> None:
        place = str(self.folder / "log")
        self.follow(place, 5, open_log(place, partitions=PARTITIONS))

    def fail(self) -> None:
        self.publish(KEYS)

    def mend(self) -> None:
        run_petps("table", "grow", self.pool, "items", "--capacity", 2 * ROWS)
        self.wait_for_rows(ROWS)


class FullTable(Scenario):
    name = "a table that takes pushes is full"
    alert = "PetpsTableFull"

    def start(self) -> None:
        self.create(ROWS)
        self.serve()
        self.push(KEYS[: ROWS // 2])

    def fail(self) -> None:
        with contextlib.suppress(petps_client.ResourceExhausted):
            while True:
                self.push(np.arange(2 * ROWS, dtype=np.uint64))

    def mend(self) -> None:
        run_petps("table", "grow", self.pool, "items", "--capacity", 4 * ROWS)
        self.push(np.arange(2 * ROWS, dtype=np.uint64))


class FullDisk(Scenario):
    name = "the disk is full"
    alert = "PetpsDiskNearlyFull"

    def start(self) -> None:
        if os.geteuid() != 0:
            raise NotInstalled("a small file system of its own needs root")
        image, disk = self.folder / "disk.image", self.folder / "disk"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        disk.mkdir()
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        try:
            subprocess.run(["mount", "-o", "loop", image, disk], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            raise NotInstalled(f"no loop device: {error.stderr.decode().strip()}") from None
        self._closing.callback(lambda: subprocess.run(["umount", disk], check=True))
        self._ballast = disk / "ballast"
        self.pool = disk / "pool"
        self.create(2 * ROWS)
        self.serve()
        self.push(KEYS)

    def fail(self) -> None:
        with self._ballast.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
                file.flush()

    def mend(self) -> None:
        self._ballast.unlink()
        self.push(KEYS)


class DamagedRow(Scenario):
    name = "a row is damaged"
    alert = "PetpsDamagedRows"

    def start(self) -> None:
        self.create(2 * ROWS)
        self.serve('[scrub]\nevery = "10s"\n')
        self.push(KEYS)

    def fail(self) -> None:
        row = rows_of(KEYS[7:8]).tobytes()
        with self.pool.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            at = mapped.find(row)
            assert at >= 0
            mapped[at] ^= 0x10

    def mend(self) -> None:
        self.push(KEYS[7:8])


class DeadShard(Scenario):
    name = "a server of the shard map is dead"
    alert = "PetpsShardUnreachable"

    def start(self) -> None:
        pools = [self.folder / f"server{number}" / "pool" for number in range(2)]
        for pool in pools:
            pool.parent.mkdir()
            with petps.create(pool, durability="process") as opened:
                opened.create_table("items", dim=DIM, capacity=2 * ROWS)
                opened.create_table("fed", dim=DIM, capacity=2 * ROWS, feed="delta")
        log = self.folder / "log"
        open_log(str(log), partitions=PARTITIONS).close()

        def serve(pool: Path, *arguments: object) -> Server:
            return self.watch(Server(pool, *arguments))

        fleet = Fleet(serve, self.folder, pools, f'log = "{log}"')
        fleet.own(["0-3"], ["4-7"])
        # Until then the servers know the members of the map that they started with.
        for address, other in zip(fleet.addresses, reversed(self.servers), strict=True):
            known = f'petps_shard_member_reachable{{member="{address}"}} 1.0'.encode()
            wait_until("the members are known", lambda: known in other.read("metrics"))  # noqa: B023

    def fail(self) -> None:
        self.servers[1].kill()

    def mend(self) -> None:
        self.servers[1].launch()
        self.servers[1].wait_ready()


class ExpiredCertificate(Scenario):
    name = "the certificate expires"
    alert = "PetpsCertificateExpires"

    @property
    def scheme(self) -> str:
        return "https"

    def start(self) -> None:
        if not FAKETIME.exists():
            raise NotInstalled("no faketime: deploy/bootstrap.sh operate installs it")
        self._authority = certificates.Authority(self.folder)
        self._pair = self._authority.issue("server")
        self.create(2 * ROWS)
        tls = f'certificate = "{self._pair.certificate}"\nkey = "{self._pair.key}"'
        self.serve(f"[tls]\n{tls}\n")
        self._pull()

    def fail(self) -> None:
        # It was made a day ago, and is good for a day.
        with environment(LD_PRELOAD=str(FAKETIME), FAKETIME=f"-{86400 - SHORT_SECONDS}"):
            short = self._authority.issue("short", days=1)
        certificates.replace(self._pair, short)
        wait_until("the certificate has expired", self._has_expired)

    def mend(self) -> None:
        certificates.replace(self._pair, self._authority.issue("next"))
        wait_until("the new certificate is used", lambda: not self._has_expired())
        self._pull()

    def _pull(self) -> None:
        trust = petps_client.Tls(ca=self._authority.certificate)
        port = self.server.wait_ready()["port"]
        with connect(f"petps+tls://127.0.0.1:{port}/default", tls=trust) as client:
            client.pull("items", KEYS)

    def _has_expired(self) -> bool:
        try:
            self._pull()
        except petps_client.PetpsError as error:
            return "expired at" in str(error)
        return False


class ClockJump(Scenario):
    name = "the clock jumps"
    alert = "PetpsClockJumped"

    def start(self) -> None:
        if not FAKETIME.exists():
            raise NotInstalled("no faketime: deploy/bootstrap.sh operate installs it")
        self.create(2 * ROWS)
        self._clock = self.folder / "clock"
        self._clock.write_text("+0")
        with environment(
            LD_PRELOAD=str(FAKETIME),
            FAKETIME_TIMESTAMP_FILE=str(self._clock),
            FAKETIME_NO_CACHE="1",
            FAKETIME_DONT_FAKE_MONOTONIC="1",
        ):
            self.serve()
        self.push(KEYS)

    def fail(self) -> None:
        self._clock.write_text(f"+{CLOCK_JUMP_SECONDS}")

    def mend(self) -> None:
        self._clock.write_text("+0")


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Let processes that start in the block have these variables too."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


SCENARIOS: Final[tuple[type[Scenario], ...]] = (
    BrokerAway,
    PartitionStopped,
    FullTable,
    FullDisk,
    DamagedRow,
    DeadShard,
    ExpiredCertificate,
    ClockJump,
)
