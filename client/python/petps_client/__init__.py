"""A client that pulls embedding rows from petps servers into numpy arrays, and pushes rows.

>>> import petps_client
>>> with petps_client.connect("petps://h1:7070,h2:7070/ranking") as client:  # doctest: +SKIP
...     rows = client.pull("users", [17, 4711])  # float32[2, dim]
"""

from petps_client._native import __version__
from petps_client.client import Answer, Client, ManyAnswer, PushReport, Table, connect
from petps_client.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    IoError,
    NotFound,
    PermissionDenied,
    PetpsError,
    ResourceExhausted,
    Stale,
    Unavailable,
    Unimplemented,
    WrongShard,
)
from petps_client.puller import Pulled, Puller

__all__ = [
    "AlreadyExists",
    "Answer",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
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
    "Unavailable",
    "Unimplemented",
    "WrongShard",
    "__version__",
    "connect",
]
