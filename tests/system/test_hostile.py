"""A short run of `make soak ONLY=hostile`: everything but the ratios of latencies, which need an
idle machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.hostile import Rig, attack_for


@pytest.mark.system
@pytest.mark.timeout(400)
def test_attackers_hurt_nobody(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "hostile")
    try:
        report = attack_for(25, rig)
        print("\n".join(report.lines()))
        assert report.faults == []
        lines = rig.status()["incidents"]
        assert any("limits.connections_per_peer" in line for line in lines), lines
    finally:
        rig.server.kill()
