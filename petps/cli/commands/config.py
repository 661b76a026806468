"""petps config."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from petps.cli.options import JsonReport
from petps.cli.output import json_out, table

app = typer.Typer(rich_markup_mode="rich", invoke_without_command=True)


@app.callback()
def config(
    context: typer.Context,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write the document deploy/config/KEYS.md.")
    ] = False,
    json_: JsonReport = False,
) -> None:
    """Show every key of a configuration file with its environment variable, or check settings.

    [bold]Examples[/bold]

        petps config

        petps config check deploy/config/petps.toml
    """
    if context.invoked_subcommand is not None:
        return
    from petps.config import keys, keys_markdown, variable_of

    if markdown:
        typer.echo(keys_markdown(), nl=False)
    elif json_:
        json_out([asdict(key) | {"variable": variable_of(key.path)} for key in keys()])
    else:
        rows = [
            (
                f"[{key.section}] {key.name}\n{variable_of(key.path)}",
                key.kind,
                key.default,
                key.description,
            )
            for key in keys()
        ]
        table(("key and variable", "value", "default", "meaning"), rows)


@app.command("check")
def check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="The configuration file; by default none."),
    ] = None,
    json_: JsonReport = False,
) -> None:
    """Check a configuration file and the environment, and the places that they name.

    It reads the certificates, the access file, the shard map and the stores, and looks at the place
    of the pool, which it does not open. It asks no broker. It has the permissions of its user, so
    run it as the server's user. Then it shows each setting that has not its default, and where it
    comes from.

    [bold]Examples[/bold]

        petps config check /etc/petps/petps.toml

        petps config check /etc/petps/petps.toml --json
    """
    from petps.cli.app import EXIT_CODES
    from petps.config import read_settings
    from petps.config.shown import shown_settings
    from petps.errors import InvalidArgument, NotFound
    from petps.server.check import check_places

    report: dict[str, Any] = {"faults": [], "notes": [], "settings": []}
    try:
        settings = read_settings(file, os.environ)
    except (InvalidArgument, NotFound) as error:
        report["faults"] = str(error).splitlines()
    else:
        for finding in check_places(settings.config):
            kind = "faults" if finding.is_fault else "notes"
            report[kind].append(f"{finding.key}: {finding.text}")
        report["settings"] = [asdict(setting) for setting in shown_settings(settings)]
    if json_:
        json_out(report)
    else:
        _show(report)
    if report["faults"]:
        raise typer.Exit(EXIT_CODES["INVALID_ARGUMENT"])


def _show(report: dict[str, Any]) -> None:
    for fault in report["faults"]:
        typer.echo(f"fault: {fault}")
    for note in report["notes"]:
        typer.echo(f"note: {note}")
    if report["settings"]:
        rows = [
            (setting["key"], json.dumps(setting["value"]), setting["source"])
            for setting in report["settings"]
        ]
        table(("setting", "value", "from"), rows)
    count = len(report["faults"])
    typer.echo(f"{count} fault{'' if count == 1 else 's'}" if count else "valid")
