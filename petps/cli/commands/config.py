"""petps config."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from petps.cli.options import JsonReport
from petps.cli.output import facts, json_out, table


def config(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Check this file, and show the values that result."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write the document deploy/config/KEYS.md.")
    ] = False,
    json_: JsonReport = False,
) -> None:
    """Show every key of a configuration file, or check one.

    [bold]Examples[/bold]

        petps config

        petps config deploy/config/petps.toml
    """
    from petps.config import hide_secrets, keys, keys_markdown, load

    if file is not None:
        settings = load(file)
        settings.check_doors()
        values = settings.model_dump(mode="json")
        values["kafka"] = hide_secrets(values["kafka"])
        if json_:
            json_out(values)
        else:
            facts(_flat(values, ""), title=f"{file}: valid")
        return
    if markdown:
        typer.echo(keys_markdown(), nl=False)
    elif json_:
        json_out([asdict(key) for key in keys()])
    else:
        rows = [
            (f"[{key.section}] {key.name}", key.kind, key.default, key.description)
            for key in keys()
        ]
        table(("key", "value", "default", "meaning"), rows)


def _flat(values: dict[str, object], section: str) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for name, value in values.items():
        path = f"{section}.{name}" if section else name
        if isinstance(value, dict):
            pairs += _flat(value, path)
        else:
            pairs.append((path, "none" if value is None else str(value)))
    return pairs
