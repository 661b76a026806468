"""A network of namespaces: one for each node, and the program `switch` between them.

Each namespace has a TAP device as its only way out, and `switch` holds the other end of all. So
what one node sends to one other node can be cut, slowed or lost, in one direction, on kernels
without netem too. This process is the node "host", whose links never fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.chaos.tools import NotAvailable, program

HOST: Final = "host"
MTU: Final = 9000  # fewer frames than with 1500, and so less work for the switch
_HOST_NUMBER: Final = 1
_FIRST_NUMBER: Final = 10


@dataclass(frozen=True)
class Link:
    """Holds what happens to all that ``source`` sends to ``target``. loss 1: nothing arrives."""

    source: str
    target: str
    loss: float = 0.0
    delay_ms: float = 0.0


def check_machine() -> None:
    """Raise NotAvailable unless this machine has what a Network needs."""
    if os.geteuid() != 0:
        raise NotAvailable("chaos makes network namespaces and mounts: run it as root")
    if not Path("/dev/net/tun").exists():
        raise NotAvailable("/dev/net/tun is missing: load the module tun, or pass the device on")
    for command in ("ip", "nsenter", "mkfs.ext4"):
        if subprocess.run(["which", command], capture_output=True, check=False).returncode != 0:
            raise NotAvailable(f"{command} is missing: install iproute2, util-linux and e2fsprogs")
    name = f"petps-{os.getpid()}-try"
    process = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True, check=False
    )
    if process.returncode != 0:
        raise NotAvailable(f"no network namespaces: {process.stderr.strip()}")
    subprocess.run(["ip", "netns", "delete", name], check=True)


class Network:
    """Namespaces with an address each, until close(). Names of nodes have at most 4 letters."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._tag = os.getpid() % 100_000
        self._numbers = {HOST: _HOST_NUMBER}
        self._numbers |= {name: _FIRST_NUMBER + i for i, name in enumerate(nodes)}
        # A network of its own for each run, of those that nobody else should have here.
        self._subnet = f"10.{200 + os.getpid() // 250 % 50}.{os.getpid() % 250}"
        self._lock = threading.Lock()
        self._spaces: list[str] = []
        self._switch: subprocess.Popen[str] | None = None
        try:
            self._start_switch()
            for name in self._numbers:
                self._connect(name)
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        """Return the IP address of a node."""
        return f"{self._subnet}.{self._numbers[name]}"

    def prefix(self, name: str) -> list[str]:
        """Return the beginning of a command that runs in a node's namespace, as the same pid."""
        return ["nsenter", f"--net=/run/netns/{self._space(name)}", "--"]

    def use(self, links: Iterable[Link]) -> None:
        """Apply these faults, and no others, from now on."""
        rules = [
            {
                "from": self._numbers[link.source],
                "to": self._numbers[link.target],
                "loss": link.loss,
                "delay_ms": link.delay_ms,
            }
            for link in links
        ]
        with self._lock:
            switch = self._switch
            assert switch is not None
            assert switch.stdin is not None
            assert switch.stdout is not None
            switch.stdin.write(json.dumps(rules) + "\n")
            switch.stdin.flush()
            if switch.stdout.readline() != "ok\n":
                raise RuntimeError("the switch of the chaos network has ended")

    def close(self) -> None:
        """Remove all of it. The processes in the namespaces must have ended."""
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()  # closes its pipes
        for space in self._spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
        self._spaces.clear()

    def _space(self, name: str) -> str:
        return f"petps-{self._tag}-{name}"

    def _device(self, name: str) -> str:
        return f"pc{self._tag}{name}"

    def _mac(self, name: str) -> str:
        return f"02:00:00:00:00:{self._numbers[name]:02x}"

    def _start_switch(self) -> None:
        devices = [f"{self._device(name)}={number}" for name, number in self._numbers.items()]
        self._switch = subprocess.Popen(
            [str(program("switch")), *devices],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self._switch.stdout is not None
        assert self._switch.stderr is not None
        if self._switch.stdout.readline() != "ready\n":
            raise NotAvailable(f"no TAP devices: {self._switch.stderr.read().strip()}")

    def _connect(self, name: str) -> None:
        device, of_space = self._device(name), []
        if name != HOST:
            space = self._space(name)
            _ip("netns", "add", space)
            self._spaces.append(space)
            _ip("link", "set", device, "netns", space)
            of_space = ["-n", space]
        _ip(*of_space, "link", "set", device, "address", self._mac(name), "mtu", str(MTU))
        # Nothing but the nodes' own packets: no discovery of IPv6, no questions for addresses.
        setting = f"net.ipv6.conf.{device}.disable_ipv6=1"
        command = [] if name == HOST else self.prefix(name)
        subprocess.run([*command, "sysctl", "-qw", setting], check=False, capture_output=True)
        _ip(*of_space, "address", "add", f"{self.address(name)}/24", "dev", device)
        _ip(*of_space, "link", "set", device, "up")
        if name != HOST:
            _ip(*of_space, "link", "set", "lo", "up")
        neighbours = "".join(
            f"neigh replace {self.address(other)} lladdr {self._mac(other)} dev {device} "
            "nud permanent\n"
            for other in self._numbers
            if other != name
        )
        _ip(*of_space, "-batch", "-", text=neighbours)


def _ip(*arguments: str, text: str = "") -> None:
    process = subprocess.run(
        ["ip", *arguments], input=text, capture_output=True, text=True, check=False
    )
    if process.returncode != 0:
        raise NotAvailable(f"ip {' '.join(arguments)}: {process.stderr.strip()}")
