"""Two network namespaces, and between them a pair of links with a given rate.

A namespace exists as long as the process that holds it. That process exits when its standard input
ends, so also when its creator is killed. The links disappear with it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

__all__ = ["Shaped", "shaped", "unavailable"]

# The same name on both sides: GLOO_SOCKET_IFNAME is the same for all ranks.
INTERFACE: Final = "shaped0"
# The burst that the token bucket allows. With a smaller one, timers are too coarse for the rate.
BURST_SECONDS: Final = 1.2e-3
BURST_BYTES_MIN: Final = 16 << 10
QUEUE_MS: Final = 200  # packets that would wait longer are dropped, and sent again


@dataclass(frozen=True, slots=True)
class Shaped:
    """A shaped link. inside: the prefix of a command on each side; interface: its name."""

    inside: tuple[tuple[str, ...], tuple[str, ...]]
    interface: str


def unavailable() -> str:
    """Return why a shaped link is not available here, or an empty string if it is."""
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} missing (Debian: iproute2, util-linux)"
    try:
        with shaped(1e9):
            return ""
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return f"{error.cmd[0]}: {lines[-1] if lines else 'failed'}; it needs root"


@contextmanager
def shaped(bytes_per_second: float) -> Iterator[Shaped]:
    """Make each side send at most ``bytes_per_second``, headers included (tc tbf).

    Raises CalledProcessError if that is not permitted.
    """
    holders: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            holders.append(_start_holder())
        inside = tuple(("nsenter", f"--net=/proc/{holder.pid}/ns/net", "--") for holder in holders)
        add_link = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE]
        _run(*inside[0], *add_link, "netns", str(holders[1].pid))
        bits = f"{round(8 * bytes_per_second)}bit"
        burst = max(BURST_BYTES_MIN, round(BURST_SECONDS * bytes_per_second))
        # Every kernel has Reno. BBR would probe such a link for 100 ms at a time.
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
        for holder in holders:
            holder.communicate()


def _start_holder() -> subprocess.Popen[str]:
    """Start a process in a namespace of its own, which runs until its standard input ends."""
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo in && exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != "in\n":
        errors = holder.communicate()[1]
        raise subprocess.CalledProcessError(holder.returncode, ["unshare"], stderr=errors)
    return holder


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
