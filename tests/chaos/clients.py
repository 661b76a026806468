"""The clients of the chaos suite: one process of a node, which pulls and pushes at bounded rates.

Each client is a thread with a connection of its own, and appends what it did to the history of the
process. A client that pulls asks for at least the version that it has seen. Some time later it
ends, and a new one that has seen nothing takes its place. Arguments: folder, node, URL of the
delta-fed model, URL of the push-fed model, seed, that time in seconds, numbers of clients that pull
and that push.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import petps_client

from tests.chaos.history import History, now_ns
from tests.chaos.rows import KEYS, PUSH_TABLE, TABLE, push_row, read_rows

DEADLINE_MS: Final = 4000
WAIT_MS: Final = 1500  # for a server that is behind to reach the version that a client has seen
PULL_KEYS: Final = 24
PULL_PAUSE_SECONDS: Final = 0.15
PUSH_PAUSE_SECONDS: Final = 0.08
PUSH_DEADLINE_MS: Final = 2500
# The keys of pushes change, so that each has a history that is short enough to be checked.
EPOCH_SECONDS: Final = 8.0
KEYS_OF_AN_EPOCH: Final = 8
VALUES_OF_A_CLIENT: Final = 100_000


class Clients:
    """The clients of one node."""

    def __init__(
        self, folder: Path, node: str, url: str, push_url: str, seed: int, life_seconds: float
    ) -> None:
        """life_seconds: after this time a new client begins, which has seen no version."""
        self._node, self._url, self._push_url, self._seed = node, url, push_url, seed
        self._life_seconds = life_seconds
        self._stop = folder / "stop"
        self._folder = folder
        self._pulls = History(folder / f"pulls.{node}.jsonl")
        self._pushes = History(folder / f"pushes.{node}.jsonl")

    def run(self, pullers: int, pushers: int) -> None:
        """Run until `stop` exists."""
        threads = [threading.Thread(target=self._pull_on, args=(n,)) for n in range(pullers)]
        threads += [threading.Thread(target=self._push_on, args=(n,)) for n in range(pushers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _is_stopped(self) -> bool:
        return self._stop.exists()

    # ---- pulls of the delta-fed model

    def _pull_on(self, number: int) -> None:
        rng = np.random.default_rng([self._seed, number, *self._node.encode()])
        life = 0
        while not self._is_stopped():
            life += 1
            try:
                with petps_client.connect(self._url, deadline_ms=DEADLINE_MS) as client:
                    self._live(client, f"{self._node}.{number}.{life}", rng)
            except petps_client.PetpsError as error:  # no server can be reached
                self._pulls.write(op="connect", node=self._node, at=now_ns(), error=str(error))
                time.sleep(PULL_PAUSE_SECONDS)

    def _live(self, client: petps_client.Client, name: str, rng: np.random.Generator) -> None:
        end, seen = time.monotonic() + self._life_seconds, 0
        while time.monotonic() < end and not self._is_stopped():
            keys = np.sort(rng.choice(KEYS, PULL_KEYS, replace=False)).astype(np.uint64)
            record: dict[str, Any] = {"client": name, "node": self._node, "seen": seen}
            record |= {"keys": keys.tolist(), "call": now_ns()}
            try:
                answer = client.pull_answer(TABLE, keys, min_version=seen, wait_ms=WAIT_MS)
            except petps_client.PetpsError as error:
                record |= {"return": now_ns(), "error": f"{type(error).__name__}: {error}"}
            else:
                record["return"] = now_ns()
                record |= _described(keys, answer)
                seen = max(seen, answer.applied_version)
            self._pulls.write(op="pull", **record)
            time.sleep(PULL_PAUSE_SECONDS)

    # ---- pushes and pulls of the push-fed model

    def _push_on(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {self._node} {number}")
        # Each process, and each thread of it, pushes values that nobody else pushes.
        first = (1 + number + 16 * (self._node.encode()[-1] % 8)) * VALUES_OF_A_CLIENT
        life, pushed = 0, 0
        while not self._is_stopped():
            life += 1
            try:
                with petps_client.connect(self._push_url, deadline_ms=PUSH_DEADLINE_MS) as client:
                    while not self._is_stopped() and pushed < VALUES_OF_A_CLIENT:
                        pushed += 1
                        self._push_or_pull(client, first // VALUES_OF_A_CLIENT, first + pushed,
                                           chance)  # fmt: skip
                        time.sleep(PUSH_PAUSE_SECONDS)
            except petps_client.PetpsError:  # no server can be reached
                time.sleep(PUSH_PAUSE_SECONDS)

    def _push_or_pull(
        self, client: petps_client.Client, name: int, value: int, chance: random.Random
    ) -> None:
        epoch = int(time.monotonic() / EPOCH_SECONDS)
        key = epoch * KEYS_OF_AN_EPOCH + chance.randrange(KEYS_OF_AN_EPOCH)
        keys = np.array([key], np.uint64)
        is_push = chance.random() < 0.5
        record: dict[str, Any] = {"client": name, "node": self._node, "key": key, "push": is_push}
        record["call"] = now_ns()
        try:
            if is_push:
                record["value"] = value
                client.push(PUSH_TABLE, keys, push_row(key, value))
            else:
                rows, mask = client.pull(PUSH_TABLE, keys, return_mask=True)
                record["value"] = read_pushed(key, rows, bool(mask[0]))
        except petps_client.PetpsError as error:
            record |= {"failed": now_ns(), "error": f"{type(error).__name__}: {error}"[:300]}
        else:
            record["return"] = now_ns()
        self._pushes.write(op="push" if is_push else "pull", **record)


def read_pushed(key: int, rows: Any, is_found: bool) -> int:
    """Return the value of a pushed row; 0: there is none; -1: it is torn, or another key's."""
    if not is_found:
        return 0
    versions, _, is_whole = read_rows(np.array([key], np.uint64), rows)
    return int(versions[0]) if is_whole[0] else -1


def _described(keys: Any, answer: petps_client.Answer) -> dict[str, Any]:
    """Return what an answer says about its rows, and the rows that are wrong as they came."""
    versions, generations, is_whole = read_rows(keys, answer.rows)
    record: dict[str, Any] = {
        "applied": answer.applied_version,
        "instance": answer.instance,
        "versions": versions.tolist(),
        "generations": sorted(set(generations[answer.mask].tolist())),
        "missing": keys[~answer.mask].tolist(),
    }
    wrong = answer.mask & ~is_whole
    if wrong.any():
        record["wrong"] = {
            int(key): row.tolist() for key, row in zip(keys[wrong], answer.rows[wrong], strict=True)
        }
    return record


def main(arguments: list[str]) -> None:
    """Run the clients of a node."""
    folder, node, url, push_url, seed, life_seconds, pullers, pushers = arguments
    clients = Clients(Path(folder), node, url, push_url, int(seed), float(life_seconds))
    clients.run(int(pullers), int(pushers))


if __name__ == "__main__":
    main(sys.argv[1:])
