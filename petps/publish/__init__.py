"""Room publish: writes the changed rows of a trainer to a delta log.

Owns:        Publisher: runs, seqs, versions, the order of rows and commit, the split into
             messages; HPS's topics as a source (hps.py).
Never does:  know which log carries the records; train; apply.
Called by:   trainers, cli (petps publish, petps import-hps), demo.
Invariants:  Every partition of a run begins with a base or a continue marker at seq 1. seq counts
             every message of a partition. A commit is written to every partition, after the rows
             of its version are durable. An error ends the run and reaches the caller.
"""

from petps.publish.end import end_of
from petps.publish.publisher import Position, Publisher

__all__ = ["Position", "Publisher", "end_of"]
