"""A server whose kernel encrypts: its rows are gathered by sendmsg, and clients notice nothing.

tests/lab runs this where the kernel has TLS. Elsewhere OpenSSL encrypts, and the rows are the same.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

import numpy as np
import petps_client
import pytest

import petps
from tests.certificates import Authority
from tests.system.servers import Server, connect

pytestmark = pytest.mark.system
KEYS, DIM, PULL = 2_000, 256, 500  # rows of 1 KiB
TCP_ULP = 31


def kernel_has_tls() -> bool:
    """Return whether this kernel can encrypt. If PETPS_TEST_KERNEL_TLS is set, it must."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as peer,
    ):
        try:
            peer.setsockopt(socket.IPPROTO_TCP, TCP_ULP, b"tls")
            return True
        except OSError:
            assert "PETPS_TEST_KERNEL_TLS" not in os.environ, "modprobe tls"
            return False


def rows_of(keys: np.ndarray) -> np.ndarray:
    rows: np.ndarray = keys[:, None].astype(np.float32) + np.arange(DIM, dtype=np.float32) / DIM
    return rows


@pytest.mark.parametrize("gather", ["sendmsg", "copy"])
def test_rows_are_the_same_whoever_encrypts(tmp_path: Path, gather: str) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    pool = tmp_path / "pool"
    everything = np.arange(KEYS, dtype=np.uint64)
    with petps.create(pool, durability="process") as opened:
        opened.create_table("items", dim=DIM, capacity=KEYS)
        opened.push("items", everything, rows_of(everything))
    config = tmp_path / "petps.toml"
    config.write_text(f"""
[server]
gather = "{gather}"
[tls]
certificate = "{pair.certificate}"
key = "{pair.key}"
""")
    server = Server(pool, "--config", config)
    random = np.random.default_rng(1)
    try:
        url = f"petps+tls://127.0.0.1:{server.wait_ready()['port']}/default"
        trust = petps_client.Tls(ca=str(authority.certificate))
        with closing(connect(url, tls=trust)) as client:
            for _ in range(20):
                keys = random.integers(0, KEYS + 100, PULL).astype(np.uint64)
                rows, present = client.pull("items", keys, return_mask=True)
                assert np.array_equal(present, keys < KEYS)
                assert np.array_equal(rows[present], rows_of(keys[present]))
            stats = client.status()["stats"]
            by_kernel = gather == "sendmsg" and kernel_has_tls()
            assert (stats["connections_kernel_tls"] > 0) == by_kernel
            status = client.status()["gather"]
            assert (status["lists_gathered"] > 0) == by_kernel
    finally:
        server.kill()
