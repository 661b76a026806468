"""Who sees the status of a router, also while no server answers."""

from __future__ import annotations

from typing import Any, cast

import pytest

from petps.errors import PermissionDenied, PetpsError, Unavailable
from petps.router.gate import SEEN_MAX, RouterGate


class Servers:
    """Stand-in for the native router: whom the servers let see their status."""

    def __init__(self) -> None:
        self.seeing = {"operator"}
        self.are_away = False

    def check_sight(self, token: str, host: str) -> None:
        if self.are_away:
            raise Unavailable("no server answers")
        if token not in self.seeing:
            raise PermissionDenied("not this one")


def check(gate: RouterGate, token: str) -> None:
    gate.require_sight(gate.authenticate(token, [], "127.0.0.1:1"))


def test_who_saw_the_status_sees_it_while_no_server_answers() -> None:
    servers = Servers()
    gate = RouterGate(cast(Any, servers))
    check(gate, "operator")
    with pytest.raises(PermissionDenied):
        check(gate, "guessed")
    servers.are_away = True
    check(gate, "operator")
    for token in ("guessed", "new"):
        with pytest.raises(Unavailable):
            check(gate, token)


def test_a_token_that_lost_its_right_is_forgotten() -> None:
    servers = Servers()
    gate = RouterGate(cast(Any, servers))
    check(gate, "operator")
    servers.seeing.clear()
    with pytest.raises(PermissionDenied):
        check(gate, "operator")
    servers.are_away = True
    with pytest.raises(Unavailable):
        check(gate, "operator")


def test_the_tokens_that_are_remembered_are_bounded() -> None:
    servers = Servers()
    gate = RouterGate(cast(Any, servers))
    servers.seeing = {f"token {number}" for number in range(3 * SEEN_MAX)}
    for token in sorted(servers.seeing):
        check(gate, token)
    servers.are_away = True
    seen = 0
    for token in servers.seeing:
        try:
            check(gate, token)
        except PetpsError:
            continue
        seen += 1
    assert 1 <= seen <= SEEN_MAX
