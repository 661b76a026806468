"""Room tracker: which rows a trainer touched, for everyone who asks, each since they asked last.

TRACKER.md is the design; the adapters that call it from trainers are in petps.train.

Owns:        Tracker, Reading; the stores of ids and of bits (sets.py), the spill folder (spill.py);
             jagged_unique(), the distinct ids of many tables in one pass (unique.py).
Never does:  read rows, write checkpoints, publish; outlive its process.
Called by:   petps.train, trainers.
Invariants:  an id that was tracked is in every tenant's readings until that tenant acknowledges
             one that has it, whatever is compacted, merged, spilled or refused by the disk.
Threads:     any, at once: track() waits for nobody but while it must compact or spill itself.
"""

from petps.tracker.sets import Touched
from petps.tracker.tracker import Reading, Tracker
from petps.tracker.unique import JaggedUnique, jagged_unique

__all__ = ["JaggedUnique", "Reading", "Touched", "Tracker", "jagged_unique"]
