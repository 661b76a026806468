"""Room delta: the delta record, and the delta log that carries records.

Owns:        the record's schema, encoding and decoding (FORMAT.md); the log contract (log.py), its
             backends (directory/, kafka/) and the function that opens them (open.py); the atomic
             replacement of files (files.py); Position, a publisher's position in a log.
Never does:  decide whether a record may be applied (ingest does) or when one is due (publish does).
Called by:   publish, ingest, checkpoint, server, cli.
"""

from petps.delta.errors import DeltaError, Fault, LogLocked
from petps.delta.headers import MAX_MESSAGE_BYTES, Message
from petps.delta.log import Damage, Delivery, DeltaLog, Event, Lost, Subscription
from petps.delta.open import is_kafka, open_log
from petps.delta.position import Position
from petps.delta.record import (
    BaseBody,
    CommitBody,
    ContinueBody,
    Kind,
    Record,
    RecordHeader,
    RowsBody,
    TableCount,
    decode_record,
    encode_record,
    read_header,
)
from petps.delta.schema import TableSchema

__all__ = [
    "MAX_MESSAGE_BYTES",
    "BaseBody",
    "CommitBody",
    "ContinueBody",
    "Damage",
    "Delivery",
    "DeltaError",
    "DeltaLog",
    "Event",
    "Fault",
    "Kind",
    "LogLocked",
    "Lost",
    "Message",
    "Position",
    "Record",
    "RecordHeader",
    "RowsBody",
    "Subscription",
    "TableCount",
    "TableSchema",
    "decode_record",
    "encode_record",
    "is_kafka",
    "open_log",
    "read_header",
]
