"""Writes the seeds of all fuzz targets: python -m tests.fuzz.seeds FOLDER.

They are valid encodings, from the golden files and from the encoders of the Python targets.
"""

from __future__ import annotations

import importlib
import random
import ssl
import struct
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
CXX_TARGETS: Final = ("wire", "codec", "pool", "tls")
PYTHON_TARGETS: Final = ("records", "stores", "texts", "requests")


def wire_seeds() -> list[bytes]:
    """Return the golden frames, and maps for check_any_map() of wire.cc."""
    frames = [
        bytes.fromhex(path.read_text()) for path in sorted((ROOT / "tests/golden/wire").iterdir())
    ]
    return [*frames, b"MA" + bytes(range(60)), b"MA" + bytes(200)]


def codec_seeds() -> list[bytes]:
    """Return random bytes: the target takes its choices from the end of an input."""
    source = random.Random(1)
    return [source.randbytes(length) for length in (40, 200, 600, 2000, 4000) for _ in range(4)]


def pool_seeds() -> list[bytes]:
    """Return each golden pool without edits and with some, for each way to open it. See pool.cc."""
    source = random.Random(2)
    inputs = []
    for pool in range(8):
        for flags in range(8):
            inputs.append(bytes([pool, flags]))
            for kind in range(4):
                value = source.choice([0, 1, 0xFFFFFFFF, 1 << 40, (1 << 64) - 1])
                edit = struct.pack("<IIQ", source.randrange(1 << 20) << 2 | kind, 8, value)
                inputs.append(bytes([pool, flags]) + edit)
        inputs.append(bytes([pool, 8]) + struct.pack("<IIQ", 0, 8, 1 << 20))
    return inputs


def tls_seeds() -> list[bytes]:
    """Return the first bytes of clients and servers, and edits of records. See tls.cc."""
    server, client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    try:
        context.wrap_bio(server, client, server_hostname="localhost").do_handshake()
    except ssl.SSLWantReadError:
        hello = client.read()
    alert, key_update = bytes.fromhex("15030300020228"), bytes.fromhex("1603030005180000010100")
    inputs = [bytes([0, part]) + hello for part in (0, 1, 255)]
    inputs += [bytes([side, 9]) + record for side in (0, 1) for record in (alert, key_update)]
    edits = [struct.pack(">HBB", at, kind, 1) for at in (0, 3, 5, 16_410) for kind in range(3)]
    return [*inputs, bytes([2, 200]), *(bytes([2, 200]) + edit for edit in edits)]


def seeds_of(target: str) -> list[bytes]:
    """Return the seeds of a target."""
    if target in PYTHON_TARGETS:
        inputs: list[bytes] = importlib.import_module(f"tests.fuzz.{target}").seeds()
        return inputs
    return _SEEDS[target]()


_SEEDS: Final = {
    "wire": wire_seeds, "codec": codec_seeds, "pool": pool_seeds, "tls": tls_seeds,
}  # fmt: skip


def write(folder: Path, target: str) -> Path:
    """Write the seeds of a target below ``folder``; return where they are."""
    path = folder / target
    path.mkdir(parents=True, exist_ok=True)
    for number, body in enumerate(seeds_of(target)):
        (path / f"seed-{number:03d}").write_bytes(body)
    return path


def main() -> None:
    """Write the seeds of all targets."""
    for target in (*CXX_TARGETS, *PYTHON_TARGETS):
        print(write(Path(sys.argv[1]), target))


if __name__ == "__main__":
    main()
