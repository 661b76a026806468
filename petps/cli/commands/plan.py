"""petps plan: what a table will take, before it is created."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from petps.cli.options import JsonReport, parse_rows
from petps.cli.output import bytes_text, facts, json_out, note
from petps.errors import InvalidArgument

KEY_BYTES: Final = 8
DAY_SECONDS: Final = 86_400
BACKUP_COLUMN_BYTES: Final = 12  # stamp and hash of a row (petps/pool/BACKUP.md)
KNOWN_BYTES: Final = 16  # key and hash of a row


@dataclass(frozen=True)
class Plan:
    """The most bytes that a full table takes.

    index, rows: in the pool, which has its records beside them. while_growing: in the pool while
    its capacity doubles. memory: of the server. base, backup: of a base and of a full backup in
    their stores. beside_pool: of the file by which the next backup knows what has changed.
    log_per_day: of the updates.
    """

    index: int
    rows: int
    pool: int
    while_growing: int
    memory: int
    base: int
    backup: int
    beside_pool: int
    log_per_day: int | None


def plan(
    rows: Annotated[str, typer.Option(help="Rows, such as 500k, 10m or 1g.")],
    dim: Annotated[int, typer.Option(min=1, max=4096, help="Values in a row.")],
    dtype: Annotated[str, typer.Option(help="f32, f16, bf16 or int8.")] = "f32",
    updates: Annotated[
        str | None, typer.Option(help="Rows that change a second, such as 50k/s.")
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="The folder of the pool: the space that its disk has is compared.")
    ] = Path(),
    json_: JsonReport = False,
) -> None:
    """Show what a table will take on disk and in memory, before it is created.

    The sizes are of a full table whose rows change. A pool grows only as rows come.

    [bold]Examples[/bold]

        petps plan --rows 1g --dim 64 --dtype f16 --updates 50k/s

        petps plan --rows 10m --dim 128 --folder pmem
    """
    rate = None if updates is None else parse_rows(updates.removesuffix("/s"), "--updates")
    result = make_plan(parse_rows(rows, "--rows"), dim, dtype, rate)
    warnings = warn(result.pool, folder)
    if json_:
        json_out(asdict(result) | {"warnings": warnings})
        return
    log = "without --updates not known" if rate is None else bytes_text(result.log_per_day or 0)
    facts(
        [
            ("index in the pool", bytes_text(result.index)),
            ("rows in the pool", f"{bytes_text(result.rows)}, with spare slots, in whole extents"),
            ("the pool", bytes_text(result.pool)),
            ("while its capacity doubles", bytes_text(result.while_growing)),
            ("memory of the server", f"{bytes_text(result.memory)}, and the page cache"),
            ("a base", bytes_text(result.base)),
            (
                "a full backup",
                f"{bytes_text(result.backup)}; beside the pool {bytes_text(result.beside_pool)}",
            ),
            ("log, a day", log),
        ]
    )
    for text in warnings:
        note(f"warning: {text}")


def make_plan(rows: int, dim: int, dtype: str, updates: int | None) -> Plan:
    """Return the plan of one table. Raises InvalidArgument for an unknown dtype."""
    from petps import _native
    from petps.pool.footprint import SERVER_BYTES

    if dtype not in ("f32", "f16", "bf16", "int8"):
        raise InvalidArgument(f"--dtype {dtype}: write f32, f16, bf16 or int8")
    row_bytes = _native.row_bytes(dtype, dim)
    most = _native.footprint_of(row_bytes, rows)
    pool = most["records"] + most["index"] + most["rows"]
    message = KEY_BYTES + row_bytes
    return Plan(
        index=most["index"],
        rows=most["rows"],
        pool=pool,
        while_growing=pool + _native.footprint_of(row_bytes, min(2 * rows, 1 << 40))["index"],
        memory=most["memory"] + SERVER_BYTES,
        base=rows * message,
        backup=rows * (message + BACKUP_COLUMN_BYTES),
        beside_pool=rows * KNOWN_BYTES,
        log_per_day=None if updates is None else updates * message * DAY_SECONDS,
    )


def warn(pool_bytes: int, folder: Path) -> list[str]:
    """Return what the disk of ``folder`` or this machine's memory cannot hold."""
    warnings = []
    if not folder.is_dir():
        raise InvalidArgument(f"--folder {folder}: there is no such folder")
    free = shutil.disk_usage(folder).free
    if pool_bytes > free:
        warnings.append(
            f"a full pool takes {bytes_text(pool_bytes)}, and the disk has {bytes_text(free)} free"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if pool_bytes > memory:
        warnings.append(
            f"a full pool takes {bytes_text(pool_bytes)}, and this machine has "
            f"{bytes_text(memory)} of memory: pulls of rows that are not in the page cache wait "
            "for the disk"
        )
    return warnings
