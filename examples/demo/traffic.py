"""The demo's client: it continuously pulls the rows that the following accesses need."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import petps_client

from examples.demo.trace import Trace
from examples.demo.trainer import TABLE
from petps.errors import DeadlineExceeded

__all__ = ["KEYS_PER_PULL", "Latency", "Mode", "Sample", "Traffic", "latency_of"]

KEYS_PER_PULL: Final = 500
PULLS_PER_SECOND: Final = 500  # when paced: far below the limit of one thread
STRIDE: Final = 10  # accesses between the begins of two pulls
RETRY_PAUSE_SECONDS: Final = 0.001
DEADLINE_MS: Final = 20_000  # longer than a restart, for which the client waits


class Mode(enum.Enum):
    """The pace of the client's pulls."""

    STOPPED = "stopped"  # no pulls
    PACED = "paced"  # PULLS_PER_SECOND
    CLOSED = "closed"  # a closed loop: the next pull begins when the last one returns


@dataclass(frozen=True, slots=True)
class Sample:
    """One pull: when it began and ended (time.monotonic()), its version and the keys found."""

    begin: float
    end: float
    version: int
    found: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of pulls of KEYS_PER_PULL keys, from the call to rows in the caller's array."""

    pulls: int
    p50_ms: float
    p99_ms: float


def latency_of(samples: Sequence[Sample]) -> Latency | None:
    """Return the latencies of the samples, or None if there are none."""
    if not samples:
        return None
    milliseconds = 1e3 * np.array([sample.end - sample.begin for sample in samples])
    p50, p99 = np.percentile(milliseconds, (50, 99))
    return Latency(len(samples), round(float(p50), 3), round(float(p99), 3))


class Traffic:
    """A thread that pulls. ``samples`` only grows; any thread may read it.

    ``check`` raises if the server process is gone, so that nothing waits for it in vain.
    ``pace``: pulls per second in mode PACED.
    """

    def __init__(
        self,
        url: str,
        trace: Trace,
        check: Callable[[], object],
        *,
        table: str = TABLE,
        pace: int = PULLS_PER_SECOND,
    ) -> None:
        self._check = check
        self._table = table
        self._pace = pace
        self._keys = trace.keys[trace.accesses]
        self._client = petps_client.connect(url, name="petps demo", deadline_ms=DEADLINE_MS)
        self._rows: npt.NDArray[np.float32] = np.empty(
            (KEYS_PER_PULL, self._client.describe(table).dim), np.float32
        )
        self._window = (0, len(self._keys))
        self._mode = Mode.STOPPED
        self._wake = threading.Event()
        self._stop = False
        self.samples: list[Sample] = []
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._main, name="petps-demo-traffic", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._wake.set()
        self._thread.join()
        self._client.close()

    def set_window(self, mode: Mode, begin: int, end: int) -> None:
        """Pull the keys of accesses [begin, end) in their order, repeatedly, from now on."""
        self._window = (begin, end)
        self._mode = mode
        if mode is Mode.STOPPED:
            self._wake.clear()
        else:
            self._wake.set()

    def newest_version(self) -> int:
        """Return the applied version of the last pull."""
        return self.samples[-1].version if self.samples else 0

    def samples_of(self, seconds: float, seconds_max: float) -> list[Sample]:
        """Return the pulls of the next ``seconds``, or of a longer time until there is one.

        Raise DeadlineExceeded if there is none within ``seconds_max``.
        """
        first = len(self.samples)
        begin = time.monotonic()
        while len(self.samples) == first or time.monotonic() < begin + seconds:
            self._check()
            if time.monotonic() > begin + max(seconds, seconds_max):
                last = self.failures[-1] if self.failures else "no pull has returned"
                raise DeadlineExceeded(f"no pull succeeded within {seconds_max:.0f} s: {last}")
            time.sleep(0.01)
        return self.samples[first:]

    def wait_for_version(self, version: int, seconds: float, since: int = 0) -> Sample:
        """Return the first pull of samples[since:] whose version is at least ``version``.

        Raise DeadlineExceeded if there is none within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while True:
            for sample in self.samples[since:]:
                if sample.version >= version:
                    return sample
                since += 1
            self._check()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"version {version} is not served {seconds:.0f} s after it was published; "
                    f"the server is at {self.newest_version()}"
                )
            time.sleep(0.002)

    def _main(self) -> None:
        pulls = 0
        due = time.monotonic()
        while not self._stop:
            self._wake.wait()
            if self._mode is Mode.PACED:
                now = time.monotonic()
                if now < due:
                    time.sleep(due - now)
                due = max(due, now - 0.1) + 1 / self._pace  # after a long stall, do not catch up
            self._pull(pulls)
            pulls += 1

    def _pull(self, pulls: int) -> None:
        first, last = self._window
        span = max(1, last - first - KEYS_PER_PULL)
        start = first + pulls * STRIDE % span
        keys = self._keys[start : start + KEYS_PER_PULL]
        rows = self._rows[: len(keys)]
        begin = time.monotonic()
        try:
            answer = self._client.pull_answer(self._table, keys, rows)
        except petps_client.PetpsError as error:
            self.failures.append(str(error))
            time.sleep(RETRY_PAUSE_SECONDS)
            return
        sample = Sample(begin, time.monotonic(), answer.applied_version, answer.found)
        self.samples.append(sample)
