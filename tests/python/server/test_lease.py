"""The thread that keeps a server's lease alive: what it asks etcd, and when it stops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from petps.errors import Unavailable
from petps.server.cluster.lease import Lease
from tests.python.cluster.simulated import FakeEtcd
from tests.python.waiting import wait_until


class CountingEtcd(FakeEtcd):
    """An etcd in memory that counts calls, and fails while ``is_away``."""

    def __init__(self) -> None:
        super().__init__()
        self.renewals = 0
        self.is_away = False

    def grant(self, seconds: int) -> int:
        """See Etcd."""
        if self.is_away:
            raise Unavailable("etcd does not answer: away")
        return super().grant(seconds)

    def keep_alive(self, lease: int) -> bool:
        """See Etcd."""
        if self.is_away:
            raise Unavailable("etcd does not answer: away")
        self.renewals += 1
        return super().keep_alive(lease)

    def close(self) -> None:
        """See Etcd."""


class Rig:
    """A lease that is renewed all the time, and whether its server works."""

    def __init__(self, etcd: CountingEtcd) -> None:
        self.etcd, self.is_working = etcd, True
        client: Any = etcd
        self.lease = Lease(client, 60, lambda: self.is_working)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr("petps.server.cluster.lease.LEASE_SHARE", 60_000)
    monkeypatch.setattr("petps.server.cluster.lease.RETRY_SECONDS", 0.001)
    rig = Rig(CountingEtcd())
    with contextlib.closing(rig.lease):
        yield rig


def test_it_is_renewed_and_ends_at_once(rig: Rig) -> None:
    rig.lease.start()
    number = rig.lease.number()
    wait_until(lambda: rig.etcd.renewals > 3)
    assert rig.lease.number() == number
    rig.lease.close()
    assert rig.etcd.leases == set()


def test_it_is_not_renewed_while_the_work_is_stuck(rig: Rig) -> None:
    rig.lease.start()
    wait_until(lambda: rig.etcd.renewals > 0)
    rig.is_working = False
    asked = []

    def has_passed_rounds() -> bool:
        asked.append(rig.etcd.renewals)
        return len(asked) > 20

    wait_until(has_passed_rounds)
    assert asked[-1] - asked[0] <= 1  # the round that had begun
    rig.is_working = True
    wait_until(lambda: rig.etcd.renewals > asked[-1] + 1)


def test_another_one_is_granted_after_its_end(rig: Rig) -> None:
    rig.lease.start()
    number = rig.lease.number()
    rig.etcd.revoke(number)
    wait_until(lambda: rig.lease.number() != number)


def test_an_etcd_that_is_away_is_named_until_it_is_back(rig: Rig) -> None:
    rig.etcd.is_away = True
    rig.lease.start()
    with pytest.raises(Unavailable, match="etcd does not answer: away"):
        rig.lease.number()
    rig.etcd.is_away = False

    def granted() -> int:
        with contextlib.suppress(Unavailable):
            return rig.lease.number()
        return 0

    number = wait_until(granted)
    rig.etcd.is_away = True
    assert rig.lease.number() == number  # it may still hold
