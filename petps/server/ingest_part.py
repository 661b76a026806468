"""Start of the ingest that the configuration requests, as threads of the server process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from petps import _native
from petps.config import Config
from petps.config.schema import MAX_APPLY_THREADS
from petps.delta import DeltaLog, is_kafka, open_log
from petps.errors import FailedPrecondition, NotFound
from petps.server.ingest import DirectoryDeadLetters, Ingest, LogDeadLetters
from petps.server.ingest.dense import DenseLocations
from petps.server.ingest.native_tables import NativeInstances, NativeInstanceTables
from petps.server.ingest.protocols import BaseSource
from petps.server.ingest.status import PartitionHealth
from petps.server.ingest.trace import TraceSink

if TYPE_CHECKING:
    from petps.checkpoint import Base, BaseFolder

__all__ = ["IngestPart", "open_bases", "start_ingest"]

Letters = DirectoryDeadLetters | LogDeadLetters

# Options of the topic of dead letters, which keep it small and ingest fast.
DEAD_LETTER_OPTIONS: Final = {"message.timeout.ms": 10_000, "topic.retention.bytes": 1 << 30}


class IngestPart:
    """A running ingest, with the log that it reads and the destination of its dead letters."""

    def __init__(
        self, ingest: Ingest, log: DeltaLog, dead_letters: Letters, *, paused: bool = False
    ) -> None:
        self.ingest = ingest
        self._log = log
        self._dead_letters = dead_letters
        if paused:
            ingest.pause()
        ingest.start()

    @property
    def log(self) -> DeltaLog:
        """Return the log, of which any thread may ask for offsets."""
        return self._log

    def status(self) -> dict[str, Any]:
        """Return plain values for the status. Never waits for the log."""
        return self.ingest.status(request_end=False).as_json()

    def health(self) -> list[PartitionHealth]:
        """Return the health of each partition. Never waits for the log."""
        return self.ingest.health()

    def stop(self) -> None:
        """Wait for the running apply, then stop."""
        self.ingest.stop()
        self._dead_letters.close()
        self._log.close()


def start_ingest(
    config: Config,
    tables: _native.Tables,
    location: str,
    partitions: Sequence[int] | None = None,
    *,
    paused: bool = False,
    trace: TraceSink | None = None,
) -> IngestPart:
    """Follow ``partitions`` of the log at ``location``; None follows all. paused: read nothing yet.

    trace: takes the span of each version that its publisher sampled.

    A missing folder is created. A missing topic is not: its first publisher creates it. Until then,
    and while the brokers are unreachable, status shows the error and ingest retries.

    Raises:
        NotFound: The pool does not have the model.
        FailedPrecondition: The model has no table that deltas feed.
        InvalidArgument: The folder has another number of partitions, or a Kafka option is wrong.
    """
    model = config.ingest_model()
    threads = config.ingest.apply_threads or _automatic_apply_threads()
    try:
        instance = NativeInstanceTables(tables, model, threads=threads)
    except NotFound as error:
        raise NotFound(
            f"{error}; name the model that {location} feeds: --model, or [ingest] model"
        ) from None
    if not instance.tables():
        raise FailedPrecondition(
            f"[ingest] follows {location}, but model '{model}' has no table with feed 'delta': "
            'create one (--feed delta, or feed = "delta" in [tables.<name>])'
        )
    log = open_log(
        location,
        partitions=instance.partitions,
        create=not is_kafka(location),
        options=config.kafka,
    )
    try:
        dead_letters = _dead_letters(config, log.name)
        ingest = Ingest(
            log,
            instance,
            dead_letters=dead_letters,
            bases=_bases(config, instance, location),
            partitions=partitions,
            instances=NativeInstances(
                tables, model, switch=config.ingest.switch == "auto", threads=threads
            ),
            dense=DenseLocations(config.folder() / f"{config.pool.path.name}.dense.json"),
            rows_per_second=config.ingest.rows_per_second or None,
            trace=trace,
        )
        return IngestPart(ingest, log, dead_letters, paused=paused)
    except BaseException:
        log.close()
        raise


class _BaseFolder:
    """The bases in a folder. Imports petps.checkpoint at the first gap: few starts need it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, location: str) -> Base:
        """Open the base that a marker names."""
        return self._folder().open(location)

    def of_model(self, model: str) -> Sequence[Base]:
        """Return the model's bases, newest first."""
        return self._folder().of_model(model)

    def _folder(self) -> BaseFolder:
        from petps.checkpoint import BaseFolder

        return BaseFolder(self._root)


def open_bases(config: Config, tables: _native.Tables) -> BaseSource | None:
    """Return another source of ingest's bases, for another thread; None without a log."""
    if config.ingest.log is None:
        return None
    instance = NativeInstanceTables(tables, config.ingest_model())
    return _bases(config, instance, config.ingest.log)


def _bases(config: Config, instance: NativeInstanceTables, location: str) -> BaseSource:
    root = config.bases() or Path(location).parent
    place = config.ingest.store
    if place is None:
        return _BaseFolder(root)
    from petps.checkpoint import BaseFolder
    from petps.checkpoint.served import ServedVersions

    return ServedVersions(
        place,
        BaseFolder(root),
        lambda: {name: table.schema for name, table in instance.tables().items()},
    )


def _automatic_apply_threads() -> int:
    return max(1, min(MAX_APPLY_THREADS, (os.cpu_count() or 1) // 4))


def _dead_letters(config: Config, source: str) -> Letters:
    destination = config.dead_letters()
    if not is_kafka(destination):
        return DirectoryDeadLetters(destination)
    options = {**config.kafka, **DEAD_LETTER_OPTIONS}
    return LogDeadLetters(lambda: open_log(destination, partitions=1, options=options), source)
