"""A TCP relay, which lets a client reach a server from another loopback address."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator


def _copy(reader: socket.socket, writer: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other direction has closed both
        while content := reader.recv(65536):
            writer.sendall(content)
    for end in (reader, writer):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relayed(port: int, source: str) -> Iterator[str]:
    """Yield the address of a relay to a port of 127.0.0.1, which is reached from ``source``."""

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            """Copy in both directions until one end closes."""
            server = socket.create_connection(("127.0.0.1", port), 30, (source, 0))
            server.settimeout(None)
            with server:
                back = threading.Thread(target=_copy, args=(server, self.request), daemon=True)
                back.start()
                _copy(self.request, server)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as relay:
        relay.daemon_threads = True
        threading.Thread(target=relay.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"127.0.0.1:{relay.server_address[1]}"
        finally:
            relay.shutdown()
