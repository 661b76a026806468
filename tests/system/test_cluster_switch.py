"""A cluster switches its model: no answer mixes two instances, and no client goes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import petps_client
import pytest

from tests.etcd.server import EtcdServers
from tests.system import servers
from tests.system.clusters import ALL, Cluster, rows_of
from tests.system.servers import WAIT_MS, Puller, Server, wait_until

pytestmark = pytest.mark.system

OLD, NEW = "default@0", "default@2"


@pytest.fixture
def cluster(
    serve: Callable[..., Server], make_etcd: Callable[..., EtcdServers], tmp_path: Path
) -> Iterator[Cluster]:
    cluster = Cluster(serve, make_etcd(1), tmp_path, 2, switch="manual")
    yield cluster
    cluster.close()


class Seen:
    """The versions of whole answers, in their order. Each instance has one version here."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def pull(self, client: petps_client.Client) -> int:
        """Pull every row, and return the version of the answer."""
        rows, mask = client.pull("fed", ALL, return_mask=True, deadline_ms=WAIT_MS)
        assert mask.all()
        versions = set(np.rint(rows[:, 1] - rows[:, 0]).astype(int).tolist())
        assert len(versions) == 1, f"one answer has rows of versions {versions}"
        version = int(versions.pop())
        np.testing.assert_array_equal(rows, rows_of(ALL, version))
        assert not self.versions or version >= self.versions[-1], (version, self.versions[-1])
        self.versions.append(version)
        return version


def load(cluster: Cluster, numbers: tuple[int, ...]) -> int:
    """Begin an instance, and wait until these servers have loaded it. Return its version."""
    version = cluster.begin(NEW)
    for number in numbers:
        address = cluster.addresses[number]
        wait_until(
            f"{address} has loaded it",
            lambda: (
                (member := cluster.state().members.get(address)) is not None  # noqa: B023
                and NEW in member.whole
            ),
        )
    return version


def names(cluster: Cluster, number: int) -> str:
    """Return the instance that the model's name refers to at a server."""
    status = cluster.servers[number].status()
    by_id = {record["id"]: str(record["name"]) for record in status["instances"]}
    return by_id[status["aliases"]["default"]] if status["aliases"] else OLD


def test_all_servers_switch_at_once_and_back(cluster: Cluster) -> None:
    old = cluster.start()
    cluster.control()
    seen = Seen()
    with Puller(cluster.url(), seen.pull, through_kills=False) as puller:
        new = load(cluster, (0, 1))
        pulls = puller.pulls
        wait_until("pulls before the switch", lambda: puller.pulls > pulls + 3 or puller.error)
        assert seen.versions[-1] == old
        cluster.petps("switch", NEW, "--yes", "--wait", servers.WAIT_SECONDS)
        wait_until("the new instance", lambda: seen.versions[-1] == new or puller.error)
        puller.check()
    assert [names(cluster, number) for number in (0, 1)] == [NEW, NEW]
    cluster.petps("switch", "--back", "--yes", "--wait", servers.WAIT_SECONDS)
    assert [names(cluster, number) for number in (0, 1)] == [OLD, OLD]
    with servers.connect(cluster.url()) as client:
        after = Seen()
        after.pull(client)
        assert after.versions == [old]


def test_a_server_that_was_away_switches_when_it_is_back(cluster: Cluster) -> None:
    cluster.start(replicas=2)
    cluster.control()
    new = load(cluster, (0, 1))
    with servers.connect(cluster.url()) as client:
        seen = Seen()
        late, other = cluster.servers[1], cluster.servers[0]
        late.kill()
        cluster.end_lease(1)
        wait_until("it is away", lambda: cluster.addresses[1] not in cluster.state().members)
        cluster.petps("switch", NEW, "--yes", "--wait", servers.WAIT_SECONDS)
        wait_until("the client follows", lambda: seen.pull(client) == new)
        # Only the late server is left. It has the old instance, and must not answer with it.
        other.kill()
        late.launch()
        wait_until("the late one switches", lambda: names(cluster, 1) == NEW)
        assert seen.pull(client) == new
