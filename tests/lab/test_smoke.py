"""What `make test` runs of the lab: one boot with persistent memory and RDMA, one suite.

Skipped, visibly, where no guest can be had in little time. Everything else: make lab.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import guest as lab
from tests.lab.conftest import PROGRAMS, Suite

# Ordinarily 6 s for the building and 20 s for the guest; for a hang only, on a busy machine.
BUILD_SECONDS_MAX = 60
RUN_SECONDS_MAX = 240


@pytest.mark.timeout(BUILD_SECONDS_MAX + RUN_SECONDS_MAX + lab.BOOT_SECONDS_MAX + 60)
def test_media_contract_in_the_guest(share: Path, suite: Suite) -> None:
    try:
        lab.build(BUILD_SECONDS_MAX)
    except lab.NotAvailable as reason:
        pytest.skip(f"the lab was not run ({reason}); `make lab` runs it")
    if not (PROGRAMS / "test_media").exists():
        pytest.skip("the lab was not run (no build/release/test_media); `make lab` runs it")
    guest = lab.Guest(share, medium="fsdax", rdma=True, medium_bytes=256 << 20)
    environment = {"PETPS_TEST_DAX_FOLDER": str(lab.FSDAX)}
    suite(guest, "test_media", "*/dax", seconds_max=RUN_SECONDS_MAX, environment=environment)
