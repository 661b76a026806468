"""petps cluster: which server owns which partitions, and how to change that."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from petps.cli.commands.cluster_add import add as add_server
from petps.cli.commands.cluster_etcd import COMMANDS
from petps.cli.options import JsonReport
from petps.cli.output import facts, json_out, note, table
from petps.errors import AlreadyExists, InvalidArgument

if TYPE_CHECKING:
    from petps.cluster import Member, Move, Plan
    from petps.server.shard_map import ShardMap

app = typer.Typer(
    help="Show, plan and change which server owns which partitions of a model.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

for name, command in COMMANDS.items():
    app.command(name)(command)
app.command("add")(add_server)

DESCRIPTION_HELP: Final = "ADDRESS[,zone=NAME][,weight=NUMBER][,grpc=HOST:PORT]"


@app.command("plan")
def plan(
    map_file: Annotated[
        Path, typer.Argument(metavar="MAP", help="The shard map's file, as it is now.")
    ],
    add: Annotated[
        list[str] | None,
        typer.Option(metavar=DESCRIPTION_HELP, help="A server that is new. Repeatable."),
    ] = None,
    drain: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="A server that gives everything away. Repeatable."),
    ] = None,
    lost: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="A server that does not come back. Repeatable."),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            metavar=DESCRIPTION_HELP,
            help="Zone, weight or gRPC port of a server of the map, which has no weights. "
            "Repeatable.",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Servers that own each partition; by default as many as now."),
    ] = None,
    parallel: Annotated[
        int,
        typer.Option(min=1, help="Moves at a time that a server takes part in, each way."),
    ] = 2,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Write the map before: the owners of now, and each new owner follows already.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the new map to this file, which must not exist."),
    ] = None,
    json_: JsonReport = False,
) -> None:
    """Show which partitions have to move when servers come, go or get other weights.

    Partitions are divided by weight, within 5 %, with the fewest copies. Replicas are in different
    zones if the zones are given. Nothing is changed: distribute the written map yourself.

    [bold]Examples[/bold]

        petps cluster plan shards.json --add h5:7070,weight=2 --output shards.new.json

        petps cluster plan shards.json --drain h2:7070

        petps cluster plan shards.json --replicas 2 --server h1:7070,zone=a --add h5:7070,zone=b
    """
    from petps.cluster import Model, make_plan
    from petps.server.shard_map import MapFile

    if output is None and follow:
        raise InvalidArgument("--follow is about the map that --output writes: name a file")
    shard_map = MapFile(map_file).read()
    change = _Change(shard_map, add or [], drain or [], lost or [], server or [])
    model = Model(shard_map.owners.model, shard_map.owners.partitions)
    owners = _owners(shard_map)
    result = make_plan(
        list(change.members.values()),
        [model],
        {model.name: owners},
        replicas=replicas or _replicas_of(owners),
        parallel=parallel,
    )
    leaving = frozenset([*(drain or []), *(lost or [])])
    document = _next_map(shard_map, result, change, leaving, follow=follow)
    moved = sum(
        set(now) != set(then) for now, then in zip(owners, result.owners[model.name], strict=True)
    )
    if output is not None:
        _write(document, output)
    if json_:
        json_out(_report(result, moved, document))
        return
    _print(result, moved)
    if output is not None:
        kind = "the owners of now, and the new ones follow" if follow else "the new owners"
        note(f"{output} is version {document['version']} of the map: {kind}")


def _owners(shard_map: ShardMap) -> list[list[str]]:
    """Return the owners of each partition."""
    owners: list[list[str]] = [[] for _ in range(shard_map.owners.partitions)]
    for address, partitions in shard_map.owners.servers:
        for partition in partitions:
            owners[partition].append(address)
    return owners


def _replicas_of(owners: Sequence[Sequence[str]]) -> int:
    """Return the number of owners of each partition. Raises InvalidArgument if it differs."""
    counts = sorted({len(present) for present in owners})
    if len(counts) > 1:
        raise InvalidArgument(
            f"the partitions of the map have {counts[0]} to {counts[-1]} owners: say with "
            "--replicas how many each should have"
        )
    return counts[0]


class _Change:
    """The servers of the map and the new ones, as the options describe them."""

    def __init__(
        self,
        shard_map: ShardMap,
        add: Sequence[str],
        drain: Sequence[str],
        lost: Sequence[str],
        described: Sequence[str],
    ) -> None:
        from petps.cluster import Member

        self.grpc: dict[str, str] = {}  # what the options say beyond the map
        owners = [address for address, _ in shard_map.owners.servers]
        added = self._describe("--add", add)
        known = self._describe("--server", described)
        for address in added:
            if address in owners:
                raise InvalidArgument(
                    f"--add {address}: the map has this server already; --server describes it"
                )
        leaving = [*(("--drain", text) for text in drain), *(("--lost", text) for text in lost)]
        for option, address in [*leaving, *(("--server", address) for address in known)]:
            if address not in owners:
                raise InvalidArgument(
                    f"{option} {address}: no such server owns partitions in the map; owners are "
                    f"{_names(owners)}"
                )
        addresses = [address for _, address in leaving]
        for address in addresses:
            if addresses.count(address) > 1:
                raise InvalidArgument(f"{address} is given twice to --drain and --lost")
        for address, zone in shard_map.zones.items():
            if address in owners:
                described_here = known.get(address, Member(address))
                known[address] = replace(described_here, zone=described_here.zone or zone)
        self.members = {address: known.get(address, Member(address)) for address in owners} | added
        for address in drain:
            self.members[address] = replace(self.members[address], state="draining")
        for address in lost:
            self.members[address] = replace(
                self.members[address], state="away", away_seconds=float("inf")
            )
        present = [member for member in self.members.values() if member.state == "in"]
        without = [member.name for member in present if not member.zone]
        if 0 < len(without) < len(present):
            raise InvalidArgument(
                f"{_names(without)} have no zone, but other servers have one: give all of them a "
                "zone (--server ADDRESS,zone=NAME), or none"
            )

    def _describe(self, option: str, texts: Sequence[str]) -> dict[str, Member]:
        from petps.cluster import Member
        from petps.server.shard_map import check_address

        members: dict[str, Member] = {}
        for text in texts:
            address, *pairs = text.split(",")
            try:
                check_address(address)
                values = _values(pairs)
                if "grpc" in values:
                    self.grpc[address] = check_address(values["grpc"])
                weight = float(values.get("weight", "1"))
                if not 0 < weight < float("inf"):
                    raise ValueError(f"weight must be a number above 0, got {values['weight']}")
            except ValueError as error:
                reason = str(error)
                if reason.startswith("could not convert"):
                    reason = f"weight must be a number above 0, got {values['weight']}"
                raise InvalidArgument(f"{option} {text}: {reason}") from None
            if address in members:
                raise InvalidArgument(f"{option} {address} is given twice")
            members[address] = Member(address, values.get("zone", ""), weight)
        return members


def _values(pairs: Iterable[str]) -> dict[str, str]:
    """Return NAME=VALUE texts by name. Raises ValueError."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if name not in ("zone", "weight", "grpc") or not equals or not value or name in values:
            raise ValueError(f"'{pair}' is none of zone=NAME, weight=NUMBER, grpc=HOST:PORT")
        values[name] = value
    return values


