"""A zero-copy test with two network cards, one of them in a network namespace of its own.

Loopback and veth copy the data that MSG_ZEROCOPY sends. Here the server's network card reads the
rows in place, from an fsdax mapping, while they are updated and their slots are reused. The
kernel's completions must report zero-copy for most sends. It copies only data that it sends again.
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
