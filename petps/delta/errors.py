"""Errors of a delta record and of a delta log."""

from __future__ import annotations

import enum

from petps.errors import DataLoss, FailedPrecondition

__all__ = ["DeltaError", "Fault", "LogLocked"]


class Fault(enum.Enum):
    """Reason why a message was refused. Dead letters and counters contain it: never rename it."""

    HEADER_MISSING = "header-missing"
    HEADER_INVALID = "header-invalid"
    FOREIGN = "foreign"
    NEWER_FORMAT = "newer-format"
    CHECKSUM = "checksum"
    TOO_LARGE = "too-large"
    BODY_INVALID = "body-invalid"
    COLUMN_MISSING = "column-missing"
    COLUMN_TYPE = "column-type"
    KEY_NULL = "key-null"
    WRONG_MODEL = "wrong-model"
    WRONG_TABLE = "wrong-table"
    WRONG_DIM = "wrong-dim"
    WRONG_DTYPE = "wrong-dtype"
    WRONG_PARTITION = "wrong-partition"
    LOG_DAMAGED = "log-damaged"
    # For messages of HugeCTR HPS (petps/publish/hps.py).
    TOO_SHORT = "too-short"
    TORN = "torn"
    NOT_FINITE = "not-finite"


class DeltaError(DataLoss):
    """Refusal of a message. ``fault`` is the reason, and the text gives details."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(f"{fault.value}: {text}")
        self.fault = fault


class LogLocked(FailedPrecondition):
    """Error when another process writes this partition of the log."""
