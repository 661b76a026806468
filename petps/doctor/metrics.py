"""The metrics of a server, by HTTP, for a report."""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Final
from urllib.parse import urlsplit

from petps.admin.client import read_token
from petps.config.doors import is_loopback
from petps.doctor.checks.configuration import listeners
from petps.doctor.subject import Subject
from petps.errors import NotFound, Unavailable

__all__ = ["read_metrics"]

REQUEST_SECONDS = 3.0
BYTES_MAX: Final = 4 << 20
TRIES_MAX: Final = 16
ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# What makes an answer one of /metrics.
BEGIN: Final = "# HELP"


def read_metrics(
    subject: Subject, url: str | None, environment: Mapping[str, str], *, is_remote: bool = False
) -> str | None:
    """Return the metrics, below the URL that gave them; None if there is no server to ask.

    is_remote: the server is on another machine, so only ``url`` can say where its metrics are.

    With an access file, PETPS_TOKEN_FILE names the file of a token. Raises Unavailable, with the
    reason of each URL.
    """
    urls = [url] if url is not None else list(_urls(subject))
    if not urls:
        if subject.holders or is_remote:
            raise NotFound("the HTTP port of the server is unknown: give --metrics URL")
        return None
    reasons = []
    for candidate in urls[:TRIES_MAX]:
        try:
            text = _read(candidate, environment)
        except (OSError, ValueError, HTTPException) as error:
            reasons.append(f"{candidate}: {getattr(error, 'reason', None) or error}")
            continue
        if text.startswith(BEGIN):
            return f"# {candidate}\n{text}"
        reasons.append(f"{candidate}: no metrics")
    raise Unavailable("; ".join(reasons))


def _urls(subject: Subject) -> Iterator[str]:
    """Yield where the server may have its metrics."""
    config = subject.config
    if config is not None and config.server.http and config.server.http_port:
        scheme = "http" if config.tls.certificate is None else "https"
        yield _url(scheme, config.server.host, config.server.http_port)
        return
    inodes = {inode for holder in subject.holders for inode in subject.facts.sockets(holder)}
    own = [listener for listener in listeners(subject) if listener.inode in inodes]
    for scheme in ("http", "https"):
        for listener in own:
            yield _url(scheme, listener.address, listener.port)


def _url(scheme: str, host: str, port: int) -> str:
    host = ANYWHERE.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def _read(url: str, environment: Mapping[str, str]) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError("write http://HOST:PORT/metrics")
    request = urllib.request.Request(url)
    host = parts.hostname or ""
    is_private = parts.scheme == "https" or host == "localhost" or is_loopback(host)
    token_file = environment.get("PETPS_TOKEN_FILE")
    if token_file and is_private:
        request.add_header("Authorization", f"Bearer {read_token(token_file)}")
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=environment.get("PETPS_TLS_CA") or None)
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    with opener.open(request, timeout=REQUEST_SECONDS) as answer:
        content: bytes = answer.read(BYTES_MAX)
    return content.decode("utf-8", "replace")
