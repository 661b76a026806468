"""The messages of admin.proto (petps/v1/messages.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from petps.admin.descriptor import SERIALIZED
from petps.v1.messages import load

DESCRIPTOR: Final = load(SERIALIZED, globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
