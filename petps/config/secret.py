"""Which options hold a secret. Their values are never shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["HIDDEN", "hide_password", "hide_secrets", "is_secret"]

HIDDEN: Final = "(hidden)"
# Words in the names of librdkafka's options whose values are a secret or contain one.
_SECRET: Final = re.compile(
    "password|passphrase|secret|token(?!.endpoint)|jaas|kinit|key.pem|private.key"
    "|oauthbearer.config"
)
_PLACE: Final = re.compile(r"[._](file|location|url)$")


def is_secret(option: str) -> bool:
    """Return whether the option of this name holds a secret. A file's path is none."""
    name = option.lower()
    return _SECRET.search(name) is not None and _PLACE.search(name) is None


def hide_password(url: str) -> str:
    """Return the URL with HIDDEN for its user, password and query; any other text as it is."""
    url = re.sub(r"(://)[^/@,]*:(?!\d*[/,])[^@,]*@", rf"\1{HIDDEN}@", url)
    url = re.sub("(://|,)[^/,]*@", rf"\1{HIDDEN}@", url)
    return re.sub(r"(://[^?#\s]*[?#])[^\s'\"]+", rf"\1{HIDDEN}", url)


def hide_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with HIDDEN for each secret."""
    return {name: HIDDEN if is_secret(name) else value for name, value in options.items()}
