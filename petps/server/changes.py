"""Changes that somebody asks a running server for: one path for every door (DOORS.md).

The admin door and the page check their callers here, and here an alias is switched, audited and
logged.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from petps import _native
from petps.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    PetpsError,
    Unauthenticated,
)
from petps.log import Line
from petps.pool.audited import AuditedPool

if TYPE_CHECKING:
    from email.message import Message

__all__ = ["SWITCH_BYTES_MAX", "Changes", "PageSwitch"]

SWITCH_BYTES_MAX: Final = 4096  # of the page's request: three names and their keys
BEARER: Final = "bearer "


class Changes:
    """Checks callers and changes the pool for them. Threads: any."""

    def __init__(
        self, tables: _native.Tables, gate: _native.Gate, log: Callable[[str], None]
    ) -> None:
        self._tables, self.gate, self._log = tables, gate, log
        self._switching = threading.Lock()  # held from the check of `expected` to the switch

    def admit(
        self, token: str, certificate_names: Sequence[str], peer: str, size: int, model: str = ""
    ) -> _native.Caller:
        """Return the caller, who may administer ``model``, or everything if it is empty.

        Raises Unauthenticated, PermissionDenied, ResourceExhausted.
        """
        caller = self.gate.authenticate(token, list(certificate_names), peer)
        self.require_admin(caller, size, model)
        return caller

    def require_admin(self, caller: _native.Caller, size: int, model: str = "") -> None:
        """Raise PermissionDenied or ResourceExhausted unless the caller may administer it now.

        size: of the request, in bytes.
        """
        self.gate.charge(caller, size)
        self.gate.require(caller, "admin", self._model_of(model))

    def renewed(self, caller: _native.Caller) -> _native.Caller:
        """Return the caller with the rights that it has now. Raises Unauthenticated."""
        now = self.gate.renew(caller)
        if now is None:
            raise Unauthenticated(f"the grant of '{caller.name}' was revoked")
        return now

    def is_admin(self, caller: _native.Caller, model: str) -> bool:
        """Return whether the caller's grant, as it is now, may administer ``model``; "": all."""
        now = self.gate.renew(caller)
        if now is None or not model:
            return now is not None and now.may_everywhere("admin")
        return now.may("admin", self._model_of(model))

    def _model_of(self, name: str) -> str:
        """Return the model that a name means; a name that is not known stays as it is."""
        with contextlib.suppress(PetpsError):
            return self._tables.resolve(name).model if name else ""
        return name

    def switch_alias(
        self, user: str, alias: str, instance: str, *, expected: str | None = None
    ) -> None:
        """Let ``alias`` name ``instance``; user: who asks for it.

        Raises FailedPrecondition if the alias does not name ``expected`` any more, and the errors
        of Pool.switch_alias().
        """
        with self._switching:
            if expected is not None and (now := self._named_by(alias)) != expected:
                raise FailedPrecondition(
                    f"{alias} names {now or 'nothing'} now, not {expected}: it was switched "
                    "meanwhile; look again"
                )
            AuditedPool(self._tables, user, is_borrowed=True).switch_alias(alias, instance)
        self.note(user, f"alias '{alias}' names {instance} now", call="SwitchAlias")

    def note(self, user: str, text: str, *, call: str, peer: str = "") -> None:
        """Log what was done, and for whom: a pool on a device has no audit log."""
        whole = f"{text} (for {user})"
        self._log(Line(whole, "admin", call=call, user=user, peer=peer, change=text))

    def _named_by(self, alias: str) -> str:
        try:
            return self._tables.resolve(alias).name
        except NotFound:
            return ""


@dataclass(frozen=True, slots=True)
class _Switch:
    alias: str
    instance: str
    expected: str


class PageSwitch:
    """The page's switch of an alias. A browser may send it only by the hand of a person.

    So the token is one that the person types. What a browser adds to requests by itself, a password
    or a certificate, does not count, and the request must come from this server's own page.
    """

    def __init__(self, changes: Changes, gate: _native.Gate) -> None:
        self._changes, self._gate = changes, gate

    def __call__(self, headers: Message[str, str], body: bytes, peer: str) -> dict[str, Any]:
        """Switch, and return what the alias names. Raises PetpsError."""
        if self._gate.mode != "grants":
            raise PermissionDenied(
                "this server has no access file, so nobody can show that they may switch: run "
                "`petps alias POOL INSTANCE` on its machine, or configure [access] file"
            )
        _check_origin(headers)
        authorization = headers.get("Authorization") or ""
        if not authorization.lower().startswith(BEARER):
            raise Unauthenticated(
                "a switch needs the header 'Authorization: Bearer TOKEN'; what a browser sends by "
                "itself does not count"
            )
        token = authorization[len(BEARER) :].strip()
        caller = self._changes.admit(token, [], peer, len(body))
        switch = _parse(body)
        user = f"'{caller.name}' at {peer}, by the page"
        self._changes.switch_alias(user, switch.alias, switch.instance, expected=switch.expected)
        return {"alias": switch.alias, "instance": switch.instance, "before": switch.expected}


def _check_origin(headers: Message[str, str]) -> None:
    """Raise PermissionDenied unless a page of this server sent the request."""
    origin = headers.get("Origin") or ""
    host = headers.get("Host") or ""
    scheme, _, origin_host = origin.partition("://")
    is_own = bool(host) and scheme in ("http", "https") and origin_host == host
    if not is_own or headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        raise PermissionDenied(
            "a switch must come from this server's own page: its header Origin must name the "
            "server as the header Host does"
        )
    if (headers.get("Content-Type") or "").partition(";")[0].strip() != "application/json":
        raise InvalidArgument("a switch must be JSON: Content-Type: application/json")


def _is_text(value: Any) -> bool:
    """Return whether it is a text that can be written: JSON may name halves of a character."""
    return isinstance(value, str) and value.encode("utf-8", "ignore").decode() == value


def _parse(body: bytes) -> _Switch:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    names = ("alias", "instance", "expected")
    is_whole = isinstance(document, dict) and set(document) == set(names)
    if not is_whole or not all(_is_text(document[name]) for name in names):
        raise InvalidArgument(
            'a switch must be {"alias": TEXT, "instance": TEXT, "expected": TEXT}; expected is '
            "what the alias names now"
        )
    return _Switch(**document)
