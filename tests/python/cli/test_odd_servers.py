"""Commands that speak to a server which answers what no server of petps would."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from petps.cli import target
from petps.errors import FailedPrecondition
from tests.python.cli.conftest import Command

URL = "petps://127.0.0.1:1/default"
UNSEEN = set("\x1b\x07\u202e\u2028")
EVIL = "\x1b]0;title\x07\u202e\u2028"


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return an object whose ``text`` is the JSON that the server sends as its status."""
    given = SimpleNamespace(text="{}")

    def status() -> Any:
        return json.loads(given.text)

    client = SimpleNamespace(status=status, close=lambda: None)
    monkeypatch.setattr(target._ServerTarget, "_client", client)
    return given


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[", id="cut"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param('{"pid": ' + "9" * 100_000 + "}", id="long number"),
        pytest.param("7", id="number"),
        pytest.param("{}", id="empty"),
        pytest.param('{"tables": 5, "instances": [null]}', id="other types"),
        pytest.param(
            '{"tables": [], "instances": [], "aliases": {}, "pool": 7, "uptime_s": 1e999}',
            id="infinite",
        ),
        pytest.param(json.dumps({"tables": [{"name": EVIL, "instance": EVIL}]}), id="table"),
        pytest.param(
            json.dumps({EVIL: 1, "instances": [{"id": 1, "name": EVIL, "model": EVIL}]}),
            id="instance",
        ),
    ],
)
def test_an_odd_status_is_one_sentence(run: Command, answer: SimpleNamespace, text: str) -> None:
    answer.text = text
    error = run.fails(1, "status", URL)
    assert "sent a status that this command cannot read" in error
    assert not UNSEEN & set(error)
    assert len(error) < 1000


def test_a_fault_of_this_command_is_not_blamed_on_a_pool(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError), target.reading_answer(str(pool)):
        raise KeyError("dtype")
    with pytest.raises(FailedPrecondition), target.reading_answer(URL):
        raise FailedPrecondition("as the server says")


def test_the_report_shows_no_control_characters_of_a_server(
    run: Command, answer: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status() -> Any:
        raise FailedPrecondition(EVIL)

    monkeypatch.setattr(target._ServerTarget._client, "status", status)
    shown = run("report", URL, "--output", tmp_path / "r.tar.gz")
    assert "left out: ?]0;title???" in shown
    assert not UNSEEN & set(shown)
