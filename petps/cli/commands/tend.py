"""petps checkpoint tend: a store kept in order beside the training."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from petps.cli.output import note
from petps.errors import DataLoss, InvalidArgument, PetpsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from petps.checkpoint.merge import Executor
    from petps.checkpoint.policy import Policy
    from petps.checkpoint.tend import Round

__all__ = ["HERE", "RAY", "executor_of", "ray_address", "tend"]

# Values of --on: the place where deltas are merged.
HERE = "here"
RAY = "ray"


def tend(
    store: Annotated[
        str, typer.Argument(metavar="STORE", help="A folder, or any URL that fsspec knows.")
    ],
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="RULE=TIME,...",
            help="How long versions are kept: all, and the newest of each hour, day and week "
            "(hourly, daily, weekly). Times are a number and s, m, h, d or w. Without it nothing "
            "is deleted.",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="How chunks are arranged: the policy of the trainer.")
    ] = "2d",
    bases: Annotated[
        bool,
        typer.Option(
            "--bases/--no-bases",
            help="Whether the newest version becomes a base when the policy asks for one "
            "(--policy 2d or merged).",
        ),
    ] = True,
    deltas_per_base: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Deltas between two bases (--policy merged). 0: computed from how much two deltas "
            "have in common.",
        ),
    ] = 0,
    every: Annotated[float, typer.Option(help="Seconds between two rounds.")] = 60.0,
    verify_mib: Annotated[
        int, typer.Option(help="How much of the store a round reads to find damage, in MiB.")
    ] = 1024,
    on: Annotated[
        str,
        typer.Option(
            metavar="here|ray[://HOST:PORT]", help="Where deltas are merged (--policy merged)."
        ),
    ] = HERE,
    once: Annotated[
        bool, typer.Option("--once", help="Make one round, and fail if a version is damaged.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Report each round as JSON.")] = False,
) -> None:
    """Keep a store in order: split, merge, write bases, delete old versions, find damage.

    It runs until Ctrl-C or SIGTERM, as a process of its own. A trainer may write the store at the
    same time: what the trainer's commit disturbs is done again. Give the trainer
    `RankedOutput(arrange=False)`, so that it leaves splitting, merging and bases to this process.
    The newest version that can be restored is never deleted.

    [bold]Examples[/bold]

        petps checkpoint tend s3://models/ctr --keep all=1h,hourly=1d,daily=30d

        petps checkpoint tend checkpoints --policy merged --on ray://head:10001

        petps checkpoint tend checkpoints --keep all=2h --once
    """
    from petps.checkpoint import POLICIES, Store
    from petps.checkpoint.policy import Merged
    from petps.checkpoint.retention import Retention
    from petps.checkpoint.tend import Tending

    if policy not in POLICIES:
        raise InvalidArgument(f"--policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if every <= 0 or verify_mib < 0:
        raise InvalidArgument("--every must be above 0, and --verify-mib at least 0")
    if deltas_per_base < 0 or (deltas_per_base and policy != Merged.name):
        raise InvalidArgument(
            f"--deltas-per-base must be at least 0, and needs --policy {Merged.name}, got "
            f"{deltas_per_base} with --policy {policy}"
        )
    retention = None if keep is None else Retention.parse(keep)
    with executor_of(on) as executor:
        if policy == Merged.name:
            arranging: Policy = Merged(executor=executor, every=deltas_per_base)
        else:
            arranging = POLICIES[policy]()
        tending = Tending(
            Store.open(store), arranging, retention, verify_bytes=verify_mib << 20, resets=bases
        )
        while True:
            try:
                done = tending.round()
            except PetpsError as error:
                if once:
                    raise
                note(f"{store}: {error}; trying again in {every:g} s")
            else:
                _report(store, done, json_=json_)
                sys.stdout.flush()  # a reader of a pipe waits for each round
                if once and done.damaged:
                    raise DataLoss(f"{store} has {len(done.damaged)} damaged versions")
                if once and done.error is not None:
                    raise done.error
                if once:
                    return
            time.sleep(every)


def _report(store: str, done: Round, *, json_: bool) -> None:
    if json_:
        report = {
            "base": done.base,
            "dropped": done.dropped,
            "checked": done.checked,
            "damaged": {str(version): text for version, text in done.damaged.items()},
            "whole": done.whole,
            "unread": done.unread,
            "spans": {
                work: {"begin": begin, "seconds": seconds}
                for work, (begin, seconds) in done.spans.items()
            },
            "error": None if done.error is None else str(done.error),
        }
        typer.echo(json.dumps(report))  # a line for each round
        return
    if done.base is not None:
        note(f"{store}: version {done.base} is a base now")
    if done.dropped:
        note(f"{store}: {len(done.dropped)} versions deleted, {done.whole} is the newest whole one")
    if done.error is not None:
        note(f"{store}: not all was done: {done.error}")
    for version, problem in done.damaged.items():
        note(f"{store}: version {version} is damaged: {problem}")
    if done.damaged:
        whole = "none is whole" if done.whole is None else f"version {done.whole} is whole"
        note(f"{store}: {whole}; to go back to it: petps checkpoint rollback {store} --whole --yes")


@contextlib.contextmanager
def executor_of(on: str) -> Iterator[Executor]:
    """Yield the place where deltas are merged: the value of --on."""
    from petps.checkpoint.merge import InPlace

    if on == HERE:
        yield InPlace()
        return
    address = ray_address(on)
    from petps.checkpoint.on_ray import OnRay

    with OnRay(address) as executor:
        yield executor


def ray_address(on: str) -> str | None:
    """Return the address of the cluster that --on names; None: of this machine, or the present one.

    Raise InvalidArgument.
    """
    if on != RAY and not on.startswith(f"{RAY}://"):
        raise InvalidArgument(f"--on must be {HERE}, {RAY} or {RAY}://HOST:PORT, got {on}")
    return None if on == RAY else on
