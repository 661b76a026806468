"""The versions that a measured rank writes while it trains: to a store and to a log."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from petps.checkpoint import POLICIES
from petps.delta import open_log
from petps.train import Every, Links, RankedOutput, ShardedTables, open_store, publisher_of

__all__ = ["Stopwatch", "writing_versions"]

MODEL = "m"


class Stopwatch:
    """A callable, and the processor time that its calls took, in seconds."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.seconds = 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call it."""
        began = time.thread_time()
        try:
            return self._call(*arguments, **options)
        finally:
            self.seconds += time.thread_time() - began


@contextmanager
def writing_versions(
    tables: ShardedTables, links: Links, model: Any, settings: dict[str, Any]
) -> Iterator[list[RankedOutput]]:
    """Yield the hooks of a pipeline: one that writes versions, or none.

    settings["versions"]: arguments of Every, for the store's versions and the log's; or None.
    """
    every = settings.get("versions")
    if not every:
        yield []
        return
    folder = Path(settings["meeting"]).parent / "versions"
    if tables.rank == 0:
        open_log(str(folder / "log"), partitions=tables.partitions).close()
    store = open_store(folder / "store", MODEL, tables, links)
    links.dense.all_gather(torch.zeros(1))  # wait until the log exists
    with closing(open_log(str(folder / "log"), partitions=tables.partitions)) as log:
        publisher = publisher_of(log, MODEL, tables, links.dense)
        publisher.begin_continue(
            None
        )  # not restore(): it would erase the rows, which no version has
        with RankedOutput(
            tables, links, store=store, policy=POLICIES["2d"](),
            checkpoint=Every(**every), publisher=publisher, publish=Every(**every), model=model,
            staging=folder / "staging", bases=folder / "bases",
        ) as output:  # fmt: skip
            yield [output]
    links.dense.all_gather(torch.zeros(1))  # wait until all have closed it
    if tables.rank == 0:
        shutil.rmtree(folder)