def _names(addresses: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(addresses) - limit} more" if len(addresses) > limit else ""
    return ", ".join(addresses[:limit]) + more


def _next_map(
    shard_map: ShardMap,
    result: Plan,
    change: _Change,
    leaving: frozenset[str],
    *,
    follow: bool,
) -> dict[str, Any]:
    """Return the content of the new file; follow: of the one before it."""
    from petps.server.shard_map import ranges

    old = {address: set(owned) for address, owned in shard_map.owners.servers}
    new: dict[str, set[int]] = {}
    for partition, present in enumerate(result.owners[shard_map.owners.model]):
        for address in present:
            new.setdefault(address, set()).add(partition)
    follows = {address: set(followed) for address, followed in shard_map.follows.items()}
    grpc = {**shard_map.grpc, **change.grpc}
    zones = dict(shard_map.zones)
    if zones:  # the release before refuses a map with zones, so a map without stays without
        zones |= {name: member.zone for name, member in change.members.items() if member.zone}
    owned = old if follow else new
    entries = []
    for address in dict.fromkeys([*old, *shard_map.follows, *new]):
        has = owned.get(address, set())
        followed = follows.get(address, set())
        if follow:
            followed = followed | new.get(address, set())
        followed = followed - has
        if not follow and address in leaving:
            followed = set()
        if not has and not followed:
            continue
        entry: dict[str, Any] = {"address": address}
        if address in grpc:
            entry["grpc_address"] = grpc[address]
        if address in zones:
            entry["zone"] = zones[address]
        entry["partitions"] = ranges(sorted(has))
        if followed:
            entry["follows"] = ranges(sorted(followed))
        entries.append(entry)
    return shard_map.as_json() | {"version": shard_map.owners.version + 1, "servers": entries}


