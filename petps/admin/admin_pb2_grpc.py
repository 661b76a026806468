"""The service of admin.proto: its stub for clients, and its registration for servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from petps.admin.admin_pb2 import DESCRIPTOR
from petps.v1.service import add_calls, register

__all__ = ["AdminStub", "add_AdminServicer_to_server"]

_SERVICE: Final = DESCRIPTOR.services_by_name["Admin"]


class AdminStub:
    """The calls of a client: one callable for each method, such as ``Grow(request)``."""

    def __init__(self, channel: Any) -> None:
        add_calls(self, channel, _SERVICE)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def add_AdminServicer_to_server(servicer: Any, server: Any) -> None:  # noqa: N802
    """Register the methods of ``servicer`` with a gRPC server."""
    register(servicer, server, _SERVICE)
