"""The versions that a measured rank writes while it trains: to a store and to a log.

A process beside the ranks tends the store (`petps checkpoint tend`), with the lowest priority.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from petps.checkpoint import POLICIES
from petps.delta import open_log
from petps.train import (
    Every,
    Links,
    RankedOutput,
    ShardedTables,
    open_store,
    publisher_of,
)
from petps.train.ranks import Written

__all__ = ["Stopwatch", "writing_versions"]

MODEL: Final = "m"
POLICY: Final = "2d"


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
def _tending(store: Path) -> Iterator[None]:
    """Tend the store on all processors, when they are free."""
    processors = ",".join(map(str, range(os.cpu_count() or 1)))
    process = subprocess.Popen(
        ["taskset", "--cpu-list", processors, "nice", "-n", "19",
         sys.executable, "-m", "petps.cli", "checkpoint", "tend", str(store),
         "--policy", POLICY, "--keep", "all=10s", "--every", "1"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
        if process.poll() is not None:
            raise SystemExit(f"petps checkpoint tend ended with status {process.returncode}")
    finally:
        process.terminate()
        process.wait()


@contextmanager
def writing_versions(
    tables: ShardedTables,
    links: Links,
    model: Any,
    settings: dict[str, Any],
    written: list[Written],
) -> Iterator[list[RankedOutput]]:
    """Yield the hooks of a pipeline: one that writes versions, or none.

    settings["versions"]: arguments of Every, for the store's versions and the log's; or None.
    settings["tended"]: whether a process arranges and purges the store. Versions are added to
    ``written``.
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
    is_tended = settings.get("tended", False)
    tending = _tending(folder / "store") if is_tended and tables.rank == 0 else nullcontext()
    with tending, closing(open_log(str(folder / "log"), partitions=tables.partitions)) as log:
        publisher = publisher_of(log, MODEL, tables, links.dense)
        publisher.begin_continue(
            None
        )  # not restore(): it would erase the rows, which no version has
        with RankedOutput(
            tables, links, store=store, policy=POLICIES[POLICY](),
            checkpoint=Every(**every), publisher=publisher, publish=Every(**every), model=model,
            staging=folder / "staging", bases=folder / "bases", arrange=not is_tended,
            on_version=written.append,
        ) as output:  # fmt: skip
            yield [output]
    links.dense.all_gather(torch.zeros(1))  # wait until all have closed it
    if tables.rank == 0:
        shutil.rmtree(folder)
