"""petps pull."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from petps.cli.arguments import CommandWithKeys
from petps.cli.options import (
    JsonReport,
    ModelOption,
    SignedKeys,
    TableName,
    TargetName,
    parse_key,
)
from petps.cli.output import json_out, note, table
from petps.cli.target import open_target
from petps.cli.traced import traced
from petps.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

COMMAND = CommandWithKeys
UNAVAILABLE = "unavailable"  # instead of "yes" or "no"
VALUES_SHOWN = 6  # values of a row on a terminal; --json and --out write all


def pull(
    target: TargetName,
    table_: TableName,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY...]", help="Keys: numbers from 0 to 2^64-1.")
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option("--keys", help="Read the keys from this .npy file instead.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write to this file: .npy (rows), or .npz (keys, rows, found, unavailable)."
        ),
    ] = None,
    model: ModelOption = None,
    signed_keys: SignedKeys = False,
    json_: JsonReport = False,
) -> None:
    """Show the rows of keys. A missing key is marked, and shows the table's default row.

    With ?on_unavailable=default at the end of the server's address, so does a key of a shard that
    no server answers for: it is marked as unavailable.

    [bold]Examples[/bold]

        petps pull my.pool items 1 2 3

        petps pull petps://127.0.0.1:7070 items 42 --json

        petps pull petps://127.0.0.1:7070/ranking items --keys keys.npy --out rows.npz

        petps pull my.pool items -7 --signed-keys
    """
    import numpy as np

    if out is not None and out.suffix not in (".npy", ".npz"):
        raise InvalidArgument(f"--out {out}: write .npy (rows alone) or .npz (keys, rows, found)")
    key_array = _keys(keys or [], keys_file, signed_keys)
    with (
        closing(open_target(target, model=model, read_only=True)) as handle,
        traced("petps pull"),
    ):
        rows, mask, unavailable = handle.pull(table_, key_array)
    if signed_keys:
        key_array = key_array.view(np.int64)
    if out is not None:
        _write(out, key_array, rows, mask, unavailable)
    if json_:
        _show_json(table_, key_array, rows, mask, unavailable, out)
    elif out is not None:
        count = int(unavailable.sum())
        others = f", {count:,} unavailable" if count > 0 else ""
        note(f"{len(key_array):,} keys, {int(mask.sum()):,} found{others} -> {out}")
    else:
        found = np.where(unavailable, UNAVAILABLE, np.where(mask, "yes", "no"))
        lines = [
            (str(key), key_found, _row_text(row))
            for key, key_found, row in zip(key_array.tolist(), found.tolist(), rows, strict=True)
        ]
        table(("key", "found", f"row (dim {rows.shape[1]})"), lines)


def _keys(texts: list[str], file: Path | None, signed: bool) -> npt.NDArray[np.uint64]:
    import numpy as np
    from petps_client.arrays import as_keys

    if (file is None) == (not texts):
        raise InvalidArgument("name the keys, either as arguments or with --keys FILE.npy")
    if file is None:
        return np.array([parse_key(text, signed=signed) for text in texts], dtype=np.uint64)
    try:
        return as_keys(np.load(file, allow_pickle=False), signed)
    except FileNotFoundError:
        raise NotFound(f"{file}: no such file") from None
    except (ValueError, EOFError, TypeError) as error:
        raise InvalidArgument(f"{file} is no .npy file of keys: {error}") from None


def _row_text(row: npt.NDArray[np.float32]) -> str:
    values = " ".join(f"{value:.6g}" for value in row[:VALUES_SHOWN].tolist())
    return values + (" …" if row.shape[0] > VALUES_SHOWN else "")


def _write(
    out: Path,
    keys: npt.NDArray[np.uint64] | npt.NDArray[np.int64],
    rows: npt.NDArray[np.float32],
    mask: npt.NDArray[np.bool_],
    unavailable: npt.NDArray[np.bool_],
) -> None:
    import numpy as np

    if out.suffix == ".npy":
        np.save(out, rows)
    else:
        np.savez(out, keys=keys, rows=rows, found=mask, unavailable=unavailable)


def _show_json(
    name: str,
    keys: npt.NDArray[np.uint64] | npt.NDArray[np.int64],
    rows: npt.NDArray[np.float32],
    mask: npt.NDArray[np.bool_],
    unavailable: npt.NDArray[np.bool_],
    out: Path | None,
) -> None:
    report: dict[str, object] = {
        "table": name,
        "keys": len(keys),
        "found": int(mask.sum()),
        UNAVAILABLE: int(unavailable.sum()),
    }
    if out is not None:
        report["out"] = str(out)
    else:
        report["rows"] = [
            {"key": key, "found": is_found, UNAVAILABLE: is_unavailable, "row": row}
            for key, is_found, is_unavailable, row in zip(
                keys.tolist(), mask.tolist(), unavailable.tolist(), rows.tolist(), strict=True
            )
        ]
    json_out(report)
