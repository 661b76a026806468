"""One module for each command, imported when the command is used.

The modules import only typer and the standard library at first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import typer

from petps.cli.arguments import refuse_urls

__all__ = ["Commands"]

# The commands by their heading in the help text.
_HEADINGS: Final = {
    "Pools": (
        "create",
        "plan",
        "table",
        "shrink",
        "status",
        "verify",
        "scrub",
        "backup",
        "restore",
        "config",
    ),
    "Versions": ("instances", "alias", "drop", "checkpoint"),
    "Rows": ("load", "pull", "push", "export", "publish"),
    "Running": (
        "serve",
        "ingest",
        "cluster",
        "controller",
        "router",
        "token",
        "log-level",
        "doctor",
        "report",
        "import-hps",
        "demo",
    ),
}
# The modules of commands that do not have a module of their own name.
_MODULES: Final = {"instances": "versions", "alias": "versions", "drop": "versions"}


class Commands(Mapping[str, Any]):
    """Every command by name, built when it is looked up: to build all takes longer than to serve.

    A command's module has a function of its name, or the commands of a group in ``app``. COMMAND in
    it is the class of the command, if it needs one of its own.
    """

    def __init__(self) -> None:
        self._headings = {name: heading for heading, names in _HEADINGS.items() for name in names}
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = _build(name, self._headings[name])
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headings)

    def __len__(self) -> int:
        return len(self._headings)


def _build(name: str, heading: str) -> Any:
    identifier = name.replace("-", "_")
    module = import_module(f"petps.cli.commands.{_MODULES.get(name, identifier)}")
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.callback()(lambda: None)  # makes it a group, also with one command
    if hasattr(module, "app"):
        for command in module.app.registered_commands:
            command.callback = refuse_urls(command.callback)
        app.add_typer(module.app, name=name, rich_help_panel=heading)
    else:
        kind = getattr(module, "COMMAND", None)
        app.command(name, cls=kind, rich_help_panel=heading)(
            refuse_urls(getattr(module, identifier))
        )
    group: Any = typer.main.get_command(app)
    return group.commands[name]
