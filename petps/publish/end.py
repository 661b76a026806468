"""The end of a log, from which a publisher without a saved position may continue."""

from __future__ import annotations

from petps.delta import DeltaLog, read_header
from petps.errors import FailedPrecondition, InvalidArgument
from petps.publish.publisher import Position

__all__ = ["end_of"]


def end_of(log: DeltaLog, model: str) -> Position | None:
    """Return the position for a continue marker at the log's end; None for an empty log.

    Raises:
        FailedPrecondition: The partitions end in different runs, because a publisher died while it
            began one. Only a base can follow.
        InvalidArgument: The log belongs to another model.
    """
    last = log.last_messages(range(log.partitions))
    headers = [read_header(message) for message in last.values()]
    if not headers:
        return None
    other = next((header.model for header in headers if header.model != model), None)
    if other is not None:
        raise InvalidArgument(f"{log.name} belongs to model '{other}', not '{model}'; use --model")
    runs = {header.run for header in headers}
    if len(runs) > 1 or len(headers) < log.partitions:
        raise FailedPrecondition(
            f"{log.name}: its partitions end in different runs, so no run can continue them; "
            "begin again with a base: petps export, then petps publish --base"
        )
    seqs = tuple(header.seq for header in sorted(headers, key=lambda header: header.partition))
    return Position(runs.pop(), seqs, max(header.version for header in headers))
