"""Messages between ranks: what is not as expected is refused, with the rank and the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from petps.errors import FailedPrecondition
from petps.train import agree, message
from petps.train.agree import Failure, gather_array, meet
from petps.train.plan import Plan

PLAN = {
    "ended": ["publish"],
    "failure": "",
    "publish": True,
    "version": 3,
    "next": {"kind": "delta", "since": 2, "tables": {"item": [["row", "f32", 4, None]]}},
    "is_due": False,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"more": 1}, "rank 0 .* field 'more' is unknown"),
        ({"publish": 1}, "rank 0 .* field 'publish': it must be true or false, got 1"),
        ({"version": -1}, "field 'version': it must be an integer from 0"),
        ({"version": True}, "field 'version'"),
        ({"version": 1 << 64}, "field 'version'"),
        ({"version": 1.0}, "field 'version'"),
        ({"failure": None}, "field 'failure': it must be a text"),
        ({"ended": "publish"}, "field 'ended': it must be a list"),
        ({"ended": [1]}, "field 'ended': it must be a text"),
        ({"next": {}}, "field 'next': it must be an object with the fields kind, since, tables"),
        ({"next": {"kind": "delta", "since": 0, "tables": []}}, "field 'next'"),
        ({"next": {"kind": "delta", "since": 0, "tables": {"a": 3}}}, "field 'next'"),
        (
            {
                "next": {
                    "kind": "delta",
                    "since": 0,
                    "tables": {"a": [["row", "f32", 1 << 40, None]]},
                }
            },
            "field 'next': column row: dim",
        ),
        (
            {"next": {"kind": "d", "since": 0, "tables": {"a": [["row", "f32", 4, {"x": 1}]]}}},
            "field 'next'",
        ),
    ],
)
def test_a_plan_with_another_field_or_value_is_refused(
    change: dict[str, Any], expected: str
) -> None:
    assert Plan.decode(json.dumps(PLAN).encode()).version == 3
    with pytest.raises(FailedPrecondition, match=expected):
        Plan.decode(json.dumps(PLAN | change).encode())


@pytest.mark.parametrize("name", sorted(PLAN))
def test_a_plan_that_lacks_a_field_is_refused(name: str) -> None:
    values = {key: value for key, value in PLAN.items() if key != name}
    with pytest.raises(FailedPrecondition, match=f"rank 0 .* field '{name}' is missing"):
        Plan.decode(json.dumps(values).encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000, b"1" * 5000, b"\x80\x04."])
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(FailedPrecondition, match="rank 7 sent a message that cannot be read"):
        message.decode(body, 7, {})


def _gather(monkeypatch: pytest.MonkeyPatch, bodies: list[bytes]) -> None:
    """Let every rank's bytes be ``bodies``, whatever it sends."""
    monkeypatch.setattr(agree, "gather_bytes", lambda link, body: bodies)


LINK: Any = None


def test_a_failure_of_another_shape_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    good = b'{"failure":null}'
    _gather(monkeypatch, [good, b'{"failure":{"text":"a"}}'])
    with pytest.raises(FailedPrecondition, match=r"rank 1 .* field 'failure'"):
        meet(LINK, None)
    _gather(monkeypatch, [good, b'{"failure":null,"counted":{"item":-1}}'])
    with pytest.raises(FailedPrecondition, match=r"rank 1 .* field 'counted'"):
        meet(LINK, None)
    _gather(monkeypatch, [good, b'{"failure":null,"other":0}'])
    with pytest.raises(FailedPrecondition, match=r"rank 1 .* field 'other' is unknown"):
        meet(LINK, None)


def test_a_long_failure_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "gather_bytes", lambda link, body: [body])
    failure, _ = meet(LINK, Failure("x" * (1 << 20), True))
    assert failure is not None
    assert len(failure.text) == len("rank 0: ") + agree.FAILURE_CHARS_MAX


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda body: body[:-1], "rank 1 .* expected an array <i8\\[3\\]"),
        (lambda body: body + b"\0", "rank 1"),
        (lambda body: body.replace(b"[3]", b"[2]"), "got '<i8\\[2\\]'"),
        (lambda body: body.replace(b"<i8", b"|O"), "got '|O"),
        (lambda body: b"", "got ''"),
    ],
)
def test_an_array_of_another_shape_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes], expected: str
) -> None:
    values = np.arange(3, dtype=np.int64)
    monkeypatch.setattr(agree, "gather_bytes", lambda link, body: [body, body])
    assert all((array == values).all() for array in gather_array(LINK, values))
    monkeypatch.setattr(agree, "gather_bytes", lambda link, body: [body, change(body)])
    with pytest.raises(FailedPrecondition, match=expected):
        gather_array(LINK, values)
