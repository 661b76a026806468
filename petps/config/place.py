"""Places that a configuration or a command names."""

from __future__ import annotations

import re

from petps.errors import InvalidArgument

__all__ = ["check_store"]


def check_store(url: str) -> None:
    """Raise InvalidArgument for the URL of a store without a name, or with a password."""
    if not url:
        raise InvalidArgument(
            "the store has no name: give a folder, or a URL such as s3://BUCKET/X"
        )
    if re.search("://[^/]*:[^/]*@", url):
        raise InvalidArgument(
            "the store's URL has a password, which status and logs would show: give credentials by "
            "the environment or by fsspec's configuration"
        )
