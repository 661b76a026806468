"""What `petps status` says of the partitions that a server follows."""

from __future__ import annotations

from typing import Any

import pytest

from petps.cli.commands.status import _show_ingest

AWAY = "no broker answers: " + "the text of librdkafka " * 10


def partition(number: int, state: str, reason: str = "") -> dict[str, Any]:
    return {
        "partition": number, "instance": "default@1", "state": state, "reason": reason, "run": 1,
        "seq": 1, "version": 1, "lag_records": None, "lag_seconds": None, "gaps": 0,
        "duplicates": 0, "zombies": 0, "dead_letters": 0,
    }  # fmt: skip


def test_a_reason_is_said_once_with_all_its_partitions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    partitions = [partition(number, "unreachable", AWAY) for number in range(6)]
    partitions += [partition(6, "stale", "messages 3 to 5 are missing"), partition(7, "following")]
    _show_ingest(
        {
            "model": "default", "log": "kafka://h:9092", "error": None, "paused": False,
            "partitions": partitions, "version": 1, "dense": None, "rows": 5,
            "freshness": {"p50_ms": None, "p99_ms": None},
        }
    )  # fmt: skip
    words = " ".join(capsys.readouterr().out.split())
    assert words.count("no broker answers") == 1
    assert f"partition 0-5 unreachable: {AWAY.strip()}" in words
    assert "partition 6 stale: messages 3 to 5 are missing" in words
    assert "6 unreachable, 1 stale, 1 following" in words
