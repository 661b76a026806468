"""kill -9 at each step of a staged version: committed versions stay, no partial one is listed.

Does not cover: simulated crashes of the store's own files (test_store_crash.py).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from petps.checkpoint import Store
from petps.checkpoint.files import LocalFiles
from tests.python.checkpoint.replay import Replay
from tests.python.checkpoint.test_staging import TABLES, check, left_in, staged, steps

POINTS = ("staged", "data", "parts", "lines", "states")
WRITER = """
import sys, time
from pathlib import Path
from petps.checkpoint import Store
from petps.checkpoint.spool import Spool
from tests.python.checkpoint.replay import Replay
from tests.python.checkpoint.test_staging import TABLES, staged, steps
from tests.python.checkpoint.test_staging_crash import StopsAt
folder, point, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
replay = Replay(TABLES, steps(seed), deletes=0.1)
files = StopsAt(folder / "store")
store = Store.open(files)
writer = staged(store, replay, folder / "ssd")
for version in (1, 2):
    replay.now = version
    writer.write(version, {"dense": b"%d" % version})
    writer.wait()
files.point = point
if point == "staged":
    write = Spool.write
    def stops(self, content):
        spooled = write(self, content)
        files.stop()
    Spool.write = stops
replay.now = 3
writer.write(3, {"dense": b"3"})
writer.wait()
"""


class StopsAt(LocalFiles):
    """Files that stop for ever in the first write below the folder ``point``, once it is set."""

    point = ""

    def stop(self) -> None:
        print("stopped", flush=True)
        threading.Event().wait()

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""

        def stopping() -> Iterator[bytes | memoryview]:
            for piece in pieces:
                yield piece[: len(piece) // 2]
                self.stop()

        super().write(path, stopping() if path.startswith(f"{self.point}/") else pieces)

    def create(self, path: str, content: bytes) -> None:
        """See Files."""
        if path.startswith(f"{self.point}/"):
            self.stop()
        super().create(path, content)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_leaves_no_partial_version(tmp_path: Path, point: str) -> None:
    Store.create(tmp_path / "store", "m", list(TABLES.values()))
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), point, "11"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "stopped\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    replay = Replay(TABLES, steps(11), deletes=0.1)
    store = Store.open(tmp_path / "store")
    check(store, replay, [1, 2])
    if point == "staged":
        assert left_in(tmp_path / "ssd")
    with staged(store, replay, tmp_path / "ssd") as writer:
        assert left_in(tmp_path / "ssd") == []
        replay.now = 3
        writer.write(3, {"dense": b"3"})
    check(Store.open(tmp_path / "store"), replay, [1, 2, 3])
