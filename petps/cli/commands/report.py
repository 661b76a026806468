"""petps report."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from petps.cli.options import JsonReport
from petps.cli.output import bytes_text, json_out, note, waiting
from petps.cli.target import is_server, open_target


def report(
    target: Annotated[
        str,
        typer.Argument(
            metavar="POOL | CONFIG | URL",
            help="A pool, a configuration file, or a server: petps://HOST:PORT.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.tar.gz", help="The new file; by default petps-report-TIME.tar.gz here."
        ),
    ] = None,
    log: Annotated[
        str | None, typer.Option(metavar="FILE", help="Add the last lines of this log of a server.")
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(metavar="UNIT", help="Add the last lines of this unit of systemd's journal."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Take the metrics from here: http://HOST:7072/metrics."),
    ] = None,
    json_: JsonReport = False,
) -> None:
    """Collect what support needs, without secrets, in one file that only you can read.

    It has the findings of `petps doctor`, the effective configuration, versions, status, metrics
    and incidents of the server, what the kernel says of its limits, and the last lines of a log, if
    you name one. It has no rows and no keys. It works also if the server does not. Nothing is sent.

    [bold]Examples[/bold]

        petps report /etc/petps/petps.toml --journal petps

        petps report my.pool --log petps.log --output case-17.tar.gz

        petps report petps://10.0.0.7:7070
    """
    from petps.cli.commands.doctor import START_SECONDS
    from petps.doctor import Machine, Subject, in_time, subject_of
    from petps.doctor.bundle import default_name, fit, write_bundle
    from petps.doctor.report import Sources, collect
    from petps.errors import AlreadyExists

    file = Path(default_name()) if output is None else output
    if file.exists():
        raise AlreadyExists(f"{file} exists: choose another file with --output")
    sources = Sources(metrics_url=metrics, log_file=log, journal_unit=journal)
    if is_server(target):
        subject = Subject(Machine())
        sources.status = lambda: _status(target)
    else:
        subject = in_time(lambda: subject_of(target, Machine()), START_SECONDS, target)
    with waiting("collecting", quiet=json_):
        result = fit(collect(subject, sources))
    if not json_:
        for member in result.members:
            note(f"  {member.name:20} {bytes_text(len(member.content)):>10}  {member.about}")
        for name, reason in result.left_out.items():
            note(f"  {name:20} {'-':>10}  left out: {reason}")
        note(f"writing {file}, which only you can read")
    size = write_bundle(file, result)
    if json_:
        json_out(
            {
                "file": str(file),
                "bytes": size,
                "members": {member.name: len(member.content) for member in result.members},
                "left_out": result.left_out,
            }
        )
        return
    note(f"{file}: {bytes_text(size)}. Look at it before you send it: tar tzf {file}")


def _status(target: str) -> Mapping[str, Any]:
    with closing(open_target(target, model=None, read_only=True)) as server:
        return server.status()
