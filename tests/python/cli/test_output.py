"""What commands show of texts that another process has written."""

from __future__ import annotations

import pytest
import typer

from petps.cli.app import report_errors
from petps.cli.output import facts, note
from petps.errors import InvalidArgument
from petps.log import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("table 'Müller' — 5 €\n\tend", "table 'Müller' — 5 €\n\tend"),
        ("\x1b[2J\x1b]0;title\x07", "?[2J?]0;title?"),
        ("a\rb\0c\x7fd\x9be", "a?b?c?d?e"),
        ("\ud800", "?"),
        ("abc\u202etxt.exe\u2066\u200f", "abc?txt.exe??"),
        ("a\u2028b\u2029c\u200bd\ufeffe", "a?b?c?d?e"),
        ("\U000e0041\xad", "??"),
        ("5\xa0000\u3000€", "5\xa0000\u3000€"),
    ],
)
def test_a_terminal_obeys_no_text(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_errors_and_facts_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), report_errors():
        raise InvalidArgument("the server says \x1b[2J")
    assert "the server says ?[2J" in capsys.readouterr().err
    facts([("pool", "/tmp/\x1b[2J")])
    assert "/tmp/?[2J" in capsys.readouterr().out
    facts([("instance \x1b[2J[red]", 1)])
    assert "instance ?[2J[red]" in capsys.readouterr().out
    note("left out: \x1b[2J")
    assert capsys.readouterr().err == "left out: ?[2J\n"
