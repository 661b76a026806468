"""Exit with 0 if the server of this container is healthy, else print why and exit with 1.

    health.py [CONFIGURATION]

It asks /healthz, as the container's health check does every few seconds. So it imports little: the
same from `petps status` takes ten times as long.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import tomllib
from pathlib import Path
from typing import Any

CONFIGURATION = "/etc/petps/petps.toml"
SECONDS = 4.0  # less than the time limit of the health check


def connection(configuration: dict[str, Any]) -> http.client.HTTPConnection:
    """Return a connection to the HTTP port, which is not open yet."""
    server = configuration.get("server", {})
    host = server.get("host", "127.0.0.1")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    port = int(os.environ.get("PETPS_SERVER_HTTP_PORT", server.get("http_port", 7072)))
    if "certificate" not in configuration.get("tls", {}):
        return http.client.HTTPConnection(host, port, timeout=SECONDS)
    context = ssl.create_default_context()
    context.check_hostname = False  # it is this container, whatever its name
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=SECONDS, context=context)


def main(path: str) -> str:
    """Return why the server is not healthy; nothing if it is."""
    try:
        door = connection(tomllib.loads(Path(path).read_text()))
        door.request("GET", "/healthz")
        answer = door.getresponse()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{path}: the server does not answer: {error}"
    return "" if answer.status == http.HTTPStatus.OK else f"/healthz: {answer.status}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [CONFIGURATION]) or 0)
