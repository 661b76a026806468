"""The cost of ingest before it decodes: a reader of a topic at a given rate, without decoding.

python -m bench.ingest.consumer LOG ROWS_PER_SECOND

It has ingest's niceness and polls as many bytes. It prints a line when it begins to read, and runs
until it is killed.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing

from bench.ingest.deltas import SCHEMA
from bench.ingest.kafka import PARTITIONS
from petps import _native
from petps.delta import Delivery, open_log
from petps.server.ingest.ingest import POLL_BYTES, POLL_SECONDS


def main(place: str, rows_per_second: float) -> None:
    """Read from the start of the log on."""
    _native.lower_priority()  # as ingest
    with closing(open_log(place, partitions=PARTITIONS)) as log:
        subscription = log.subscribe(dict.fromkeys(range(PARTITIONS), 0))
        due = 0.0
        while True:
            events = subscription.poll(max_bytes=POLL_BYTES, timeout=POLL_SECONDS)
            if events and not due:
                print("reading", flush=True)
                due = time.monotonic()
            bodies = [len(e.message.body) for e in events if isinstance(e, Delivery)]
            due += sum(bodies) / (SCHEMA.row_bytes + 8) / rows_per_second
            time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
