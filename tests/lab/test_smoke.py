"""The part of the lab that `make test` runs: one suite in one boot with persistent memory and RDMA.

It is skipped, visibly, if no guest can be built in a short time. `make lab` runs everything else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import guest as lab
from tests.lab.conftest import PROGRAMS, Suite

# Building usually takes 6 s and the guest 20 s. These limits catch a hang on a busy machine.
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
