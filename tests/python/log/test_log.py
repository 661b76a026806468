"""The formats of the log, and the ids of requests."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from petps import log

Output = Callable[[], Any]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the loggers and hooks that set_up() changes."""
    loggers = (logging.getLogger(), log.OWN, logging.getLogger(log.ROOT))
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    hooks = sys.excepthook, threading.excepthook
    yield
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks
    log.OWN.propagate = True
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_json_line_has_time_level_event_message_and_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.set_up("json", "info")
    log.write(log.Line("table 'a' has grown", "table_grown", table="a", capacity=2, level_="x"))
    logging.getLogger("petps.server.ingest").error(
        "[ingest] partition %d stopped:\nwhy",
        3,
        extra=log.log_event("partition_stopped", partition=3),
    )
    logging.getLogger("grpc").warning("a library's \u2028 line")
    output = capsys.readouterr()
    assert output.err == ""
    own, room, library = lines_of(output.out)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", own.pop("time"))
    assert own == {
        "level": "info", "event": "table_grown", "message": "table 'a' has grown",
        "table": "a", "capacity": 2, "level_": "x",
    }  # fmt: skip
    assert (room["event"], room["partition"], room["level"]) == ("partition_stopped", 3, "error")
    assert (room["logger"], room["message"]) == (
        "petps.server.ingest", "[ingest] partition 3 stopped:\nwhy",
    )  # fmt: skip
    assert (library["event"], library["level"]) == ("grpc", "warning")


def test_no_field_replaces_a_member_of_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("json", "info")
    log.write(log.Line("text", "event", message="forged", time="forged"))
    [line] = lines_of(capsys.readouterr().out)
    assert line["message"] == "text"
    assert line["time"] != "forged"


def test_text_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("text", "info")
    log.write(log.Line("closed cleanly", "closed"))
    log.write("a plain line")
    room = logging.getLogger("petps.server.ingest")
    room.info("[ingest] begins")
    room.error("[ingest] fails")
    output = capsys.readouterr()
    first, second, third = output.out.splitlines()
    assert (first, second) == ("closed cleanly", "a plain line")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d .* INFO \[ingest\] begins", third)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d .* ERROR \[ingest\] fails\n", output.err)


@pytest.mark.parametrize("kind", ["text", "json"])
def test_the_level_hides_lines_below(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up(kind, "warning")
    log.write(log.Line("hidden", "x"))
    log.write(log.Line("shown", "x", log.WARNING))
    log.set_level("debug")
    logging.getLogger("petps.server.http").debug("shown")
    logging.getLogger("kafka").info("hidden")  # other libraries begin with warnings
    output = capsys.readouterr()
    assert "hidden" not in output.out + output.err
    assert (output.out + output.err).count("shown") == 2


def test_a_change_of_the_format_leaves_one_handler(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("json", "text", "json", "text", "json"):
        log.set_up(kind, "info")
    log.write("once")
    assert len(lines_of(capsys.readouterr().out)) == 1


def test_a_line_has_the_id_of_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    token = log.request_id.set("abc")
    try:
        log.set_up("json", "info")
        log.write("json")
        log.set_up("text", "info")
        log.write("text")
    finally:
        log.request_id.reset(token)
    log.write("none")
    first, *rest = capsys.readouterr().out.splitlines()
    assert json.loads(first)["request_id"] == "abc"
    assert rest == ["text [request abc]", "none"]


def test_a_callers_id_is_taken_if_it_is_short_and_printable() -> None:
    assert log.new_request_id("Abc-1/2") == log.new_request_id(b"Abc-1/2") == "Abc-1/2"
    for given in (None, "", "a b", "a\nb", "é", "x" * 129, b"\xff"):
        assert re.fullmatch("[0-9a-f]{16}", log.new_request_id(given)), given
    assert log.new_request_id() != log.new_request_id()


FAILING = """
import sys, threading, warnings
from petps import log
log.set_up("json", "info")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0, name="petps-x")
thread.start()
thread.join()
raise KeyError("gone")
"""


def test_what_nothing_catches_is_a_line_too() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", FAILING],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    warning, thread, uncaught = lines_of(done.stdout)
    assert warning["event"] == "warnings"
    assert (thread["event"], thread["thread"]) == ("thread_ended", "petps-x")
    assert "ZeroDivisionError" in thread["exception"]
    assert (uncaught["event"], uncaught["message"]) == ("uncaught", "KeyError: 'gone'")
    assert "Traceback" in uncaught["exception"]
