"""Tests that run suites without devices, scaled down, on the guest's kernel and processor.

The emulated processor has no AVX-512.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.conftest import Suite
from tests.lab.guest import Guest

pytestmark = pytest.mark.timeout(1200)


def test_crash(share: Path, suite: Suite) -> None:
    # Leave out the mutation checks, whose limits are set for a real processor.
    scale = {"PETPS_TEST_SCALE": "0.01"}
    suite(Guest(share), "test_crash", "*-Sites/*", seconds_max=600, environment=scale)


def test_transport_contract_over_tcp(share: Path, suite: Suite) -> None:
    suite(Guest(share), "test_contract", "*/tcp_*:Tcp*", seconds_max=600)
