"""A short run of `make soak ONLY=hostile`: everything but the ratios of latencies, which need an
idle machine.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.soak.hostile import Rig, attack_for


@pytest.mark.system
@pytest.mark.timeout(1800)  # it starts two dozen processes
@pytest.mark.parametrize("is_router", [False, True], ids=["server", "router"])
def test_attackers_hurt_nobody(is_router: bool, tmp_path: Path) -> None:
    with (
        closing(Rig(tmp_path / "hostile", 512, is_router=is_router)) as rig,
        closing(Rig(tmp_path / "idle", 512, is_router=is_router)) as idle,
    ):
        report = attack_for(25, rig, idle)
        print("\n".join(report.lines()))
        assert report.faults == []
