"""The header traceparent: valid ones are read as they were written, and others count as none."""

from __future__ import annotations

from petps.traceparent import Caller, format_traceparent, parse_traceparent


def test_a_traceparent_is_read_as_it_was_written() -> None:
    text = format_traceparent(0xAB, 0xCD)
    assert text == f"00-{'0' * 30}ab-{'0' * 14}cd-01"
    caller = Caller(bytes(15) + b"\xab", bytes(7) + b"\xcd")
    assert parse_traceparent(text) == parse_traceparent(text.encode()) == caller
    assert parse_traceparent(text[:-2] + "ff") == caller
    assert parse_traceparent("01" + text[2:] + "-more") == caller
    for wrong in (
        None,
        "",
        b"\xff" * 55,
        text[:-2] + "00",
        text + "-more",
        "ff" + text[2:],
        text.upper(),
        text.replace("ab", "00"),
        text.replace("cd", "00"),
        text + "x" * 600,
        text + "\n",
        text[1:],
    ):
        assert parse_traceparent(wrong) is None, wrong
