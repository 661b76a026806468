"""Who may see the status of a router: whoever the servers let see theirs."""

from __future__ import annotations

import time
from typing import Final

from petps import _native
from petps.errors import DeadlineExceeded, PetpsError, Unavailable
from petps.server.access import host_of

__all__ = ["RouterCaller", "RouterGate"]

# How long who has seen the status goes on to see it while no server answers: it is then that the
# status matters.
SEEN_SECONDS: Final = 3600.0
SEEN_MAX: Final = 64


class RouterCaller:
    """A caller of a router, known by its token alone. Looks like _native.Caller."""

    name = "the caller"

    def __init__(
        self, router: _native.Router, token: str, host: str, seen: dict[str, float]
    ) -> None:
        self.token, self.host = token, host
        self._router, self._seen = router, seen

    def check(self) -> None:
        """Raise PermissionDenied, Unauthenticated, or what keeps the servers from answering."""
        now = time.monotonic()
        try:
            self._router.check_sight(self.token, self.host)
        except (Unavailable, DeadlineExceeded):
            if now - self._seen.get(self.token, -SEEN_SECONDS) >= SEEN_SECONDS:
                raise
        except PetpsError:
            self._seen.pop(self.token, None)
            raise
        else:
            if len(self._seen) >= SEEN_MAX:
                self._seen.clear()
            self._seen[self.token] = now

    @property
    def may_see_all(self) -> bool:
        """Return whether the servers let the caller see their status."""
        try:
            self.check()
        except PetpsError:
            return False
        return True

    def may(self, role: str, model: str) -> bool:
        """Return True: the servers decide, for each request."""
        return True

    def spend_bytes(self, count: int) -> None:
        """Do nothing: a grant's limits are the servers'."""


class RouterGate:
    """The gate of a router's ports in Python. Looks like _native.Gate, but asks the servers."""

    mode = "servers"

    def __init__(self, router: _native.Router) -> None:
        self._router = router
        self._seen: dict[str, float] = {}  # by token: when the servers last let it see theirs

    def authenticate(self, token: str, certificate_names: list[str], peer: str) -> RouterCaller:
        """Return the caller. Whether the token is good is asked when it matters."""
        return RouterCaller(self._router, token, host_of(peer), self._seen)

    def renew(self, caller: RouterCaller) -> RouterCaller:
        """Return the caller: the servers end what a revoked token still does."""
        return caller

    def require_sight(self, caller: RouterCaller) -> None:
        """Raise PermissionDenied unless the caller may see the status."""
        caller.check()

    def charge(self, caller: RouterCaller, size: int) -> None:
        """Do nothing: a grant's limits are the servers'."""
