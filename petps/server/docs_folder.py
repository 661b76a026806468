"""The pages of docs/ that the server has, so that a remedy can be read without another site."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

from petps.errors import NotFound

__all__ = ["read_page"]

PATH: Final = re.compile(r"(how-to|runbook|reference/errors)/[a-z0-9-]+\.md")
PAGE_BYTES_MAX: Final = 1 << 20


def read_page(path: str) -> bytes:
    """Return a page, such as "how-to/table-full.md", as Markdown. Raises NotFound."""
    if PATH.fullmatch(path) and (page := _folder() / path).is_file():
        return page.read_bytes()[:PAGE_BYTES_MAX]
    raise NotFound("there is no such page: see the documentation of petps")


@cache
def _folder() -> Path:
    """Return the folder: that of the source tree, or the one that cmake/python.cmake installs."""
    package = Path(__file__).resolve().parents[1]
    source = package.parent / "docs"
    return source if (package.parent / "CMakeLists.txt").is_file() else package / "docs"
