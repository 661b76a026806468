"""Tests over soft-RoCE: suites that need an RDMA device, with pools in memory and on device-DAX."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.conftest import Suite
from tests.lab.guest import DEVDAX, FSDAX, Guest

pytestmark = pytest.mark.timeout(1200)

SOAK_SECONDS = 60


def test_transport_contract(share: Path, suite: Suite) -> None:
    suite(Guest(share, rdma=True), "test_contract", "*/rdma_device")


def test_the_cxx_client(share: Path, suite: Suite) -> None:
    suite(Guest(share, rdma=True), "test_client", "*rdma_device")


def test_soak_from_device_dax(share: Path, suite: Suite) -> None:
    """Pull under updates and reclaim at full speed.

    The suite also runs with pins that protect nothing, and must then see the fault.
    """
    guest = Guest(share, medium="devdax", rdma=True, medium_bytes=256 << 20)
    environment = {"PETPS_SOAK_SECONDS": str(SOAK_SECONDS), "PETPS_TEST_POOL": str(DEVDAX)}
    cases = "Ways/Soaked.*/rdma_device"
    suite(guest, "test_server", cases, seconds_max=600, environment=environment)


def test_the_pure_python_client(share: Path) -> None:
    guest = Guest(share, medium="devdax", rdma=True, medium_bytes=256 << 20)
    command = ".venv/bin/python -m pytest -q -p no:cacheprovider -rA tests/lab/test_rdma.py"
    result = guest.run(command, 400, {"PETPS_TEST_POOL": str(DEVDAX)})
    print(result.output[-3000:])
    assert result.status == 0, result.output[-6000:]
    assert "3 passed" in result.output


def test_a_pool_on_fsdax_is_refused_with_the_remedy(share: Path) -> None:
    guest = Guest(share, medium="fsdax", rdma=True, medium_bytes=256 << 20)
    pool = FSDAX / "pool"
    config = share / "petps.toml"
    config.write_text(f'[pool]\npath = "{pool}"\n[server]\nport = 0\nrdma = "auto"\n')
    petps = ".venv/bin/petps"
    result = guest.run(
        f"{petps} create {pool} --table a:8:f32:100 && {petps} serve --config {config}", 200
    )
    print(result.output)
    assert result.status not in (0, 124)
    assert "serve it from device-DAX or from memory (tmpfs)" in " ".join(result.output.split())
