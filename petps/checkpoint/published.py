"""Where in a delta log a version's rows stand: two parts that ride along with it. STORE.md.

Owns:        Published: its parts' names and bytes.
Never does:  publish.
Called by:   a trainer's feed, which writes it; served.py, which reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from petps.checkpoint.chunk import Keys
from petps.checkpoint.state import Version
from petps.checkpoint.store import Store
from petps.delta import Position
from petps.delta.schema import partition_of
from petps.errors import DataLoss

__all__ = ["POSITION", "UNPUBLISHED", "Published"]

# Parts of a version, beside the trainer's own; where several workers publish one run, of each, with
# its rank behind (".0").
POSITION: Final = "petps.position"
UNPUBLISHED: Final = "petps.unpublished"


@dataclass(frozen=True, slots=True)
class Published:
    """The rows hold all that the log has up to ``position``.

    owed: by table, uint64[n]: keys whose rows the log did not have yet.
    """

    position: Position
    owed: Mapping[str, Keys]

    def parts(self, rank: int | None = None) -> dict[str, bytes]:
        """As they ride along; ``rank``: of one of several workers, each of its own partitions."""
        suffix = "" if rank is None else f".{rank}"
        position = json.dumps(self.position.as_json()).encode()
        return {f"{POSITION}{suffix}": position, f"{UNPUBLISHED}{suffix}": _write_keys(self.owed)}

    @staticmethod
    def positions(entry: Version) -> list[str]:
        """The names of its parts that say positions: one, or one of each worker; [] for none."""
        return [name for name in entry.parts if name == POSITION or name.startswith(f"{POSITION}.")]

    @staticmethod
    def of(store: Store, version: int) -> Published | None:
        """Of a version; None if nothing was published. Raises NotFound, DataLoss, IoError.

        Of several workers each knows the seqs of its own partitions; a partition of one whose log
        failed has seq 0.
        """
        where = f"{store.name}, version {version}"
        saved: list[Position] = []
        owed: dict[str, list[Keys]] = {}
        for name in Published.positions(store.state.version(version)):
            saved.append(Position.from_json(json.loads(store.part(version, name))))
            keys = _read_keys(store.part(version, UNPUBLISHED + name.removeprefix(POSITION)), where)
            for table, each in keys.items():
                owed.setdefault(table, []).append(each)
        if not saved:
            return None
        if len({(each.run, each.version, each.instance, len(each.seqs)) for each in saved}) != 1:
            raise DataLoss(f"{where}: its workers' positions differ")
        seqs = tuple(max(each) for each in zip(*(each.seqs for each in saved), strict=True))
        together = {table: np.concatenate(each) for table, each in owed.items()}
        return Published(replace(saved[0], seqs=seqs), together)

    def behind(self) -> frozenset[int]:
        """Partitions whose rows are newer than the log was: a key that it was owed is there."""
        partitions = len(self.position.seqs)
        return frozenset(
            int(each)
            for keys in self.owed.values()
            for each in np.unique(partition_of(keys, partitions))
        )


def _write_keys(keys: Mapping[str, Keys]) -> bytes:
    """By table: name, count, then the keys, little-endian, behind one line of JSON."""
    head = json.dumps({name: len(each) for name, each in keys.items()}).encode()
    return b"\n".join([head, b"".join(each.astype("<u8").tobytes() for each in keys.values())])


def _read_keys(body: bytes, where: str) -> dict[str, Keys]:
    head, _, rest = body.partition(b"\n")
    counts = json.loads(head)
    if 8 * sum(counts.values()) != len(rest):
        raise DataLoss(f"{where}: its part {UNPUBLISHED} is cut off")
    keys = np.frombuffer(rest, "<u8").astype(np.uint64)
    ends = np.cumsum(list(counts.values()), dtype=np.intp)
    return dict(zip(counts, np.split(keys, ends[:-1]), strict=True)) if counts else {}
