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
def test_attackers_hurt_nobody(tmp_path: Path) -> None:
    with (
        closing(Rig(tmp_path / "hostile", 512)) as rig,
        closing(Rig(tmp_path / "idle", 512)) as idle,
    ):
        report = attack_for(25, rig, idle)
        print("\n".join(report.lines()))
        assert report.faults == []
