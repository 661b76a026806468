"""Room ingest: applies the records of a delta log to tables, each once and in order.

Owns:        the order rule (order.py), merging (window.py), catch-ups (catch_ups.py), dead letters,
             the choice of the instance that a run feeds, the threads that follow the log
             (ingest.py), their status.
Never does:  depend on a kind of log or of table, since it uses Protocols (protocols.py,
             petps/delta/log.py); skip a record without reporting it.
Called by:   server.
Invariants:  Progress is recorded only after the rows it covers are durable. A version is reported
             only after all its records are applied. A stopped partition applies no record until
             the reason for its stop has ended.
Threads:     Ingest has three threads: one reads and decodes, one applies the decoded records, and
             one requests the log's end. Any thread may call Ingest's methods.
"""

from petps.server.ingest.dead_letters import DirectoryDeadLetters, LogDeadLetters
from petps.server.ingest.ingest import Ingest
from petps.server.ingest.order import Applied, Decision, Outcome, decide
from petps.server.ingest.protocols import (
    BaseReader,
    BaseSource,
    DeadLetters,
    Instances,
    InstanceTable,
    InstanceTables,
    Progress,
    Standing,
)
from petps.server.ingest.status import Freshness, IngestStatus, Mode, PartitionStatus

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
    "InstanceTable",
    "InstanceTables",
    "Instances",
    "LogDeadLetters",
    "Mode",
    "Outcome",
    "PartitionStatus",
    "Progress",
    "Standing",
    "decide",
]
