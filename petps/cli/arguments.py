"""What the commands' arguments have in common before a command runs.

A command that takes a path of this machine refuses a URL, with its name: pathlib would make a path
of it ("s3:/bucket"), and the command would read or write there. A key below 0 is no option.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from typer.core import TyperCommand

from petps.errors import InvalidArgument

__all__ = ["CommandWithKeys", "refuse_urls"]

_URL: Final = re.compile(r"([A-Za-z][\w+.\-]*):/(?!/)")  # "//" of a URL is "/" in a path
_BELOW_ZERO: Final = re.compile(r"-\d")


def refuse_urls(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command, which raises InvalidArgument for a URL where it takes a path."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        for name, value in options.items():
            if isinstance(value, Path) and (match := _URL.match(str(value))):
                url = str(value).replace(":/", "://", 1)
                raise InvalidArgument(
                    f"{name.upper()} takes a path of this machine, got the URL {url}"
                    + _remedy(match[1], url)
                )
        return command(*arguments, **options)

    return run


def _remedy(scheme: str, url: str) -> str:
    if scheme == "file":
        return f": write {url.removeprefix('file://')}"
    if scheme.startswith("petps"):
        return ": run this on the machine of the server, with the pool's path"
    return ": copy it here first"


class CommandWithKeys(TyperCommand):
    """A command whose arguments may be keys below 0 (-5), which look like options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. A blank keeps a key from being taken for an option."""
        return super().parse_args(
            ctx, [f" {text}" if _BELOW_ZERO.match(text) else text for text in args]
        )
