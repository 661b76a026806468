"""The order rule: a pure function that decides whether a message may be applied."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import xxhash

from petps.delta import CommitBody, ContinueBody, Kind, RecordHeader

__all__ = ["Applied", "Decision", "Outcome", "count_problem", "decide", "mark_of"]


class Outcome(enum.Enum):
    """The possible decisions about a message."""

    APPLY = "apply"
    DUPLICATE = "duplicate"  # applied before: count and skip it
    GAP = "gap"  # not the next message, or a run that continues elsewhere: the partition stops
    ZOMBIE = "zombie"  # from an older run: reject and count it
    CONFLICT = "conflict"  # from this run, but another publisher: the partition stops
    NEW_RUN = "new_run"  # begins a higher run, and may do so


@dataclass(frozen=True, slots=True)
class Applied:
    """Last applied message of a partition. ``publisher``: the run's mark (mark_of); 0: unknown."""

    run: int = 0
    seq: int = 0
    publisher: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """An outcome with its reason in words; the reason is empty if nothing is wrong."""

    outcome: Outcome
    reason: str = ""


def mark_of(publisher: str) -> int:
    """Return the publisher's mark, by which progress tells publishers apart: 24 bits, never 0."""
    return (xxhash.xxh3_64_intdigest(publisher.encode()) & 0xFFFFFF) or 1


def decide(applied: Applied, header: RecordHeader, marker: ContinueBody | None = None) -> Decision:
    """Return the decision for a message. ``marker``: the body, if it is a continue marker."""
    if header.run < applied.run:
        return Decision(
            Outcome.ZOMBIE,
            f"run {header.run} of publisher {header.publisher} is older than run {applied.run}",
        )
    if header.run > applied.run:
        return _begin(applied, header, marker)
    if applied.publisher not in (0, mark_of(header.publisher)):
        return Decision(
            Outcome.CONFLICT,
            f"run {header.run} has two publishers, {header.publisher} and another: stop one of "
            "them and begin a new run with a base",
        )
    if header.seq <= applied.seq:
        return Decision(Outcome.DUPLICATE)
    if header.seq > applied.seq + 1:
        return Decision(
            Outcome.GAP,
            f"run {header.run}: seqs {applied.seq + 1} to {header.seq - 1} are missing",
        )
    return Decision(Outcome.APPLY)


def _begin(applied: Applied, header: RecordHeader, marker: ContinueBody | None) -> Decision:
    if not header.begins_run:
        return Decision(
            Outcome.GAP,
            f"run {header.run} begins here with seq {header.seq} ({header.kind.value}) instead of "
            "a base or continue marker",
        )
    if header.kind is Kind.BASE:
        return Decision(Outcome.NEW_RUN)
    if marker is None:
        raise ValueError("a continue marker needs its body")
    # Not >=: if less was applied, rows are missing here; if more was applied, the tables hold rows
    # that the trainer's restored state lacks.
    if (marker.previous_run, marker.last_seq) == (applied.run, applied.seq):
        return Decision(Outcome.NEW_RUN)
    return Decision(
        Outcome.GAP,
        f"run {header.run} continues run {marker.previous_run} seq {marker.last_seq}, but run "
        f"{applied.run} seq {applied.seq} was applied last here",
    )


def count_problem(counts: dict[str, int] | None, header: RecordHeader, body: CommitBody) -> str:
    """Return how a commit's counts differ from the rows that arrived.

    The result is empty if they agree, or if the rows were not counted.
    """
    if counts is None:
        return ""
    committed = {name: count.here for name, count in body.tables.items() if count.here}
    if committed == counts:
        return ""
    return (
        f"the commit of version {header.version} counts the rows {committed} in this partition, "
        f"but {counts} arrived: the publisher lost some"
    )
