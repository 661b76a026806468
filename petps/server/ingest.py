"""Starts the ingest that the configuration asks for, as a thread of the server process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from petps import _native
from petps.checkpoint.base import BaseFolder
from petps.config import Config
from petps.delta.directory import DirectoryLog
from petps.errors import FailedPrecondition
from petps.ingest import DirectoryDeadLetters, Ingest
from petps.ingest.native_store import NativeStore

__all__ = ["IngestPart", "start_ingest"]


class IngestPart:
    """A running ingest and the log it reads."""

    def __init__(self, ingest: Ingest, log: DirectoryLog) -> None:
        self.ingest = ingest
        self._log = log
        ingest.start()

    def status(self) -> dict[str, Any]:
        """Plain values, for the status."""
        return self.ingest.status().as_json()

    def stop(self) -> None:
        """Ends after the apply that is going on."""
        self.ingest.stop()
        self._log.close()


def start_ingest(
    config: Config,
    tables: _native.Tables,
    log_folder: Path,
    partitions: Sequence[int] | None = None,
) -> IngestPart:
    """Follows the log in ``log_folder``, which is made if it is not there yet.

    partitions: those owned, by default all.

    Errors: NotFound (no such model), FailedPrecondition (it has no table that deltas feed),
    InvalidArgument (the log has another number of partitions).
    """
    model = config.ingest_model()
    store = NativeStore(tables, model)
    if not store.tables():
        raise FailedPrecondition(
            f"[ingest] follows {log_folder}, but model '{model}' has no table with feed 'delta': "
            'create one (--feed delta, or feed = "delta" in [tables.<name>])'
        )
    log = DirectoryLog(log_folder, partitions=store.partitions)
    try:
        ingest = Ingest(
            log,
            store,
            dead_letters=DirectoryDeadLetters(config.dead_letters()),
            partitions=partitions,
            bases=BaseFolder(config.bases() or log_folder.parent),
            rows_per_second=config.ingest.rows_per_second or None,
        )
        return IngestPart(ingest, log)
    except BaseException:
        log.close()
        raise
