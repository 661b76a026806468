"""A client that pulls embedding rows from petps servers into numpy arrays, and pushes rows.

>>> import petps_client
>>> with petps_client.connect("petps://h1:7070,h2:7070/ranking") as client:  # doctest: +SKIP
...     rows = client.pull("users", [17, 4711])  # float32[2, dim]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from petps_client.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InUse,
    InvalidArgument,
    IoError,
    NotFound,
    PermissionDenied,
    PetpsError,
    ResourceExhausted,
    Stale,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    WrongShard,
)

if TYPE_CHECKING:
    from petps_client._native import __version__ as __version__
    from petps_client.client import Answer as Answer
    from petps_client.client import Client as Client
    from petps_client.client import ManyAnswer as ManyAnswer
    from petps_client.client import PushReport as PushReport
    from petps_client.client import Table as Table
    from petps_client.client import connect as connect
    from petps_client.puller import Pulled as Pulled
    from petps_client.puller import Puller as Puller
    from petps_client.tls import Tls as Tls

__all__ = [
    "AlreadyExists",
    "Answer",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InUse",
    "InternalError",
    "InvalidArgument",
    "IoError",
    "ManyAnswer",
    "NotFound",
    "PermissionDenied",
    "PetpsError",
    "Pulled",
    "Puller",
    "PushReport",
    "ResourceExhausted",
    "Stale",
    "Table",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "WrongShard",
    "__version__",
    "connect",
]

# Imported at first use: petps.errors imports this package, and `petps --help` must not load numpy.
_MODULES = {
    "__version__": "_native",
    "Answer": "client",
    "Client": "client",
    "ManyAnswer": "client",
    "Pulled": "puller",
    "Puller": "puller",
    "PushReport": "client",
    "Table": "client",
    "Tls": "tls",
    "connect": "client",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'petps_client' has no attribute {name!r}")
    return getattr(importlib.import_module(f"petps_client.{_MODULES[name]}"), name)
