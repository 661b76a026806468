"""Agreement of ranks: bytes that each rank gives to all, and failures that all of them learn.

Owns:        gather_bytes(), fail_together(), meet(), Failure.
Never does:  know rows, stores or logs.
Called by:   ranks.py.
Invariants:  a rank that fails still meets the others, so that none waits for it; all ranks learn
             the same failure.
Threads:     one for each link.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from petps.errors import DeadlineExceeded, IoError, ResourceExhausted, Unavailable
from petps.train.link import Link
from petps.train.pytorch import torch_module

__all__ = ["Failure", "describe", "fail_together", "gather_bytes", "meet"]

# Errors of a disk, a network or another process: the same call may succeed later.
PASSING: Final = (IoError, ResourceExhausted, DeadlineExceeded, Unavailable, OSError)


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


def meet(
    link: Link, failure: Failure | None, facts: dict[str, Any] | None = None
) -> tuple[Failure | None, list[dict[str, Any]]]:
    """Tell all ranks whether this one failed; return one failure, and the facts of each rank.

    The failure is the same on all ranks: the first final one, or else the first one.
    """
    own = None if failure is None else asdict(failure)
    body = json.dumps({"failure": own, "facts": facts or {}}).encode()
    answers = [json.loads(answer) for answer in gather_bytes(link, body)]
    failures = [
        Failure(f"rank {rank}: {answer['failure']['text']}", answer["failure"]["is_final"])
        for rank, answer in enumerate(answers)
        if answer["failure"]
    ]
    final = [failure for failure in failures if failure.is_final]
    return next(iter(final + failures), None), [answer["facts"] for answer in answers]


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
    """Return the bytes of every rank, in the order of ranks, to every rank."""
    if link.world == 1:  # also without PyTorch
        return [body]
    torch = torch_module()
    lengths = [int(length) for length in link.all_gather(torch.tensor([len(body)]))]
    padded = np.zeros(max(1, *lengths), np.uint8)
    padded[: len(body)] = np.frombuffer(body, np.uint8)
    bodies = link.all_gather(torch.from_numpy(padded))
    return [values.numpy().tobytes()[:n] for values, n in zip(bodies, lengths, strict=True)]
