"""One module for each command. They import only typer and the standard library at first."""

from __future__ import annotations

import typer

from petps.cli.commands import (
    checkpoint,
    config,
    create,
    demo,
    export,
    import_hps,
    load,
    publish,
    pull,
    push,
    serve,
    status,
    verify,
    versions,
)

__all__ = ["register"]

# The commands by their heading in the help text.
_HEADINGS = {
    "Pools": (create.create, status.status, verify.verify, config.config),
    "Versions": (versions.instances, versions.alias, versions.drop),
    "Rows": (load.load, pull.pull, push.push, export.export, publish.publish),
    "Running": (serve.serve, import_hps.import_hps, demo.demo),
}


def register(app: typer.Typer) -> None:
    """Add every command to the app."""
    for heading, functions in _HEADINGS.items():
        for function in functions:
            app.command(rich_help_panel=heading)(function)
    app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel="Versions")
