"""Training over a link that the kernel shapes ends bit by bit where it ends over loopback.

Run by `make test-train`; skipped, with the reason, where network namespaces are not available.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.train.namespaces import Shaped, shaped, unavailable
from bench.train.shaped import inside
from tests.train.train_processes import check_same, train

BYTES_PER_SECOND = 200e3
# More than the token bucket holds (16 KiB), in one system call: a part of it must wait.
SEND_TOO_MUCH = """
import socket, sys
socket.socket(type=socket.SOCK_DGRAM).sendto(bytes(60_000), (sys.argv[1], 9))
"""


def _counted(link: Shaped, side: int) -> dict[str, Any]:
    shown = subprocess.run(
        [*link.inside[side], "tc", "-s", "-j", "qdisc", "show", "dev", link.interface],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    results: dict[str, Any] = json.loads(shown.stdout)[0]
    return results


@pytest.mark.timeout(900)
def test_a_shaped_link_changes_no_bit(tmp_path: Path) -> None:
    why = unavailable()
    if why:
        pytest.skip(f"no shaped link: {why}")
    reference = train(tmp_path / "plain")
    with shaped(BYTES_PER_SECOND) as link:
        results = train(tmp_path / "shaped", inside(link))
        for side in range(2):
            used = _counted(link, side)
            # On a busy machine the steps may be so slow that no transfer of the ranks is late.
            print(f"side {side}: {used['bytes']} bytes, {used['overlimits']} times late")
            assert used["bytes"] > 100_000, "the ranks did not use this link"
            peer = f"10.0.0.{2 - side}"
            subprocess.run(
                [*link.inside[side], sys.executable, "-c", SEND_TOO_MUCH, peer], check=True
            )
            late = _counted(link, side)["overlimits"] - used["overlimits"]
            assert late > 0, "the kernel does not shape this link"
    check_same(reference, results)
