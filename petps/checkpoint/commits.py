"""The times of the log's versions, as a version of a trainer's store carries them. STORE.md.

Owns:        Commits (a list that never changes, and its part), newer_stamps().
Never does:  advance an event time (native/pool/clock.h does); know rows.
Called by:   petps.train.stamps, which writes the list; base.py, which reads it.
Invariants:  an entry is the true time of a commit. An entry that is left out makes rows of its
             version, and of those since the entry before, expire later, never earlier.
Threads:     values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from petps._native import EXPIRY_CELLS, EXPIRY_STEPS, VERSIONS_AHEAD
from petps.checkpoint.chunk import Mask, Stamps
from petps.checkpoint.store import Store
from petps.errors import DataLoss

__all__ = ["COMMITS_PART", "Commits", "newer_stamps"]

COMMITS_PART: Final = "petps.commits"
# Rows that are this many times expire_after old have gone, whatever their cells: 50 of 48 cells
# are enough for a row, and two more for rounding.
GONE: Final = 52 / EXPIRY_CELLS
# With commits each second for a hundred years, and no clock that goes back, about 2,000 entries
# remain. If there are more than this, the oldest go.
ENTRIES_MAX: Final = 4096
# Thinning takes some milliseconds, so that many commits share one.
COMMITS_PER_THINNING: Final = 64

Numbers = npt.NDArray[np.uint64]


def _none() -> Numbers:
    return np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Commits:
    """Commits of a log, oldest first: all of the last ones, and fewer of those before.

    versions: uint64[n], ascending. times_ns: uint64[n], the time that each commit shows. steps:
    uint64[n], ascending, some may be equal: the step of training after which its rows were taken.
    floor: Rows have at least this version, because servers took a base that has no stamps.
    thinned: The number of entries after the last thinning.
    """

    versions: Numbers = field(default_factory=_none)
    times_ns: Numbers = field(default_factory=_none)
    steps: Numbers = field(default_factory=_none)
    floor: int = 0
    thinned: int = 0

    def __len__(self) -> int:
        return len(self.versions)

    @property
    def last_version(self) -> int:
        """Return the last version; 0 if there is none."""
        return int(self.versions[-1]) if len(self) else 0

    @property
    def last_step(self) -> int:
        """Return the step of the last version; 0 if there is none."""
        return int(self.steps[-1]) if len(self) else 0

    def add(self, version: int, time_ns: int, step: int) -> Commits:
        """Return the list with one more commit. Its step counts as no earlier than the last one.

        If the log's versions began again below the last one, the list ends below this one first.
        """
        older = slice(int(np.searchsorted(self.versions, np.uint64(version))))
        more = replace(
            self,
            versions=np.append(self.versions[older], np.uint64(version)),
            times_ns=np.append(self.times_ns[older], np.uint64(time_ns)),
            steps=np.append(self.steps[older], np.uint64(max(step, self.last_step))),
        )
        if len(more) - more.thinned < COMMITS_PER_THINNING:
            return more
        kept = _choose([int(time) for time in more.times_ns])[-ENTRIES_MAX:]
        return replace(
            more,
            versions=more.versions[kept],
            times_ns=more.times_ns[kept],
            steps=more.steps[kept],
            thinned=len(kept),
        )

    def with_floor(self, floor: int) -> Commits:
        """Return the list with a floor that is not lower."""
        return replace(self, floor=floor) if floor > self.floor else self

    def without_steps(self) -> Commits:
        """Return the list with steps 0, for a training that counts its steps anew."""
        return replace(self, steps=np.zeros(len(self), np.uint64))

    def version_after(self, steps: Numbers, next_version: int) -> Numbers:
        """Return uint64[n]: the first version whose rows were taken after each of these steps.

        ``next_version`` follows the last one.
        """
        return np.append(self.versions, np.uint64(next_version))[np.searchsorted(self.steps, steps)]

    def step_of(self, stamps: Stamps) -> Numbers:
        """Return uint64[n]: for each stamp a step for which version_after() returns its version.

        If the version is not in the list, the next one that is. Above the last one: the step after
        the last one's.
        """
        last = self.last_version
        age, is_ahead = _ages(stamps, last)
        versions = np.uint64(last) - np.minimum(age.astype(np.uint64), np.uint64(last))
        places = np.searchsorted(self.versions, versions)
        places[is_ahead] = len(self)
        return np.append(self.steps, np.uint64(self.last_step + 1))[places]

    def parts(self) -> dict[str, bytes]:
        """Return the part by name: a line of JSON, and the three arrays, little-endian."""
        head = json.dumps({"commits": len(self), "floor": self.floor}).encode()
        arrays = (self.versions, self.times_ns, self.steps)
        body = b"".join(numbers.astype("<u8").tobytes() for numbers in arrays)
        return {COMMITS_PART: head + b"\n" + body}

    @classmethod
    def of(cls, store: Store, version: int) -> Commits:
        """Read the part of a version; an empty list if it has none. Raise DataLoss, IoError."""
        if COMMITS_PART not in store.state.version(version).parts:
            return cls()
        where = f"{store.name}, version {version}: its part {COMMITS_PART}"
        return cls.parse(store.part(version, COMMITS_PART), where)

    @classmethod
    def parse(cls, body: bytes, where: str) -> Commits:
        """Read what parts() wrote. Raise DataLoss that names ``where``."""
        head, _, rest = body.partition(b"\n")
        try:
            values: Mapping[str, int] = json.loads(head)
            count, floor = values["commits"], values["floor"]
            is_whole = type(count) is int and len(rest) == 24 * count
            is_whole = is_whole and type(floor) is int and 0 <= floor < 1 << 64
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataLoss(f"{where} cannot be read: {error}") from error
        if not is_whole:
            raise DataLoss(f"{where} is cut off")
        versions, times_ns, steps = np.frombuffer(rest, "<u8").astype(np.uint64).reshape(3, count)
        if (versions[1:] <= versions[:-1]).any() or (steps[1:] < steps[:-1]).any():
            raise DataLoss(f"{where} is not in the order of versions and steps")
        return cls(versions, times_ns, steps, floor, count)


def _choose(times: list[int]) -> list[int]:
    """Return which commits remain, by their place, ascending: EXPIRY.md, "A list of commits".

    A commit between two others may go if, for every expire_after, these two are at most a cell
    apart, or rows of the later one have expired. Event time between the two is then the same
    without it, unless those rows have expired.
    """
    if len(times) < 3:
        return list(range(len(times)))
    kept = [len(times) - 1]
    forward = np.empty(len(times), np.float64)  # the steps between commits that remain
    count = backward = 0
    for place in range(len(times) - 2, 0, -1):
        before, own, after = times[place - 1], times[place], times[kept[-1]]
        if before <= own <= after and _is_gone(forward[:count], backward, after - before):
            continue
        if own <= after:
            forward[count] = after - own
            count += 1
        else:
            backward += 1
        kept.append(place)
    return [0, *reversed(kept)]


def _is_gone(forward: npt.NDArray[np.float64], backward: int, cell: int) -> bool:
    """Return whether a row expires within these steps, for each expire_after below 48 cells.

    The age of a row, as a part of expire_after, is least for the longest expire_after: a step
    counts at most a quarter of it. A step back takes at most a quarter from those after it, and so
    does a debt from before.
    """
    longest = float(EXPIRY_CELLS) * cell
    quarter = longest / EXPIRY_STEPS
    return bool(np.minimum(forward, quarter).sum() - (backward + 1) * quarter >= GONE * longest)


def _ages(stamps: Stamps, version: int) -> tuple[Stamps, Mask]:
    """Return uint32[n], how many versions the stamps are older than ``version``, and bool[n].

    The latter tells which stamps are ahead of it; their ages mean nothing.
    """
    age: Stamps = np.uint32(version & 0xFFFFFFFF) - stamps  # modulo 2^32
    return age, age >= np.uint32((1 << 32) - VERSIONS_AHEAD)


def newer_stamps(stamps: Stamps, floor: int, version: int) -> Stamps:
    """Return stamps, uint32[n], of which none is older than ``floor``.

    version: the newest one that is committed. A stamp above it stays.
    """
    if floor == 0:
        return stamps
    age, is_ahead = _ages(stamps, version)
    is_older = ~is_ahead & (age > max(0, version - floor))
    newer: Stamps = np.where(is_older, np.uint32(floor & 0xFFFFFFFF), stamps)
    return newer
