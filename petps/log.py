"""The log of a server: lines for people, or JSON objects for programs. docs/reference/log.md.

Owns:        the two formats, the handlers of the process, the request id of the present request.
Never does:  decide what is worth a line; write a secret (the callers leave secrets out).
Called by:   cli serve, server and its rooms.
Invariants:  in JSON, each line of standard output is one object, also a start-up line and the error
             that ends the process. A reader that closes the pipe does not stop the server.
Threads:     any.
"""

from __future__ import annotations

import contextvars
import json
import logging
import os
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Mapping
from logging import DEBUG, ERROR, INFO, WARNING
from typing import Any, Final, TextIO

from petps.errors import PetpsError

__all__ = [
    "DEBUG",
    "ERROR",
    "INFO",
    "LEVELS",
    "UNSEEN",
    "WARNING",
    "JsonFormatter",
    "Line",
    "code_of",
    "log_event",
    "new_request_id",
    "printable",
    "request_id",
    "set_level",
    "set_up",
    "write",
]

LEVELS: Final = ("debug", "info", "warning", "error")
ROOT: Final = "petps"  # the logger above those of all rooms
# The server's own lines. In text they go to standard output, as they are. The lines of other
# loggers have their time and level; warnings and errors among them go to standard error.
OWN: Final = logging.getLogger("petps.own")
# Categories of Unicode: control, format, half of a character, line and paragraph separators.
UNSEEN: Final = ("Cc", "Cf", "Cs", "Zl", "Zp")
TEXT: Final = "%(asctime)s %(levelname)s %(message)s"

request_id: Final = contextvars.ContextVar("request_id", default="")
"""The id of the request that this thread or task answers; '' outside of requests."""
_GIVEN_ID: Final = re.compile("[!-~]{1,128}")  # a caller's id: short, printable ASCII, one word


class Line(str):
    """A line of the server's own: its text for people, and its event and fields for programs."""

    __slots__ = ("event", "fields", "level")

    event: str
    """Short and stable: 'serving', 'reload_failed'."""
    level: int
    fields: Mapping[str, Any]
    """Plain values by name."""

    def __new__(cls, text: str, event: str, level: int = INFO, **fields: Any) -> Line:
        """Return the line."""
        line = super().__new__(cls, text)
        line.event, line.level, line.fields = event, level, fields
        return line


def write(text: str) -> None:
    """Write a line of the server's own; a plain text is of level info."""
    line = text if isinstance(text, Line) else Line(text, "server")
    OWN.log(line.level, "%s", line, extra=log_event(line.event, **line.fields))


def code_of(error: Exception) -> str:
    """Return the code of an error of petps, else the name of its class."""
    return error.code if isinstance(error, PetpsError) else type(error).__name__


def log_event(name: str, **fields: Any) -> dict[str, Any]:
    """Return the ``extra`` of a logging call: the event's name, and its fields."""
    return {"event": name, "fields": fields}


def printable(text: str) -> str:
    """Return ``text`` with '?' instead of control characters other than tabs and line ends.

    Another process, such as a server, may have written it, and a terminal would obey it. The same
    for characters that no eye sees, but that reorder the others or end a line (U+202E, U+2028).
    """
    return "".join(
        "?" if unicodedata.category(character) in UNSEEN and character not in "\n\t"
        else character
        for character in text
    )  # fmt: skip


def new_request_id(given: str | bytes | None = None) -> str:
    """Return the caller's id of a request if it is one, else a new one."""
    text = given.decode("latin-1") if isinstance(given, bytes) else given
    return text if text and _GIVEN_ID.fullmatch(text) else os.urandom(8).hex()


def set_level(level: str) -> None:
    """Set the lowest level of the lines of petps, one of LEVELS."""
    logging.getLogger(ROOT).setLevel(level.upper())


def set_up(format: str, level: str) -> None:
    """Write the lines of this process as 'text' or 'json' from now on.

    Other libraries' lines begin with warnings, whatever the level is. In JSON, an exception that
    nothing catches becomes a line, and so does a warning of Python.
    """
    is_json = format == "json"
    root = logging.getLogger()
    for logger in (root, OWN):
        for handler in [ours for ours in logger.handlers if isinstance(ours, _Handler)]:
            logger.removeHandler(handler)
    OWN.propagate = is_json
    if is_json:
        root.addHandler(_Handler(sys.stdout, JsonFormatter()))
    else:
        OWN.addHandler(_Handler(sys.stdout, _TextFormatter("%(message)s")))
        lines = _Handler(sys.stdout, _TextFormatter(TEXT))
        lines.addFilter(lambda record: record.levelno < WARNING)
        faults = _Handler(sys.stderr, _TextFormatter(TEXT))
        faults.setLevel(WARNING)
        root.addHandler(lines)
        root.addHandler(faults)
    root.setLevel(WARNING)
    # grpcio writes lines, and what was sent, for peers that it refuses: of anybody, without an end,
    # and with tokens. petps logs the failures of its own methods (server/grpc/admission.py).
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL + 1)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported
    set_level(level)
    logging.captureWarnings(is_json)
    if is_json:
        sys.excepthook, threading.excepthook = _log_uncaught, _log_thread_end
    elif sys.excepthook is _log_uncaught:
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__


class _Handler(logging.StreamHandler[TextIO]):
    """Handler of a stream, whose reader may be gone."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__(stream)
        self.setFormatter(formatter)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Lose the line: there is nowhere to report that."""


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        text = printable(super().formatMessage(record))
        number = request_id.get()
        return f"{text} [request {number}]" if number else text


class JsonFormatter(logging.Formatter):
    """Formatter of a line as one JSON object: time, level, event, message, and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line: dict[str, Any] = {
            "time": _time_text(record.created),
            "level": record.levelname.lower(),
            # Of lines without an event, the last part of the logger: 'grpc', 'kafka', 'asyncio'.
            "event": getattr(record, "event", record.name.rpartition(".")[2]),
            "message": record.getMessage(),
        }
        if record.name != OWN.name:
            line["logger"] = record.name
        if number := request_id.get():
            line["request_id"] = number
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        fields = getattr(record, "fields", {})
        line |= {name: value for name, value in fields.items() if name not in line}
        return json.dumps(line, default=str)


def _time_text(seconds: float) -> str:
    """Return a time as RFC 3339 in UTC, with milliseconds."""
    whole, milliseconds = divmod(int(seconds * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{milliseconds:03d}Z"


def _log_uncaught(kind: Any, error: Any, trace: Any) -> None:
    """Write the exception that ends the process."""
    OWN.error(
        "%s: %s", kind.__name__, error, extra=log_event("uncaught"), exc_info=(kind, error, trace)
    )


def _log_thread_end(uncaught: threading.ExceptHookArgs) -> None:
    """Write the exception that ends a thread."""
    name = "a thread" if uncaught.thread is None else uncaught.thread.name
    OWN.error(
        "%s ended: %s", name, uncaught.exc_value, extra=log_event("thread_ended", thread=name),
        exc_info=(
            uncaught.exc_type, uncaught.exc_value or uncaught.exc_type(), uncaught.exc_traceback,
        ),
    )  # fmt: skip
