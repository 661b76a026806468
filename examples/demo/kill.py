"""kill -9 of the server while it applies a delta, and the restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import petps_client

from examples.demo.processes import ServerProcess, TrainerProcess
from examples.demo.report import Restart
from examples.demo.state import State, bits
from examples.demo.trace import Trace
from examples.demo.traffic import KEYS_PER_PULL, Traffic
from examples.demo.trainer import TABLE
from petps.errors import DataLoss, DeadlineExceeded

__all__ = ["KillTest", "share_of_new", "wait_for_pull"]

TRIES: Final = 10  # the server may apply a small delta completely between two pulls
SHARE_MIN: Final = 0.25  # of the delta's rows visible at the kill; later tries accept any share
PROBE_SECONDS: Final = 60.0
RESTART_SECONDS: Final = 180.0
RETRY_SECONDS: Final = 0.0005
DEADLINE_MS: Final = 10_000
CATCH_UP_SECONDS: Final = 120.0


class KillTest:
    """One kill. Every pulled row must equal the row before the delta, or the row after it."""

    def __init__(
        self,
        server: ServerProcess,
        trainer: TrainerProcess,
        traffic: Traffic,
        trace: Trace,
        folder: Path,
    ) -> None:
        self._server = server
        self._trainer = trainer
        self._traffic = traffic
        self._trace = trace
        self._folder = folder
        self._probe: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def run(self) -> Restart:
        """Publish a delta of all rows, kill the server in the middle of it, and restart it."""
        for attempt in range(TRIES):
            version_before = self._traffic.newest_version()
            before = self._trainer.state(self._folder / "before.npz")
            delta_rows = self._trainer.call("sweep")["rows"]
            after = self._trainer.state(self._folder / "after.npz")
            self._choose_probe(before)
            self._trainer.begin("publish")
            share_min = SHARE_MIN if attempt < TRIES // 2 else 0
            share = self._kill_in_the_middle(before, after, share_min)
            if share is not None:
                return self._restart(before, after, delta_rows, share, version_before)
            published = self._trainer.end()
            self._traffic.wait_for_version(published["version"], CATCH_UP_SECONDS)
        raise DeadlineExceeded(
            f"the server applied each of {TRIES} deltas of all rows between two pulls, so it was "
            "not killed in the middle of one: take more --accesses"
        )

    def _choose_probe(self, state: State) -> None:
        """Choose objects to pull. They are in all partitions, because their keys are hashed."""
        present = np.flatnonzero(state.present)
        step = max(1, len(present) // KEYS_PER_PULL)
        self._probe = present[::step][:KEYS_PER_PULL]

    def _pull(self, client: petps_client.Client) -> npt.NDArray[np.float32]:
        rows, mask = client.pull(TABLE, self._trace.keys[self._probe], return_mask=True)
        if not mask.all():
            raise DataLoss(f"the server no longer has {np.count_nonzero(~mask)} rows")
        return rows

    def _new_share(self, pulled: npt.NDArray[np.float32], before: State, after: State) -> float:
        return share_of_new(pulled, before.rows[self._probe], after.rows[self._probe])

    def _kill_in_the_middle(self, before: State, after: State, share_min: float) -> float | None:
        """Kill the server when at least ``share_min`` of the probed rows are new, but not all.

        Return that share, or None if all rows were new before the first such pull.
        """
        deadline = time.monotonic() + PROBE_SECONDS
        with petps_client.connect(self._server.url, deadline_ms=DEADLINE_MS) as client:
            while time.monotonic() < deadline:
                share = self._new_share(self._pull(client), before, after)
                if 0 < share < 1 and share >= share_min:
                    self._server.kill()
                    return share
                if share == 1:
                    return None
        raise DeadlineExceeded(f"no row of the delta was served within {PROBE_SECONDS:.0f} s")

    def _restart(
        self, before: State, after: State, delta_rows: int, share: float, version_before: int
    ) -> Restart:
        seen = len(self._traffic.samples)
        started = self._server.start()
        first = wait_for_pull(
            self._server, lambda client: self._new_share(self._pull(client), before, after)
        )
        facts = self._server.wait_ready()
        published = self._trainer.end()
        self._traffic.wait_for_version(published["version"], CATCH_UP_SECONDS, since=seen)
        caught_up = time.monotonic()
        with petps_client.connect(self._server.url, deadline_ms=DEADLINE_MS) as client:
            share_after = self._new_share(self._pull(client), before, after)
        if share_after < 1:
            raise DataLoss(f"version {published['version']} is served, but not all of its rows")
        waited = max(
            sample.end - sample.begin for sample in self._traffic.samples[max(0, seen - 1) :]
        )
        return Restart(
            delta_rows=delta_rows,
            share_visible=round(share, 4),
            version_before=version_before,
            exec_to_first_correct_pull_ms=round(1e3 * (first - started), 3),
            open_to_first_correct_pull_ms=round(1e3 * (first - facts["opened_at"]), 3),
            open_ms=facts["open_ms"],
            client_waited_ms=round(1e3 * waited, 3),
            client_failures=len(self._traffic.failures),
            caught_up_ms=round(1e3 * (caught_up - started), 3),
        )


def wait_for_pull(server: ServerProcess, pull: Callable[[petps_client.Client], object]) -> float:
    """Repeat ``pull`` until a restarted server replies. Return the time of the reply.

    Raise Unavailable if the server has exited, and the client's last error if the server does not
    reply within RESTART_SECONDS.
    """
    deadline = time.monotonic() + RESTART_SECONDS
    while True:
        try:
            with petps_client.connect(server.url, deadline_ms=DEADLINE_MS) as client:
                pull(client)
                return time.monotonic()
        except (petps_client.Unavailable, petps_client.DeadlineExceeded):
            server.check_running()
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


def share_of_new(
    pulled: npt.NDArray[np.float32],
    before: npt.NDArray[np.float32],
    after: npt.NDArray[np.float32],
) -> float:
    """Return the share of pulled rows that equal the rows after the delta; all float32[n, dim].

    Raise DataLoss if a row equals neither its old nor its new row: it is torn, or of another key.
    """
    is_new = (bits(pulled) == bits(after)).all(axis=1)
    is_old = (bits(pulled) == bits(before)).all(axis=1)
    if not (is_new | is_old).all():
        raise DataLoss(
            f"{np.count_nonzero(~(is_new | is_old))} of {len(is_new)} rows are neither the ones "
            "before the delta nor the ones after it"
        )
    return float(np.mean(is_new))
