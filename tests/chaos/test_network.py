"""The network of the chaos suite does to links what it is told, in one direction."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.chaos.network import HOST, Link, Network, check_machine
from tests.chaos.tools import NotAvailable

PORT = 7000
# Prints each datagram that it hears, and sends it back.
ECHO = f"""
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
    door.bind((sys.argv[1], {PORT}))
    print("ready", flush=True)
    while True:
        text, peer = door.recvfrom(9000)
        print(text.decode(), flush=True)
        door.sendto(text, peer)
"""


class Echo:
    """A process in the namespace "a" that answers."""

    def __init__(self, network: Network) -> None:
        self._address = network.address("a")
        command = [*network.prefix("a"), sys.executable, "-c", ECHO, self._address]
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._read() == "ready"
        self._door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._door.bind((network.address(HOST), 0))

    def _read(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()

    def send(self, text: str) -> None:
        """Send a datagram, and do not wait for what comes back."""
        self._door.sendto(text.encode(), (self._address, PORT))

    def ask(self, text: str, seconds: float = 20.0) -> str | None:
        """Return what comes back; None: nothing in this time."""
        self._door.settimeout(seconds)
        self.send(text)
        try:
            return self._door.recv(9000).decode()
        except TimeoutError:
            return None

    def heard(self) -> str:
        """Return the next datagram that the process has heard."""
        return self._read()

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        self._door.close()
        assert self._child.stdout is not None
        self._child.stdout.close()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        check_machine()
        network = Network(["a", "b"])
    except NotAvailable as reason:
        pytest.skip(f"no chaos network: {reason}")
    yield network
    network.close()


@pytest.fixture
def echo(network: Network) -> Iterator[Echo]:
    network.use([])
    echo = Echo(network)
    yield echo
    echo.close()


def test_a_cut_of_one_direction_leaves_the_other(network: Network, echo: Echo) -> None:
    assert echo.ask("hello") == "hello"
    assert echo.heard() == "hello"
    network.use([Link("a", HOST, loss=1.0)])
    assert echo.ask("way there", 0.2) is None
    assert echo.heard() == "way there"
    network.use([Link(HOST, "a", loss=1.0)])
    assert echo.ask("nowhere", 0.2) is None
    network.use([Link("b", "a", loss=1.0), Link("a", "b", loss=1.0)])  # of another node
    assert echo.ask("again") == "again"
    assert echo.heard() == "again"  # and not "nowhere"


def test_a_slow_link_keeps_the_order(network: Network, echo: Echo) -> None:
    network.use([Link(HOST, "a", delay_ms=60.0), Link("a", HOST, delay_ms=60.0)])
    begin = time.monotonic()
    assert echo.ask("slow") == "slow"
    assert time.monotonic() - begin >= 0.12
    assert echo.heard() == "slow"
    echo.send("late")
    network.use([])
    assert echo.ask("soon") == "late"  # the frame without a delay does not overtake it
    assert (echo.heard(), echo.heard()) == ("late", "soon")
