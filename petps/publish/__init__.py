"""Room publish: the rows of a trainer become records of a delta log.

Owns:        Publisher: runs, seqs, versions, the order rows -> commit, splitting into chunks;
             HPS's topics as a source (hps.py).
Never does:  know which log carries the records; train; apply.
Called by:   trainers, cli (petps publish, petps import-hps), demo.
Invariants:  every partition of a run begins with a base or a continue marker at seq 1; seq counts
             every message of a partition; a commit is written to every partition, after the rows
             of its version are durable; an error ends the run and reaches the caller.
"""

from petps.publish.end import end_of
from petps.publish.publisher import Position, Publisher

__all__ = ["Position", "Publisher", "end_of"]
