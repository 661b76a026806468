"""Shaped network links: they leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.train.namespaces import shaped, unavailable

ROOT = Path(__file__).resolve().parents[3]
WAIT_SECONDS = 60.0

HOLDING = """
import sys, bench.train.namespaces as namespaces
with namespaces.shaped(1e6) as link:
    print(*(side[1].split("/")[2] for side in link.inside), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    why = unavailable()
    if why:
        pytest.skip(f"no shaped link: {why}")


def _holders(inside: tuple[tuple[str, ...], ...]) -> list[int]:
    return [int(side[1].split("/")[2]) for side in inside]


def _gone(holders: list[int]) -> bool:
    return not any(Path(f"/proc/{holder}").exists() for holder in holders)


def test_the_sides_see_only_their_own_links() -> None:
    with shaped(1e6) as link:
        for side in link.inside:
            links = subprocess.run(
                [*side, "ip", "-brief", "link"], check=True, capture_output=True, text=True
            )
            seen = {line.split()[0].split("@")[0] for line in links.stdout.splitlines()}
            assert link.interface in seen
            assert "eth0" not in seen
        holders = _holders(link.inside)
        assert not _gone(holders)
    assert _gone(holders)


def test_an_error_leaves_nothing() -> None:
    holders: list[int] = []

    def failing() -> None:
        with shaped(1e6) as link:
            holders.extend(_holders(link.inside))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert holders
    assert _gone(holders)


def test_a_killed_creator_leaves_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as holding:  # fmt: skip
        assert holding.stdout is not None
        holders = [int(word) for word in holding.stdout.readline().split()]
        assert len(holders) == 2
        assert not _gone(holders)
        holding.kill()
    deadline = time.monotonic() + WAIT_SECONDS
    while not _gone(holders):
        assert time.monotonic() < deadline
        time.sleep(0.01)
