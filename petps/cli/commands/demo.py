"""petps demo."""

from __future__ import annotations

import typer


def demo(context: typer.Context) -> None:
    """Train, publish, serve, kill -9, restart and compare, on real data (see --help)."""
    import petps.demo

    raise typer.Exit(petps.demo.main(context.args))
