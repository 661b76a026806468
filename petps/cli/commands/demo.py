"""petps demo."""

from __future__ import annotations

import typer


def demo() -> None:
    """Show where the demos are, and how to run them."""
    typer.echo(
        "The demos are in the folder examples/ of petps' repository, not in the package.\n"
        "In a checkout:\n\n"
        "  make demo        learns from real accesses, serves, kills the server, compares rows\n"
        "  make demo-train  trains a DLRM, streams, serves, kills both (installs PyTorch)"
    )
