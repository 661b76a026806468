"""Room tracker: the rows that a trainer touched since each tenant's last acknowledged reading.

TRACKER.md is the design. petps.train has the adapters that call the tracker from trainers.

Owns:        Tracker, Reading; the stores of ids and of bits (sets.py), the spill folder (spill.py);
             jagged_unique(), the distinct ids of many tables in one pass (unique.py).
Never does:  read rows, write checkpoints, publish; outlive its process.
Called by:   petps.train, trainers.
Invariants:  a tracked id is in every reading of a tenant until that tenant acknowledges one that
             has it, whatever is compacted, merged, spilled or refused by the disk.
Threads:     any, in parallel: track() waits for other threads only when it compacts or spills.
"""

from petps.train.tracker.sets import Touched
from petps.train.tracker.tracker import Reading, Tracker
from petps.train.tracker.unique import JaggedUnique, jagged_unique

__all__ = ["JaggedUnique", "Reading", "Touched", "Tracker", "jagged_unique"]