def _write(document: dict[str, Any], path: Path) -> None:
    """Write the map, if servers would accept it. Raises AlreadyExists, InvalidArgument."""
    from petps.delta.files import publish_file
    from petps.server.shard_map import MAX_MAP_BYTES, parse

    servers = ",\n  ".join(json.dumps(entry) for entry in document["servers"])
    head = json.dumps({key: value for key, value in document.items() if key != "servers"})
    content = f'{head[:-1]}, "servers": [\n  {servers}]}}\n'.encode()
    parse(content, str(path))
    if len(content) > MAX_MAP_BYTES:
        raise InvalidArgument(f"the new map has {len(content):,} bytes, at most {MAX_MAP_BYTES:,}")
    try:
        publish_file(path, content, exclusive=True)
    except FileExistsError:
        raise AlreadyExists(
            f"{path} exists already: choose another name, and rename it over the map when the "
            "servers should use it"
        ) from None


def _report(result: Plan, moved: int, document: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "map": document,
        "moves": [
            {key: value for key, value in asdict(move).items() if key != "needs_acknowledgement"}
            for move in result.moves
        ],
        "copies": result.copies,
        "regrouped": moved,
        "lower_bound": result.lower_bound,
        "imbalance_before": result.imbalance_before,
        "imbalance_after": result.imbalance_after,
        "warnings": result.warnings,
    }


def _print(result: Plan, moved: int) -> None:
    from petps.server.shard_map import ranges

    rows: dict[tuple[str | None, str | None, str], list[Move]] = {}
    for move in result.moves:
        rows.setdefault((move.source, move.target, move.reason), []).append(move)
    if rows:
        table(
            ("partitions", "to", "in place of", "because", "waves"),
            [
                (
                    ", ".join(map(str, ranges([move.partition for move in moves]))),
                    target or "-",
                    source or "-",
                    reason,
                    _span([move.wave + 1 for move in moves]),
                )
                for (source, target, reason), moves in rows.items()
            ],
        )
    else:
        note("nothing has to move")
    facts(
        [
            ("partitions that change their servers", moved),
            ("copies to servers", f"{result.copies} (at least {result.lower_bound})"),
            ("waves", max((move.wave + 1 for move in result.moves), default=0)),
            ("imbalance now", f"{result.imbalance_before:.1%}"),
            ("imbalance afterwards", f"{result.imbalance_after:.1%}"),
        ]
    )
    for text in result.warnings:
        note(f"warning: {text}")
    if result.copies:
        note(
            "a map moves no rows: new owners read them from the log or a base (--follow), and rows "
            "of pushed tables must be pushed again"
        )


def _span(waves: Sequence[int]) -> str:
    return f"{min(waves)}-{max(waves)}" if min(waves) < max(waves) else str(waves[0])
