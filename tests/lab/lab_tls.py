"""Kernel TLS: the transport contract, the door's tests and a server with a kernel that encrypts.

The guest's kernel has the module. Every case must run with it: PETPS_TEST_KERNEL_TLS fails those
that find none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.conftest import Suite
from tests.lab.guest import Guest

pytestmark = pytest.mark.timeout(1800)

KERNEL_TLS = {"PETPS_TEST_KERNEL_TLS": "1"}


def test_contract(share: Path, suite: Suite) -> None:
    cases = "*/tcp_kernel_tls*:TlsDoor.*"
    suite(
        Guest(share), "test_contract", cases,
        seconds_max=1200, environment=KERNEL_TLS, before="modprobe tls",
    )  # fmt: skip


def test_server(share: Path) -> None:
    command = "modprobe tls && .venv/bin/python -m pytest -q -p no:cacheprovider -rA "
    guest = Guest(share)
    result = guest.run(command + "tests/system/test_kernel_tls.py", 600, KERNEL_TLS)
    print(result.output[-3000:])
    assert result.status == 0, result.output[-6000:]
    assert "2 passed" in result.output
