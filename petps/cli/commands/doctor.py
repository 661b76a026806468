"""petps doctor."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Final

import typer

from petps.cli.app import FAULTS_FOUND
from petps.cli.options import JsonReport
from petps.cli.output import json_out, note, waiting
from petps.log import printable

if TYPE_CHECKING:
    from petps.doctor import Finding

START_SECONDS: Final = 10.0  # for reading the configuration or the begin of the pool


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG | POOL]",
            help="A configuration file, or a pool. Without it, only the machine is checked.",
        ),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show also what is well, and what is only good to know.")
    ] = False,
    probe_writes: Annotated[
        bool,
        typer.Option(
            "--probe-writes",
            help="Also write a small file to a store that is a URL, and remove it.",
        ),
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write the document docs/reference/findings.md.")
    ] = False,
    json_: JsonReport = False,
) -> None:
    """Check this machine, a pool and a configuration, and say what to do.

    It changes nothing, also not in a pool that a server has open, and ends within 30 seconds. Run
    it as the server's user: it then sees what the server sees. The exit code is 0 if there is no
    fault, and 10 if there is one.

    [bold]Examples[/bold]

        petps doctor

        petps doctor /etc/petps/petps.toml

        petps doctor my.pool --all --json
    """
    from petps.doctor import (
        Level,
        Machine,
        diagnose,
        findings_markdown,
        in_time,
        subject_of,
        worst,
    )

    if markdown:
        typer.echo(findings_markdown(), nl=False)
        return
    machine = Machine(probes_writes=probe_writes)
    with waiting("checking", quiet=json_):
        subject = in_time(lambda: subject_of(target, machine), START_SECONDS, str(target))
        findings = diagnose(subject)
    counts = Counter(finding.level.value for finding in findings)
    if json_:
        json_out(
            {
                "target": target,
                "counts": {level.value: counts[level.value] for level in Level},
                "findings": [finding.as_json() for finding in findings],
            }
        )
    else:
        order = [Level.FAULT, Level.WARNING, *([Level.NOTE, Level.OK] if show_all else [])]
        for level in order:
            for finding in findings:
                if finding.level is level:
                    _show(finding)
        hidden = "" if show_all else "; --all shows everything"
        note(", ".join(f"{counts[level.value]} {level.value}" for level in Level) + hidden)
    if worst(findings) is Level.FAULT:
        raise typer.Exit(FAULTS_FOUND)


def _show(finding: Finding) -> None:
    from petps.doctor import Level

    colours = {Level.FAULT: "red", Level.WARNING: "yellow", Level.NOTE: "cyan", Level.OK: "green"}
    level = typer.style(f"{finding.level.value}:", fg=colours[finding.level], bold=True)
    typer.echo(f"{level} {finding.name}: {printable(finding.seen)}")
    if finding.level in (Level.FAULT, Level.WARNING):
        typer.echo(f"    why: {printable(finding.why)}")
    if finding.remedy:
        typer.echo(f"    do:  {printable(finding.remedy)}")
