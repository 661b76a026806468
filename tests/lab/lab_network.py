"""Zero-copy for real: two network cards, one in a network namespace of its own.

Loopback and veth copy what MSG_ZEROCOPY sends. Here the card of the server reads the rows where
they lie, in an fsdax mapping, while they are updated and their slots used again. The kernel's
completions must say so of most sends (what it sends again it copies).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.conftest import Suite
from tests.lab.guest import FSDAX, Guest

pytestmark = pytest.mark.timeout(1200)

OTHER_NETWORK = " && ".join(
    (
        "ip netns add clients",
        "ip link set eth1 netns clients",
        "ip -n clients address add 10.9.0.2/24 dev eth1",
        "ip -n clients link set eth1 up",
    )
)


def test_zerocopy_soak_from_fsdax(share: Path, suite: Suite) -> None:
    environment = {
        "PETPS_SOAK_SECONDS": "30",
        "PETPS_TEST_POOL": str(FSDAX / "pool"),
        "PETPS_TEST_HOST": "10.9.0.1",
        "PETPS_TEST_CLIENT_NETWORK": "/run/netns/clients",
    }
    suite(
        Guest(share, medium="fsdax", medium_bytes=256 << 20),
        "test_server",
        "Ways/Soaked.*/zerocopy",
        seconds_max=400,
        environment=environment,
        before=OTHER_NETWORK,
    )
