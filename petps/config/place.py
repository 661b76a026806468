"""Places that a configuration or a command names."""

from __future__ import annotations

import re
from typing import Final

from petps.errors import InvalidArgument

__all__ = ["check_store"]

# USER:PASSWORD@HOST; also a password with '/', unless there is only a port before it.
_PASSWORD: Final = re.compile(r"://(?:[^/]*:[^/]*@|[^/@]*:(?!\d*/)[^@]*@)")
_SHOWN: Final = (
    "which status and logs would show: give credentials by the environment, or by files that "
    "fsspec reads (its configuration, those of AWS and others)"
)


def check_store(url: str) -> None:
    """Raise InvalidArgument for the URL of a store without a name, or that may have a secret."""
    if not url:
        raise InvalidArgument(
            "the store has no name: give a folder, or a URL such as s3://BUCKET/X"
        )
    if _PASSWORD.search(url):
        raise InvalidArgument(f"the store's URL has a password, {_SHOWN}")
    if re.search("://.*[?#]", url):
        raise InvalidArgument(
            f"the store's URL has a '?' or a '#', after which there may be a credential, {_SHOWN}"
        )
