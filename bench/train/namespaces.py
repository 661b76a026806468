"""Two network namespaces and a pair of links between them that are as slow as asked for.

Nothing has a name outside of them: a namespace lives as long as the process that holds it, which
ends when its standard input does, so also if whoever made it was killed; the links go with it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

__all__ = ["Shaped", "shaped", "unavailable"]

# The same on both sides: GLOO_SOCKET_IFNAME is one for all workers.
INTERFACE: Final = "shaped0"
# What the token bucket lets through at once: less, and timers are too coarse for the rate.
BURST_SECONDS: Final = 1.2e-3
BURST_BYTES_MIN: Final = 16 << 10
QUEUE_MS: Final = 200  # what waits longer is dropped, and sent again


@dataclass(frozen=True, slots=True)
class Shaped:
    """inside: by side, what a command begins with that shall run there; interface: its name."""

    inside: tuple[tuple[str, ...], tuple[str, ...]]
    interface: str


def unavailable() -> str:
    """Why there can be no shaped link here; empty: there can."""
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} missing (Debian: iproute2, util-linux)"
    try:
        with shaped(1e9):
            return ""
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        return f"{error.cmd[0]}: {said[-1] if said else 'failed'}; it needs root"


@contextmanager
def shaped(bytes_per_second: float) -> Iterator[Shaped]:
    """Each side sends at most so many bytes a second, headers among them (tc tbf).

    Raises CalledProcessError where that is not permitted.
    """
    holders: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            holders.append(_holder())
        inside = tuple(("nsenter", f"--net=/proc/{each.pid}/ns/net", "--") for each in holders)
        made = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE]
        _run(*inside[0], *made, "netns", str(holders[1].pid))
        bits = f"{round(8 * bytes_per_second)}bit"
        burst = max(BURST_BYTES_MIN, round(BURST_SECONDS * bytes_per_second))
        # Of what every kernel has; BBR probes such a link for 100 ms at a time.
        reno = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
        for number, side in enumerate(inside):
            _run(*side, "sh", "-c", reno)
            _run(*side, "ip", "link", "set", "lo", "up")
            address = f"10.0.0.{number + 1}/24"
            _run(*side, "ip", "address", "add", address, "dev", INTERFACE)
            _run(*side, "ip", "link", "set", INTERFACE, "up")
            _run(
                *side, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", bits,
                "burst", str(burst), "latency", f"{QUEUE_MS}ms",
            )  # fmt: skip
        yield Shaped((inside[0], inside[1]), INTERFACE)
    finally:
        for each in holders:
            each.communicate()


def _holder() -> subprocess.Popen[str]:
    """A process in a namespace of its own, until its standard input ends."""
    holding = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo in && exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holding.stdout is not None
    if holding.stdout.readline() != "in\n":
        said = holding.communicate()[1]
        raise subprocess.CalledProcessError(holding.returncode, ["unshare"], stderr=said)
    return holding


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
