"""petps shrink: give the disk blocks of a pool's free space back, also while it is served."""

from __future__ import annotations

from contextlib import closing

from petps.cli.options import AdministeredPool, JsonReport
from petps.cli.output import advancing, bytes_text, json_out, note, progress
from petps.cli.target import check_administered, open_pool


def shrink(
    pool: AdministeredPool,
    json_: JsonReport = False,
) -> None:
    """Give the disk blocks of a pool's free space back to the file system.

    A pool keeps the space of dropped tables, and of indexes that tables have outgrown, for later
    use. This gives it back: the file keeps its length, with holes, and takes less of the disk. The
    space of deleted rows stays with their table. Pulls and writes go on. If the disk is full when
    the pool needs the space again, that write fails with an error, and nothing is lost.

    [bold]Examples[/bold]

        petps drop my.pool ranking@7 && petps shrink my.pool
    """
    check_administered(pool)
    with (
        closing(open_pool(pool)) as target,
        progress("giving space back", None, quiet=json_) as advance,
    ):
        shrunk = target.shrink(advancing(advance))
        allocated = target.status()["pool"]["allocated_bytes"]
    if json_:
        json_out({"shrunk_bytes": shrunk, "allocated_bytes": allocated})
        return
    note(f"{bytes_text(shrunk)} of free space take no disk; the pool takes {bytes_text(allocated)}")
