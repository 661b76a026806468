"""petps token: the access file of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from petps.cli.options import JsonReport, Yes, confirm
from petps.cli.output import json_out, note, table

app = typer.Typer(
    help="Say who may pull, push and administer: tokens and client certificates.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

DEFAULT_FILE: Final = "access.json"
TOKEN_MODE: Final = 0o600

FileOption = Annotated[
    Path,
    typer.Option(
        "--file",
        metavar="FILE",
        envvar="PETPS_ACCESS_FILE",
        help="The access file: `access.file` of the server's configuration.",
    ),
]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the grant, shown in errors and the status.")
]


@app.command("new")
def new(
    name: NameArgument,
    role: Annotated[
        list[str],
        typer.Option(
            help="'read' (pull), 'write' (push and delete) or 'admin' (administer). Repeatable; no "
            "role includes another one."
        ),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model that the roles hold for. Repeatable; by default all models."),
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(
            metavar="CERTIFICATE_NAME",
            help="Grant the roles to client certificates of this name (a DNS name or URI in it, "
            "else its common name), instead of to a new token.",
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="When the grant ends, such as '12h' or '90d' from now."),
    ] = None,
    requests_per_second: Annotated[
        int, typer.Option(min=0, help="Limit over all connections to a server; 0: none.")
    ] = 0,
    bytes_per_second: Annotated[
        int, typer.Option(min=0, help="Limit of requests and replies together; 0: none.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the token to this new file (mode 0600) instead of printing it."),
    ] = None,
    file: FileOption = Path(DEFAULT_FILE),
) -> None:
    """Make a token, and a grant for it. The token is shown once: the file has only its hash.

    Servers that use the file know the grant within two seconds.

    [bold]Examples[/bold]

        petps token new inference --role read --out inference.token
        petps token new trainer --role write --model ranking --expires 90d
        petps token new fleet --role read --certificate inference.example.com
    """
    from datetime import datetime, timedelta, timezone

    from pydantic import ValidationError

    from petps.config.duration import parse_duration
    from petps.delta.files import publish_file
    from petps.errors import AlreadyExists, InvalidArgument
    from petps.server.access_file import AccessFile, Entry, hash_of, new_token

    if certificate is not None and out is not None:
        raise InvalidArgument("--out is for a token, and a grant for a certificate has none")
    if out is not None and out.exists():
        raise AlreadyExists(f"{out} exists: choose another file for the token")
    token = None if certificate is not None else new_token()
    now = datetime.now(timezone.utc).replace(microsecond=0)
    ends = None
    if expires is not None:
        ends = now + timedelta(seconds=parse_duration(expires, "--expires"))
    try:
        entry = Entry(
            name=name,
            token_sha256=None if token is None else hash_of(token),
            certificate=certificate,
            roles=list(role),  # type: ignore[arg-type]  # checked by the model
            models=model or "*",
            created=_utc(now),
            expires=None if ends is None else _utc(ends),
            requests_per_second=requests_per_second,
            bytes_per_second=bytes_per_second,
        )
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "grant"
        raise InvalidArgument(f"{where}: {fault['msg'].removeprefix('Value error, ')}") from None
    AccessFile(file).add(entry)
    if token is not None and out is not None:
        publish_file(out, f"{token}\n".encode(), exclusive=True, mode=TOKEN_MODE)
        note(f"{out} has the token of '{name}'; {file} has its hash")
    elif token is not None:
        print(token)
        note(f"this is the token of '{name}'. Keep it: {file} has only its hash")
    else:
        note(f"client certificates of '{certificate}' are known as '{name}' in {file}")


@app.command("list")
def list_(file: FileOption = Path(DEFAULT_FILE), json: JsonReport = False) -> None:
    """List the grants of an access file. Tokens and hashes are not shown.

    [bold]Examples[/bold]

        petps token list
    """
    from petps.server.access_file import AccessFile

    entries = AccessFile(file).entries()
    if json:
        json_out([entry.model_dump(exclude={"token_sha256"}) for entry in entries])
        return
    rows = []
    for entry in entries:
        limits = [
            f"{number:,} {unit}/s"
            for number, unit in (
                (entry.requests_per_second, "requests"),
                (entry.bytes_per_second, "bytes"),
            )
            if number
        ]
        rows.append(
            (
                entry.name,
                "token" if entry.certificate is None else f"certificate {entry.certificate}",
                ", ".join(entry.roles),
                "all" if entry.models == "*" else ", ".join(entry.models),
                ", ".join(limits) or "-",
                ("expired " if entry.is_expired() else "") + (entry.expires or "-"),
            )
        )
    table(("name", "credential", "roles", "models", "limits", "ends"), rows)


@app.command("revoke")
def revoke(name: NameArgument, file: FileOption = Path(DEFAULT_FILE), yes: Yes = False) -> None:
    """Remove a grant: its token or certificate is refused, and its connections are closed.

    Servers that use the file do so within two seconds.

    [bold]Examples[/bold]

        petps token revoke trainer --yes
    """
    from petps.server.access_file import AccessFile

    confirm(f"revoke '{name}' in {file}", yes)
    AccessFile(file).remove(name)
    note(f"'{name}' is revoked in {file}")


def _utc(moment: object) -> str:
    from datetime import datetime

    assert isinstance(moment, datetime)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
