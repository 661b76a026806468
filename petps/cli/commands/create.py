"""petps create."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from petps.cli.output import json_out, note
from petps.errors import AlreadyExists, InvalidArgument, PetpsError

if TYPE_CHECKING:
    from petps.pool import Pool, TableInfo

_SUFFIXES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


@dataclass(frozen=True)
class _Wanted:
    name: str
    dim: int
    dtype: str
    capacity: int
    default: Any
    feed: Any


def create(
    pool: Annotated[
        Path | None,
        typer.Argument(metavar="[POOL]", help="Path of the new pool; or take it from --config."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="A table as NAME:DIM:DTYPE:CAPACITY; dtype f32, f16, bf16 or int8; capacity in "
            "rows, 10m is ten million. Repeat for more tables.",
            metavar="NAME:DIM:DTYPE:CAPACITY",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Take pool, model and tables from it.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model of the tables; by default 'default'.")
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(
            help="With --add: a new instance MODEL@NAME, with the model's tables, empty; load "
            "into it (petps load --model MODEL@NAME), then switch (petps alias)."
        ),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(help="Partitions of a new model, fixed for ever; by default 8."),
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(help="'power' (default) or 'process': what an acknowledged write survives."),
    ] = None,
    feed: Annotated[
        str, typer.Option(help="Who writes the tables of --table: 'push' or 'delta'.")
    ] = "push",
    add: Annotated[
        bool, typer.Option("--add", help="Add what is missing to a pool that is there already.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Give up what a device (/dev/dax0.0) holds."),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Create a pool with tables, or add tables to one.

    [bold]Examples[/bold]

        petps create my.pool --table items:64:f32:1m --table users:16:int8:500k

        petps create --config deploy/config/petps.toml

        petps create my.pool --add --table ads:32:f16:100k

        petps create my.pool --table items:64:f32:1m --feed delta

        petps create my.pool --add --instance default@1

        petps create /dev/dax0.0 --table items:64:f32:1m
    """
    wanted = [_parse(text, feed) for text in table or []]
    names = [each.name for each in wanted]
    if config is not None:
        from petps.config import load

        settings = load(config)
        pool = pool or settings.pool.path
        durability = durability or settings.pool.durability
        model = model or settings.model.name
        partitions = partitions or settings.model.partitions
        for name, each in settings.tables.items():
            if name in names:
                raise InvalidArgument(
                    f"table '{name}' stands in --table and in {config}; name it once"
                )
            wanted.append(
                _Wanted(name, each.dim, each.dtype, each.capacity, each.default, each.feed)
            )
    if pool is None:
        raise InvalidArgument("name the new pool: `petps create PATH ...`, or --config FILE")
    if replace and (add or not pool.is_char_device()):
        raise InvalidArgument(
            "--replace is for a new pool on a device; remove a pool's file yourself"
        )
    if instance is not None:
        if not add or wanted:
            raise InvalidArgument("--instance goes with --add and takes the model's tables as is")
        report = _add_instance(pool, instance)
        if json_:
            json_out(report)
            return
        note(f"{instance}: {len(report['tables'])} tables, empty")
        return
    if len(set(names)) < len(names):
        raise InvalidArgument("a --table of the same name appears twice; name each once")
    report = _make(
        pool,
        wanted,
        model or "default",
        partitions or 8,
        durability or "power",
        add=add,
        replace=replace,
    )
    if json_:
        json_out(report)
        return
    for each in report["tables"]:
        note(f"table {each['name']}: dim {each['dim']} {each['dtype']}, {each['capacity']:,} rows")
    note(f"{pool}: ready. Next: `petps load {pool} TABLE FILE`, `petps serve {pool}`")


def _add_instance(path: Path, name: str) -> dict[str, Any]:
    from petps import _native
    from petps.pool import Pool

    _native.stop_on_lost_pool()
    with Pool.open(path) as pool:
        pool.create_instance(name)
        return {"pool": str(path), "instance": name, "tables": [t.name for t in pool.tables(name)]}


def _parse(text: str, feed: str) -> _Wanted:
    parts = text.split(":")
    if len(parts) != 4:
        raise InvalidArgument(
            f"--table {text}: write NAME:DIM:DTYPE:CAPACITY, for instance items:64:f32:1m"
        )
    name, dim, dtype, capacity = parts
    if not dim.isdigit():
        raise InvalidArgument(f"--table {text}: dim '{dim}' is no number")
    return _Wanted(name, int(dim), dtype, _count(capacity, text), 0.0, feed)


def _count(text: str, where: str) -> int:
    factor = _SUFFIXES.get(text[-1:].lower(), 1)
    digits = (text[:-1] if factor > 1 else text).replace("_", "")
    try:
        return round(float(digits) * factor)
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"--table {where}: capacity '{text}' is no number of rows; write 500000, 500k or 1.5m"
        ) from None


def _make(
    path: Path,
    wanted: list[_Wanted],
    model: str,
    partitions: int,
    durability: str,
    *,
    add: bool,
    replace: bool,
) -> dict[str, Any]:
    from petps import _native
    from petps.pool import Pool

    _native.stop_on_lost_pool()
    new = not (add and path.exists())
    create = partial(Pool.create, durability=durability, replace=replace)
    try:
        pool = create(path) if new else Pool.open(path)
    except AlreadyExists:
        there, remedy = "is there", "another path makes a new one"
        if path.is_char_device():
            there, remedy = "holds data", "--replace gives up what is there"
        raise AlreadyExists(
            f"{path} {there} already; --add adds tables to a pool, {remedy}"
        ) from None
    try:
        with pool:
            tables = _add_tables(pool, wanted, model, partitions)
    except BaseException:
        if new:  # a pool with only some of the tables is worse than none
            with contextlib.suppress(PetpsError):
                Pool.discard(path)
        raise
    return {
        "pool": str(path),
        "created": new,
        "model": model,
        "tables": [
            {
                "name": info.name,
                "id": info.id,
                "instance": info.instance,
                "dim": info.dim,
                "dtype": info.dtype,
                "capacity": info.capacity,
                "feed": info.feed,
                "added": added,
            }
            for info, added in tables
        ],
    }


def _add_tables(
    pool: Pool, wanted: list[_Wanted], model: str, partitions: int
) -> list[tuple[TableInfo, bool]]:
    """Return every wanted table and whether it is new. An existing table must be the same."""
    if model not in [instance.model for instance in pool.native.instances()]:
        pool.create_model(model, partitions)
    present = {info.name: info for info in pool.tables(model)}
    result = []
    for each in wanted:
        found = present.get(each.name)
        if found is None:
            made = pool.create_table(
                each.name,
                dim=each.dim,
                dtype=each.dtype,
                capacity=each.capacity,
                default=each.default,
                feed=each.feed,
                model=model,
            )
            result.append((made, True))
            continue
        if (found.dim, found.dtype, found.capacity) != (each.dim, each.dtype, each.capacity):
            raise AlreadyExists(
                f"table '{each.name}' is there already, with dim {found.dim} {found.dtype} and "
                f"capacity {found.capacity:,}; choose another name"
            )
        result.append((found, False))
    return result
