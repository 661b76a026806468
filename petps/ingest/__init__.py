"""Room ingest: a delta log's records reach the tables, each once and in order.

Owns:        the order rule (order.py), merging (window.py), catch-up (catch_up.py), dead letters,
             which instance a run feeds, the following thread (ingest.py), its status.
Never does:  know which log or which tables these are: it asks through Protocols (store.py, and
             petps/delta/log.py); skip anything in silence.
Called by:   server, cli, demo.
Invariants:  progress is recorded after the rows it stands for are durable; a version is reported
             once every record of it is applied; a stopped partition never applies a later record.
Threads:     two of its own: one reads and decodes, one applies what the other has decoded before;
             Ingest's methods from any.
"""

from petps.ingest.dead_letters import DirectoryDeadLetters, LogDeadLetters
from petps.ingest.ingest import Ingest
from petps.ingest.order import Applied, Decision, Outcome, decide
from petps.ingest.status import Freshness, IngestStatus, Mode, PartitionStatus
from petps.ingest.store import (
    BaseReader,
    BaseSource,
    DeadLetters,
    Instances,
    Progress,
    Standing,
    Store,
    StoreTable,
)

__all__ = [
    "Applied",
    "BaseReader",
    "BaseSource",
    "DeadLetters",
    "Decision",
    "DirectoryDeadLetters",
    "Freshness",
    "Ingest",
    "IngestStatus",
    "Instances",
    "LogDeadLetters",
    "Mode",
    "Outcome",
    "PartitionStatus",
    "Progress",
    "Standing",
    "Store",
    "StoreTable",
    "decide",
]
