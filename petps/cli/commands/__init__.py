"""One module for each command. Importing them must be cheap: typer and the standard library."""

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

_SETUP = "Pools"
_VERSIONS = "Versions"
_ROWS = "Rows"
_RUN = "Running"


def register(app: typer.Typer) -> None:
    """Add every command."""
    app.command(rich_help_panel=_SETUP)(create.create)
    app.command(rich_help_panel=_SETUP)(status.status)
    app.command(rich_help_panel=_SETUP)(verify.verify)
    app.command(rich_help_panel=_SETUP)(config.config)
    app.command(rich_help_panel=_VERSIONS)(versions.instances)
    app.command(rich_help_panel=_VERSIONS)(versions.alias)
    app.command(rich_help_panel=_VERSIONS)(versions.drop)
    app.command(rich_help_panel=_ROWS)(load.load)
    app.command(rich_help_panel=_ROWS)(pull.pull)
    app.command(rich_help_panel=_ROWS)(push.push)
    app.command(rich_help_panel=_ROWS)(export.export)
    app.command(rich_help_panel=_ROWS)(publish.publish)
    app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=_VERSIONS)
    app.command(rich_help_panel=_RUN)(serve.serve)
    app.command("import-hps", rich_help_panel=_RUN)(import_hps.import_hps)
    app.command(rich_help_panel=_RUN)(demo.demo)
