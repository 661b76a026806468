"""Options and arguments that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Final

import typer

from petps.errors import FailedPrecondition, InvalidArgument

__all__ = [
    "LOG_HELP",
    "AdministeredPool",
    "AllowNotFinite",
    "JsonReport",
    "KafkaOption",
    "KeyColumn",
    "ModelOption",
    "RowColumn",
    "SignedKeys",
    "TableName",
    "TargetName",
    "Yes",
    "confirm",
    "kafka_options",
    "parse_key",
    "parse_rows",
]

LOG_HELP: Final = "a folder, or kafka://HOST:PORT[,HOST:PORT]/TOPIC"
_SUFFIXES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_ROWS_MAX: Final = 1 << 40  # native/pool/pool.h kMaxCapacity

AllowNotFinite = Annotated[
    bool, typer.Option("--allow-not-finite", help="Accept rows with NaN or infinity.")
]
JsonReport = Annotated[bool, typer.Option("--json", help="Report as JSON.")]
KafkaOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An option of librdkafka (security.protocol, sasl.username, ...), or topic.NAME=VALUE "
        "for a new topic. Repeatable.",
    ),
]
KeyColumn = Annotated[str | None, typer.Option(help="Name of the key column in the file.")]
ModelOption = Annotated[str | None, typer.Option(help="Model, instance or alias.")]
RowColumn = Annotated[str | None, typer.Option(help="Name of the row column in the file.")]
SignedKeys = Annotated[
    bool,
    typer.Option(
        "--signed-keys",
        help="Keys are signed: one below 0 is the unsigned key with the same 64 bits.",
    ),
]
TableName = Annotated[str, typer.Argument(metavar="TABLE", help="The table.")]
TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A pool's path, also if a server on this machine has it open; or a server: "
        "petps://HOST:PORT or petps://HOST:PORT/MODEL.",
    ),
]
AdministeredPool = Annotated[
    str,
    typer.Argument(
        metavar="POOL",
        help="The pool's path, on the machine of its server if one runs; or the server's admin "
        "port: petps+admin://HOST:PORT.",
    ),
]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def confirm(what: str, is_confirmed: bool) -> None:
    """Ask whether to do ``what``, unless it is confirmed. Raises Abort, FailedPrecondition."""
    if is_confirmed:
        return
    if not _is_anybody_there():
        raise FailedPrecondition(f"nobody can be asked whether to {what}: confirm it with --yes")
    typer.confirm(f"{what[0].upper()}{what[1:]}?", abort=True, err=True)


def _is_anybody_there() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def kafka_options(texts: Iterable[str] | None) -> dict[str, str]:
    """Return options written as NAME=VALUE, by name. Raises InvalidArgument."""
    options = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"Kafka option {text!r}: write NAME=VALUE")
        options[name] = value
    return options


def parse_rows(text: str, what: str) -> int:
    """Return a number of rows: 500000, 500k or 1.5m. Raises InvalidArgument that names ``what``."""
    factor = _SUFFIXES.get(text[-1:].lower(), 1)
    digits = (text[:-1] if factor > 1 else text).replace("_", "")
    try:
        rows = round(float(digits) * factor)
        if not 0 < rows <= _ROWS_MAX:
            raise ValueError
        return rows
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"{what} must be a number of rows, got '{text}'; write 500000, 500k or 1.5m, at most "
            "2^40"
        ) from None


def parse_key(text: str, *, signed: bool = False) -> int:
    """Return the key that ``text`` names; signed: -1 is 2^64-1. Raises InvalidArgument."""
    text = text.strip()  # petps/cli/arguments.py
    digits = text.removeprefix("-")
    is_negative = digits != text
    if not digits.isdecimal() or not -(1 << 63) <= int(text) < 1 << 64:
        kind = "-2^63" if signed else "0"
        raise InvalidArgument(f"a key must be a number from {kind} to 2^64-1, got '{text}'")
    if is_negative and not signed:
        raise InvalidArgument(
            f"a key must be a number from 0 to 2^64-1, got '{text}': --signed-keys takes a key "
            f"below 0 as the unsigned key with the same 64 bits, {int(text) % (1 << 64)}"
        )
    return int(text) % (1 << 64)
