"""Training over a link that the kernel shapes ends bit by bit where it ends over loopback.

Run by `make test-train`; skipped, with the reason, where network namespaces are not available.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.train.namespaces import Shaped, shaped, unavailable
from bench.train.shaped import inside
from tests.train.train_processes import check_same, train

# A step transfers some kilobytes, so most transfers wait.
BYTES_PER_SECOND = 200e3


def _counted(link: Shaped, side: int) -> dict[str, Any]:
    shown = subprocess.run(
        [*link.inside[side], "tc", "-s", "-j", "qdisc", "show", "dev", link.interface],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    results: dict[str, Any] = json.loads(shown.stdout)[0]
    return results


def test_a_shaped_link_changes_no_bit(tmp_path: Path) -> None:
    why = unavailable()
    if why:
        pytest.skip(f"no shaped link: {why}")
    reference = train(tmp_path / "plain")
    with shaped(BYTES_PER_SECOND) as link:
        results = train(tmp_path / "shaped", inside(link))
        for side in range(2):
            counted = _counted(link, side)
            print(f"side {side}: {counted['bytes']} bytes, {counted['overlimits']} times late")
            # The ranks used this link, and the kernel shaped it.
            assert counted["bytes"] > 100_000
            assert counted["overlimits"] > 0
    check_same(reference, results)
