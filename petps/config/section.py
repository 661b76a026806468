"""What the sections of the schema have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Name", "Port", "Section", "section"]

MAX_PORT = 65535

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,63}$")]
Port = Annotated[int, Field(ge=0, le=MAX_PORT)]


class Section(BaseModel):
    """One TOML table of the file. Unknown keys are refused; load.py names the nearest known key."""

    # Only Config's validator is built: those of its sections would delay the start of a server.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


def section(description: str) -> Any:
    """Return the field of a section. If the file lacks it, its keys have their defaults."""
    return Field(default_factory=dict, validate_default=True, description=description)
