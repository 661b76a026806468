"""petps create."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from petps.admin.socket import is_admin_port
from petps.cli.options import JsonReport, parse_rows
from petps.cli.output import json_out, note
from petps.cli.target import check_administered, open_pool
from petps.config.duration import NEVER, parse_duration
from petps.errors import AlreadyExists, InvalidArgument, NotFound, PetpsError

if TYPE_CHECKING:
    from petps.admin.client import AdminClient
    from petps.pool import Pool


@dataclass(frozen=True)
class _TableSpec:
    name: str
    dim: int
    dtype: str
    capacity: int
    default: Any
    feed: Any
    expire_after: int


MAX_PARTITIONS: Final = 1024  # native/pool/pool.h kMaxPartitions
# What the configuration says of a table when it is created; the rest counts while it is served.
_CREATED: Final = {"dim", "dtype", "capacity", "default", "feed"}


def create(
    pool: Annotated[
        str | None,
        typer.Argument(
            metavar="[POOL]",
            help="Path of the new pool; by default that of --config. With --add also the admin "
            "port of its server, petps+admin://HOST:PORT.",
        ),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="A table. DTYPE is f32, f16, bf16 or int8. CAPACITY is in rows; 10m is ten "
            "million. Repeatable.",
            metavar="NAME:DIM:DTYPE:CAPACITY",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Take pool, model and tables from this file.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model of the tables; by default 'default'.")
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(
            help="With --add: create the instance MODEL@NAME, with empty copies of the model's "
            "tables. Load it (petps load --model MODEL@NAME), then switch to it (petps alias)."
        ),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(help="Partitions of a new model, which can never change; by default 8."),
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(help="'power' (default) or 'process': what an acknowledged write survives."),
    ] = None,
    feed: Annotated[
        str, typer.Option(help="What writes the tables of --table: 'push' or 'delta'.")
    ] = "push",
    expire_after: Annotated[
        str,
        typer.Option(
            metavar="AGE",
            help="Delete rows of the tables of --table that were not written for so long, such as "
            "90s, 6h or 30d; 'never'.",
        ),
    ] = NEVER,
    add: Annotated[
        bool, typer.Option("--add", help="Add the missing tables to an existing pool.")
    ] = False,
    if_missing: Annotated[
        bool,
        typer.Option(
            "--if-missing",
            help="Do nothing if the pool exists. A pool that is new appears with all its tables.",
        ),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Overwrite the data of a device (/dev/dax0.0)."),
    ] = False,
    json_: JsonReport = False,
) -> None:
    """Create a pool with tables, or add tables to one, also while a server has it open.

    [bold]Examples[/bold]

        petps create my.pool --table items:64:f32:1m --table users:16:int8:500k

        petps create --config deploy/config/petps.toml

        petps create --config deploy/config/petps.toml --if-missing

        petps create my.pool --add --table ads:32:f16:100k

        petps create my.pool --table items:64:f32:1m --feed delta --expire-after 30d

        petps create my.pool --add --instance default@1

        petps create /dev/dax0.0 --table items:64:f32:1m
    """
    age = parse_duration(expire_after, "--expire-after")
    if age and not table:
        raise InvalidArgument(
            "--expire-after is for the tables of --table: a configuration has expire_after, and "
            "`petps table expire` changes a table that exists"
        )
    specs = [_parse(text, feed, age) for text in table or []]
    names = [spec.name for spec in specs]
    if config is not None or pool is None:
        if config is None and "PETPS_POOL_PATH" not in os.environ:
            raise InvalidArgument(
                "name the new pool: `petps create PATH ...`, --config FILE, or PETPS_POOL_PATH"
            )
        from petps.config import read_settings

        settings = read_settings(config, os.environ, {"pool": {"path": pool}}).config
        pool = pool or str(settings.pool.path)
        durability = durability or settings.pool.durability
        model = model or settings.model.name
        partitions = partitions or settings.model.partitions
        for name, section in settings.tables.items():
            if name in names:
                raise InvalidArgument(
                    f"table '{name}' is both in --table and in "
                    f"{config or 'the environment'}; name it once"
                )
            created = section.model_dump(include=_CREATED)
            specs.append(_TableSpec(name, **created, expire_after=section.expire_after_seconds()))
    if partitions is not None and not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidArgument(f"--partitions must be 1 to {MAX_PARTITIONS}, got {partitions}")
    check_administered(pool)
    if is_admin_port(pool) and not add:
        raise InvalidArgument(f"{pool} is a server: add tables to its pool with --add")
    if if_missing and (add or replace):
        raise InvalidArgument(
            "--if-missing leaves an existing pool as it is: give it without --add and --replace"
        )
    if replace and (add or not Path(pool).is_char_device()):
        raise InvalidArgument(
            "--replace is only for a new pool on a device; delete a pool's file yourself"
        )
    if instance is not None:
        if not add or specs:
            raise InvalidArgument(
                "--instance needs --add, and no --table or --config with tables: the instance gets "
                "the model's tables"
            )
        report = _add_instance(pool, instance)
        if json_:
            json_out(report)
            return
        note(f"{instance}: {len(report['tables'])} tables, empty")
        return
    if len(set(names)) < len(names):
        raise InvalidArgument("two --table options have the same name; name each table once")
    create_tables = partial(
        _create_tables,
        specs=specs,
        model=model or "default",
        partitions=partitions or 8,
        durability=durability or "power",
        add=add,
        replace=replace,
    )
    report = _create_if_missing(pool, create_tables) if if_missing else create_tables(pool)
    if if_missing and not report["created"]:
        if json_:
            json_out(report)
            return
        note(f"{pool} exists already, and stays as it is")
        return
    report["warnings"] = _warnings(report["tables"], pool)
    if json_:
        json_out(report)
        return
    for text in report["warnings"]:
        note(f"warning: {text}")
    for info in report["tables"]:
        note(f"table {info['name']}: dim {info['dim']} {info['dtype']}, {info['capacity']:,} rows")
    note(f"{pool}: ready. Next: `petps load {pool} TABLE FILE`, `petps serve {pool}`")


def _warnings(tables: list[dict[str, Any]], pool: str) -> list[str]:
    """Return what the disk or the memory cannot hold of what the new tables promise."""
    from petps.cli.commands.plan import make_plan, warn

    new = [info for info in tables if info["added"]]
    if is_admin_port(pool) or Path(pool).is_char_device() or not new:
        return []
    promised = sum(
        make_plan(info["capacity"], info["dim"], info["dtype"], None).pool for info in new
    )
    return warn(promised, Path(pool).absolute().parent)


def _add_instance(target: str, name: str) -> dict[str, Any]:
    with open_pool(target) as pool:
        pool.create_instance(name)
        return {
            "pool": target,
            "instance": name,
            "tables": list(_tables_of(pool, name)),
        }


def _parse(text: str, feed: str, expire_after: int) -> _TableSpec:
    parts = text.split(":")
    if len(parts) != 4:
        raise InvalidArgument(
            f"--table {text}: write NAME:DIM:DTYPE:CAPACITY, for instance items:64:f32:1m"
        )
    name, dim, dtype, capacity = parts
    if not dim.isdigit():
        raise InvalidArgument(f"--table {text}: dim must be a number, got '{dim}'")
    return _TableSpec(
        name,
        int(dim),
        dtype,
        parse_rows(capacity, f"--table {text}: capacity"),
        0.0,
        feed,
        expire_after,
    )


def _create_if_missing(
    target: str, create_tables: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """Return the report of a new pool; for one that exists, only that it is not created.

    A pool in a file gets its name when it is complete, so a call that is killed leaves nothing that
    the next one takes for a pool.
    """
    path = Path(target)
    existing = {"pool": target, "created": False}
    if path.is_char_device():
        try:
            return create_tables(target)
        except AlreadyExists:
            return existing
    if not path.parent.is_dir():
        raise NotFound(f"{path}: there is no folder {path.parent}; make it first")
    temporary = path.with_name(f".{path.name}.new")
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed: one such call at a time
        if path.exists():
            return existing
        temporary.unlink(missing_ok=True)  # of a call that was killed
        report = create_tables(str(temporary))
        temporary.rename(path)
        os.fsync(folder)
    finally:
        os.close(folder)
    return {**report, "pool": target}


def _create_tables(
    target: str,
    specs: list[_TableSpec],
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
    path = Path(target)
    is_new = not (add and (is_admin_port(target) or path.exists()))
    create = partial(Pool.create, durability=durability, replace=replace)
    try:
        pool = create(path) if is_new else open_pool(target)
    except AlreadyExists:
        condition, remedy = "exists", "choose another path"
        if path.is_char_device():
            condition, remedy = "holds data", "overwrite it with --replace"
        raise AlreadyExists(
            f"{path} {condition} already; add tables to it with --add, or {remedy}"
        ) from None
    try:
        with pool:
            tables = _add_tables(pool, specs, model, partitions)
    except BaseException:
        if is_new:  # leave no pool that has only some of the tables
            with contextlib.suppress(PetpsError):
                Pool.discard(path)
        raise
    return {
        "pool": target,
        "created": is_new,
        "model": model,
        "tables": [{**info, "added": is_added} for info, is_added in tables],
    }


def _tables_of(pool: Pool | AdminClient, model: str) -> dict[str, dict[str, Any]]:
    """Return the tables of the instance that ``model`` names, by name, as fields of TableInfo."""
    from petps.pool import Pool, TableInfo

    if isinstance(pool, Pool):
        return {info.name: asdict(info) for info in pool.tables(model)}
    status = pool.status()
    alias = status["aliases"].get(model)
    instances = status["instances"]
    named = [record["name"] for record in instances if alias in (None, record["id"])]
    exact = [name for name in named if name == model]
    of_model = [record["name"] for record in instances if record["model"] == model]
    (instance,) = (named if alias is not None else exact or of_model)[-1:]
    fields = [field.name for field in dataclasses.fields(TableInfo)]
    return {
        record["name"]: {name: record[name] for name in fields}
        for record in status["tables"]
        if record["instance"] == instance
    }


def _add_tables(
    pool: Pool | AdminClient, specs: list[_TableSpec], model: str, partitions: int
) -> list[tuple[dict[str, Any], bool]]:
    """Return every table of ``specs`` and whether it is new. An existing table must be equal."""
    if model not in pool.models():
        pool.create_model(model, partitions)
    existing_tables = _tables_of(pool, model)
    result: list[tuple[dict[str, Any], bool]] = []
    for spec in specs:
        existing_table = existing_tables.get(spec.name)
        if existing_table is None:
            table = pool.create_table(**asdict(spec), model=model)
            result.append((table if isinstance(table, dict) else asdict(table), True))
            continue
        if any(
            existing_table[name] != getattr(spec, name) for name in ("dim", "dtype", "capacity")
        ):
            raise AlreadyExists(
                f"table '{spec.name}' exists already, with dim {existing_table['dim']} "
                f"{existing_table['dtype']} and capacity {existing_table['capacity']:,}; "
                "choose another name"
            )
        result.append((existing_table, False))
    return result
