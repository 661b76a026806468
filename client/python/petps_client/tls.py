"""Options of TLS connections, and their defaults from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from petps_client.errors import InvalidArgument

__all__ = ["Tls"]

_SCHEME = "petps+tls://"


@dataclass(frozen=True)
class Tls:
    """How connections of a ``petps+tls://`` URL prove who is at their ends.

    The first three are paths of PEM files. Files that change are read again for the next
    connection.
    """

    ca: str | os.PathLike[str] = ""
    """The authorities of the servers; "": those of the system."""
    certificate: str | os.PathLike[str] = ""
    """This client's certificate, with the intermediate ones; "": none."""
    key: str | os.PathLike[str] = ""
    """The key of ``certificate``."""
    server_name: str = ""
    """The DNS name or IP address that the servers' certificates must have; "": the address's."""


def tls_options(url: str, tls: Tls | None) -> dict[str, str]:
    """Return the arguments of the native client for ``tls``; None: those of the environment.

    Raises:
        InvalidArgument: ``tls`` is no :class:`Tls`.
    """
    if tls is None:
        # A program with one environment may also have servers without TLS.
        variables = os.environ if url.startswith(_SCHEME) else {}
        tls = Tls(
            ca=variables.get("PETPS_TLS_CA", ""),
            certificate=variables.get("PETPS_TLS_CERTIFICATE", ""),
            key=variables.get("PETPS_TLS_KEY", ""),
            server_name=variables.get("PETPS_TLS_SERVER_NAME", ""),
        )
    if not isinstance(tls, Tls):
        raise InvalidArgument(f"tls must be a petps_client.Tls or None, got {tls!r}")
    return {
        "tls_ca": os.fspath(tls.ca),
        "tls_certificate": os.fspath(tls.certificate),
        "tls_key": os.fspath(tls.key),
        "tls_server_name": tls.server_name,
    }
