"""The order rule: every outcome, and random faults in streams of three runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from petps.delta import ContinueBody, Kind, RecordHeader
from petps.server.ingest import Applied, Outcome, decide
from petps.server.ingest.order import mark_of
from tests.python.delta.test_record import HEADER

ROWS = replace(HEADER, run=5, publisher="a", seq=11)
AT = Applied(5, 10, mark_of("a"))


def marker(run: int, seq: int = 1, kind: Kind = Kind.CONTINUE) -> RecordHeader:
    return replace(ROWS, kind=kind, run=run, seq=seq, table="", dtype="", dim=0, publisher="b")


def body(run: int, seq: int) -> ContinueBody:
    return ContinueBody(previous_run=run, last_seq=seq)


@pytest.mark.parametrize(
    ("header", "continued", "outcome", "reason"),
    [
        (ROWS, None, Outcome.APPLY, ""),
        (replace(ROWS, seq=10), None, Outcome.DUPLICATE, ""),
        (replace(ROWS, seq=1), None, Outcome.DUPLICATE, ""),
        (replace(ROWS, seq=12), None, Outcome.GAP, "run 5: seqs 11 to 11 are missing"),
        (replace(ROWS, seq=20), None, Outcome.GAP, "run 5: seqs 11 to 19 are missing"),
        (replace(ROWS, run=4), None, Outcome.ZOMBIE, "run 4 of publisher a is older than run 5"),
        (replace(ROWS, publisher="b"), None, Outcome.CONFLICT, "run 5 has two publishers, b and"),
        (replace(ROWS, publisher="b", seq=3), None, Outcome.CONFLICT, "stop one of them"),
        (marker(6, kind=Kind.BASE), None, Outcome.NEW_RUN, ""),
        (marker(6), body(5, 10), Outcome.NEW_RUN, ""),
        (marker(9), body(5, 10), Outcome.NEW_RUN, ""),
        (marker(6), body(5, 9), Outcome.GAP, "but run 5 seq 10 was applied last here"),
        (marker(6), body(5, 11), Outcome.GAP, "run 6 continues run 5 seq 11"),
        (marker(6), body(4, 10), Outcome.GAP, "run 6 continues run 4 seq 10"),
        (marker(6), body(0, 0), Outcome.GAP, "run 6 continues run 0 seq 0"),
        (replace(ROWS, run=6, seq=1), None, Outcome.GAP, "begins here with seq 1 (rows)"),
        (replace(ROWS, run=6, seq=11), None, Outcome.GAP, "begins here with seq 11 (rows)"),
        (marker(6, 2, Kind.BASE), None, Outcome.GAP, "begins here with seq 2 (base)"),
        (marker(4), body(3, 1), Outcome.ZOMBIE, "older"),
        (replace(marker(5, 1), publisher="a"), body(4, 1), Outcome.DUPLICATE, ""),
        (replace(marker(5, 11, Kind.BASE), publisher="a"), None, Outcome.APPLY, ""),
    ],
)
def test_every_outcome(
    header: RecordHeader, continued: ContinueBody | None, outcome: Outcome, reason: str
) -> None:
    decision = decide(AT, header, continued)
    assert decision.outcome is outcome
    assert reason in decision.reason
    assert bool(decision.reason) == (outcome in (Outcome.GAP, Outcome.ZOMBIE, Outcome.CONFLICT))


@pytest.mark.parametrize(
    ("header", "continued", "outcome"),
    [
        (marker(6, kind=Kind.BASE), None, Outcome.NEW_RUN),
        (marker(6), body(0, 0), Outcome.NEW_RUN),
        (marker(6), body(5, 3), Outcome.GAP),
        (ROWS, None, Outcome.GAP),
    ],
)
def test_an_empty_pool_accepts_only_the_beginning_of_a_run(
    header: RecordHeader, continued: ContinueBody | None, outcome: Outcome
) -> None:
    assert decide(Applied(), header, continued).outcome is outcome


def test_an_unknown_publisher_is_accepted() -> None:
    assert decide(Applied(5, 10), replace(ROWS, publisher="z")).outcome is Outcome.APPLY


def test_a_continue_marker_needs_its_body() -> None:
    with pytest.raises(ValueError, match="needs its body"):
        decide(AT, marker(6))


@pytest.mark.parametrize("seed", range(20))
def test_only_a_gapless_prefix_is_applied(seed: int) -> None:
    """Duplicate, reorder and lose messages of three runs."""
    rng = np.random.default_rng(seed)
    stream: list[tuple[RecordHeader, ContinueBody | None]] = []
    previous = (0, 0)
    for run in (1, 2, 3):
        first = replace(marker(run), publisher=f"p{run}")
        stream.append((first, body(*previous)))
        length = int(rng.integers(1, 30))
        stream += [
            (replace(ROWS, run=run, seq=seq, publisher=f"p{run}"), None)
            for seq in range(2, length + 1)
        ]
        previous = (run, max(1, length))
    faulty = list(stream)
    for _ in range(int(rng.integers(0, 10))):
        at = int(rng.integers(0, len(faulty)))
        match int(rng.integers(0, 3)):
            case 0:
                faulty.insert(int(rng.integers(0, len(faulty))), faulty[at])
            case 1 if len(faulty) > 1:
                del faulty[at]
            case _:
                other = int(rng.integers(0, len(faulty)))
                faulty[at], faulty[other] = faulty[other], faulty[at]
    applied = Applied()
    accepted = []
    for header, continued in faulty:
        decision = decide(applied, header, continued)
        if decision.outcome in (Outcome.APPLY, Outcome.NEW_RUN):
            accepted.append((header.run, header.seq))
            applied = Applied(header.run, header.seq, mark_of(header.publisher))
        elif decision.outcome is Outcome.DUPLICATE:
            assert (header.run, header.seq) in accepted
        elif decision.outcome is Outcome.ZOMBIE:
            assert header.run < applied.run
    clean = [(header.run, header.seq) for header, _ in stream]
    assert accepted == clean[: len(accepted)]
