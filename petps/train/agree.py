"""Agreement of ranks: bytes that each rank gives to all, and failures that all of them learn.

Owns:        gather_bytes(), gather_array(), follow_first(), fail_together(), meet(), Failure.
Never does:  know rows, stores or logs.
Called by:   ranks.py, behind.py, runs.py, stores.py, write_back.py.
Invariants:  a rank that fails still meets the others, so that none waits for it; all ranks learn
             the same failure. A message is at most MESSAGE_BYTES_MAX long, and of known fields
             (message.py), or all ranks raise.
Threads:     one for each link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps.errors import DeadlineExceeded, IoError, ResourceExhausted, Unavailable
from petps.train.link import Link
from petps.train.message import (
    Fields,
    decode,
    dict_of,
    encode,
    object_of,
    or_none,
    read_bool,
    read_int,
    read_table_map,
    read_text,
    refuse,
)
from petps.train.pytorch import torch_module

__all__ = [
    "Failure",
    "describe",
    "fail_together",
    "follow_first",
    "gather_array",
    "gather_bytes",
    "meet",
]

# Errors of a disk, a network or another process: the same call may succeed later.
PASSING: Final = (IoError, ResourceExhausted, DeadlineExceeded, Unavailable, OSError)
# A rank allocates what a peer's length says. The longest message describes all columns of all
# tables, some hundred bytes for each.
MESSAGE_BYTES_MAX: Final = 16 << 20
FAILURE_CHARS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a rank. is_final: the same would fail again."""

    text: str
    is_final: bool

    @staticmethod
    def of(error: BaseException | None, *, is_final: bool = False) -> Failure | None:
        """Return the failure that an error is; None for None. is_final: it is, whatever it is."""
        if error is None:
            return None
        return Failure(describe(error), is_final or not isinstance(error, PASSING))


def describe(error: BaseException | None) -> str:
    """Return an error as text, or an empty string for None."""
    return "" if error is None else f"{type(error).__name__}: {error}"


_FAILURE: Final = or_none(object_of({"text": read_text, "is_final": read_bool}))
# What ranks tell each other of a version besides a failure.
_FACTS: Final[Fields] = {
    "tables": read_table_map,  # as which a base is written
    "counted": dict_of(read_int),  # the rows in the log by table
    "dense": read_text,  # the location of the dense part
    "open": read_bool,  # whether the version may still appear
    "written": or_none(read_int),  # created_ns of the share
    "time_ns": read_int,  # when this rank's rows were in the log
}


def meet(
    link: Link, failure: Failure | None, facts: Mapping[str, Any] | None = None
) -> tuple[Failure | None, list[dict[str, Any]]]:
    """Tell all ranks whether this one failed; return one failure, and the facts of each rank.

    The failure is the same on all ranks: the first final one, or else the first one. facts: some of
    _FACTS. Raises FailedPrecondition if a message cannot be read.
    """
    own = None if failure is None else asdict(failure)
    if own is not None:
        own["text"] = own["text"][:FAILURE_CHARS_MAX]
    bodies = gather_bytes(link, encode({**(facts or {}), "failure": own}))
    answers = [
        decode(body, rank, {"failure": _FAILURE}, optional=_FACTS)
        for rank, body in enumerate(bodies)
    ]
    failures = [
        Failure(f"rank {rank}: {own['text']}", own["is_final"])
        for rank, answer in enumerate(answers)
        if (own := answer.pop("failure"))
    ]
    final = [failure for failure in failures if failure.is_final]
    return next(iter(final + failures), None), answers


def follow_first(link: Link, values: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Return the values of rank 0; those of other ranks are ignored."""
    return decode(gather_bytes(link, encode(values))[0], 0, fields)


@contextmanager
def fail_together(link: Link, consequence: str) -> Iterator[None]:
    """If the block raises on any rank, raise on every rank on leaving it."""
    try:
        yield
    except BaseException as error:
        meet(link, Failure.of(error))
        raise
    failure, _ = meet(link, None)
    if failure is not None:
        raise Unavailable(f"{consequence}: {failure.text}")


def gather_bytes(link: Link, body: bytes) -> list[bytes]:
    """Return the bytes of every rank, in the order of ranks, to every rank.

    If those of a rank are longer than MESSAGE_BYTES_MAX, all ranks raise FailedPrecondition.
    """
    if link.world == 1:  # also without PyTorch
        return [body]
    torch = torch_module()
    lengths = [int(length) for length in link.all_gather(torch.tensor([len(body)]))]
    for rank, length in enumerate(lengths):
        if not 0 <= length <= MESSAGE_BYTES_MAX:
            raise refuse(rank, f"it has {length} bytes; at most {MESSAGE_BYTES_MAX}")
    padded = np.zeros(max(1, *lengths), np.uint8)
    padded[: len(body)] = np.frombuffer(body, np.uint8)
    bodies = link.all_gather(torch.from_numpy(padded))
    return [values.numpy().tobytes()[:n] for values, n in zip(bodies, lengths, strict=True)]


def gather_array(link: Link, values: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Return the arrays of all ranks, which have one shape.

    Each crosses with its dtype and shape, as text before the first zero byte. If those of a rank
    differ from this one's, raise FailedPrecondition.
    """
    header = f"{values.dtype.str}{list(values.shape)}".encode() + b"\0"
    arrays = []
    for rank, body in enumerate(gather_bytes(link, header + values.tobytes())):
        if not body.startswith(header) or len(body) != len(header) + values.nbytes:
            text = bytes(body.partition(b"\0")[0][:100]).decode(errors="replace")
            raise refuse(rank, f"expected an array {header[:-1].decode()}, got {text!r}")
        arrays.append(np.frombuffer(body[len(header) :], values.dtype).reshape(values.shape))
    return arrays
