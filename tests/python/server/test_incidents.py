"""Since when a problem lasts, what has ended, and incidents with their times."""

from __future__ import annotations

from petps.server.incidents import EVENTS_MAX, Timeline
from petps.server.problems import Problem


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def problem(key: str, text: str = "It is wrong.") -> Problem:
    return Problem(key, "warning", text, "Mend it.", "how-to/operate.md")


def test_a_problem_keeps_its_beginning_while_its_text_changes() -> None:
    timeline = Timeline(Clock())
    first = timeline.note_problems([problem("lag", "3 s behind")])
    second = timeline.note_problems([problem("lag", "4 s behind"), problem("full")])
    assert first["problems"][0]["since"] == second["problems"][0]["since"] == 102
    assert second["problems"][1]["since"] == 103
    assert second["well_since"] is None
    newest, oldest = timeline.events()
    assert (oldest["text"], oldest["until"]) == ("4 s behind", None)
    assert newest["key"] == "full"


def test_the_end_of_all_problems_is_noted() -> None:
    timeline = Timeline(Clock())
    assert timeline.note_problems([])["well_since"] == 101
    timeline.note_problems([problem("a"), problem("b")])
    timeline.note_problems([problem("b")])
    report = timeline.note_problems([])
    assert report == {"problems": [], "well_since": 105}
    assert timeline.note_problems([])["well_since"] == 105
    assert {event["key"]: event["until"] for event in timeline.events()} == {"a": 104, "b": 105}
    again = timeline.note_problems([problem("a")])
    assert again["problems"][0]["since"] == 107  # another time, not the first one
    assert len(timeline.events()) == 3


def test_incidents_get_the_time_when_they_were_first_seen() -> None:
    timeline = Timeline(Clock())
    timeline.note_incidents(["peer 10.0.0.1:5001: bad frame"])
    timeline.note_incidents(["peer 10.0.0.1:5001: bad frame", "a part failed"])
    timeline.note_incidents(["peer 10.0.0.1:5001: bad frame", "a part failed",
                             "peer 10.0.0.2:5002: bad frame"])  # fmt: skip
    part, peers = timeline.events()
    assert (part["text"], part["at"], part["times"]) == ("a part failed", 103, 1)
    assert (peers["at"], peers["last_at"], peers["times"]) == (102, 104, 2)
    assert peers["text"] == "peer 10.0.0.2:5002: bad frame"
    assert peers["until"] is None


def test_events_are_bounded_and_those_that_last_stay() -> None:
    timeline = Timeline(Clock())
    timeline.note_problems([problem("lasts")])
    for number in range(3 * EVENTS_MAX):
        timeline.note_problems([problem("lasts"), problem(f"short {number}")])
    timeline.note_incidents(["incident " + "x" * n for n in range(2 * EVENTS_MAX)])
    events = timeline.events()
    assert len(events) == EVENTS_MAX
    assert events[-1]["key"] == "lasts"
    report = timeline.note_problems([problem(f"many {n}") for n in range(2 * EVENTS_MAX)])
    assert len(report["problems"]) == 2 * EVENTS_MAX
    assert len(timeline.events()) == EVENTS_MAX
