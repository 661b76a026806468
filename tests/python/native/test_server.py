"""petps._native.Server: start, stop and invalid options. tests/native tests the frames."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from petps import _native
from petps.errors import InvalidArgument, PetpsError
from tests.python.waiting import wait_until


@pytest.fixture
def tables() -> Iterator[_native.Tables]:
    opened = _native.Tables.create("")
    opened.create_instance("m", "m@0", 1)
    yield opened
    opened.close()


def test_a_server_listens_until_it_is_stopped(tables: _native.Tables) -> None:
    server = _native.Server.start(tables, port=0, workers=2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5):
        pass
    status = json.loads(server.status_json())
    assert status["port"] == server.port
    server.set_status_member("ingest", '{"rows": 3}')
    assert json.loads(server.status_json())["ingest"] == {"rows": 3}
    assert server.stats()["pulls"] == 0
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_counts_show_that_each_thread_makes_progress(tables: _native.Tables) -> None:
    server = _native.Server.start(tables, port=0, workers=2, call_workers=1)
    before, pushes = server.progress()
    assert (len(before), pushes) == (3, 0)
    wait_until(lambda: all(map(int.__lt__, before, server.progress()[0])))
    server.stop()


def test_incidents_have_numbers(tables: _native.Tables) -> None:
    server = _native.Server.start(tables, port=0)
    for number in (1, 2):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as peer:
            peer.sendall(b"\xff" * 64)  # no frame
            wait_until(lambda: len(server.incidents_after(0)) == number)  # noqa: B023
    first, second = server.incidents_after(0)
    assert (first[0], second[0], first[2]) == (1, 2, "127.0.0.1")
    assert server.incidents_after(1) == [second]
    assert server.incidents_after(2) == []
    server.stop()


def test_invalid_options_are_refused(tables: _native.Tables) -> None:
    with pytest.raises(InvalidArgument, match="server limit 'keys' is unknown"):
        _native.Server.start(tables, port=0, limits={"keys": 1})
    with pytest.raises(InvalidArgument, match="gather 'fast' is unknown; write 'auto', 'copy', "):
        _native.Server.start(tables, port=0, gather="fast")  # type: ignore[arg-type]
    with pytest.raises(PetpsError, match="workers"):
        _native.Server.start(tables, port=0, workers=1000)
    with pytest.raises(PetpsError, match="localhost"):
        _native.Server.start(tables, host="localhost", port=0)


def test_a_port_in_use_is_refused(tables: _native.Tables) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PetpsError, match=f"{port}.*in use"):
            _native.Server.start(tables, port=port)
    tables.info()  # the pool is unchanged
