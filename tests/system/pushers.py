"""A client that pushes and pulls while partitions move, and knows which values a row may have."""

from __future__ import annotations

import threading
import time
from typing import Self

import numpy as np
import petps_client

from tests.system.clusters import ALL, DIM, KEYS
from tests.system.servers import WAIT_MS, WAIT_SECONDS, wait_until

KEYS_OF_A_PUSH = 100


class Pusher(threading.Thread):
    """Pushes growing numbers to keys that nobody else writes, and pulls them at the same time.

    Each value of a row is the number of its push. ``low`` has what was acknowledged, and ``high``
    what may have been applied. A pull that returns less than ``low`` of its beginning, or more than
    ``high``, ends the thread with an error.
    """

    def __init__(self, url: str, seed: int, *, through_kills: bool) -> None:
        super().__init__(daemon=True)
        self.low = np.zeros(KEYS, np.int64)
        self.high = np.zeros(KEYS, np.int64)
        self.pushes = 0
        self.longest_seconds = 0.0  # of a push that was acknowledged
        self.error: BaseException | None = None
        self._url, self._random = url, np.random.default_rng(seed)
        self._may_fail: tuple[type[Exception], ...] = ()
        if through_kills:
            self._may_fail = (petps_client.Unavailable, petps_client.DeadlineExceeded)
        self._done = threading.Event()
        self._next = 1

    def __enter__(self) -> Self:
        with self._connect() as client:
            self._push(client, ALL)
        self._threads: list[threading.Thread] = [
            self,
            threading.Thread(target=self._run_pulls, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
        if error is None:
            self.check()

    def check(self) -> None:
        """Fail if anything was wrong so far."""
        assert self.error is None, self.error

    def wait_for_pushes(self, count: int = 5) -> None:
        """Wait until ``count`` more pushes are acknowledged."""
        pushes = self.pushes
        wait_until("more pushes", lambda: self.pushes >= pushes + count or self.error is not None)
        self.check()

    def check_all(self) -> None:
        """Check every row. Call it when no push is running."""
        with self._connect() as client:
            self._pull(client, ALL)

    def run(self) -> None:
        """Push until the end of the block."""
        self._guard(self._push_some)

    def _run_pulls(self) -> None:
        random = np.random.default_rng(1)

        def pull(client: petps_client.Client) -> None:
            self._pull(client, np.unique(random.integers(0, KEYS, 300)).astype(np.uint64))

        self._guard(pull)

    def _guard(self, act: object) -> None:
        try:
            with self._connect() as client:
                while not self._done.is_set() and self.error is None:
                    try:
                        act(client)  # type: ignore[operator]
                    except self._may_fail:
                        self._done.wait(0.01)
        except BaseException as error:
            self.error = error

    def _connect(self) -> petps_client.Client:
        return petps_client.connect(self._url, deadline_ms=WAIT_MS)

    def _push_some(self, client: petps_client.Client) -> None:
        keys = self._random.choice(KEYS, KEYS_OF_A_PUSH, replace=False).astype(np.uint64)
        self._push(client, keys)

    def _push(self, client: petps_client.Client, keys: np.ndarray) -> None:
        number, self._next = self._next, self._next + 1
        self.high[keys] = number
        begun = time.monotonic()
        client.push("pushed", keys, np.full((len(keys), DIM), number, np.float32))
        self.low[keys] = number
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - begun)
        self.pushes += 1

    def _pull(self, client: petps_client.Client, keys: np.ndarray) -> None:
        low = self.low[keys].copy()
        rows, found = client.pull("pushed", keys, return_mask=True)
        high = self.high[keys]
        assert (rows == rows[:, :1]).all(), "a row has parts of two pushes"
        values = np.where(found, rows[:, 0], 0).astype(np.int64)
        wrong = (values < low) | (values > high)
        assert not wrong.any(), (
            f"key {keys[wrong][0]} has push {values[wrong][0]}: {low[wrong][0]} was acknowledged "
            f"before, and {high[wrong][0]} is the last one"
        )
