"""A trainer that publishes at a given rate.

python -m bench.ingest.publisher LOG KEYS ROWS_PER_SECOND SECONDS

It prints one line of JSON: the rate that it reached.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing

import numpy as np

from bench.ingest.deltas import MODEL, SCHEMA, TABLE, deltas
from bench.ingest.kafka import PARTITIONS
from petps.delta import open_log
from petps.publish import Publisher

VERSION_ROWS = 10_000


def main(place: str, keys_file: str, rows_per_second: float, seconds: float) -> None:
    """Publish versions of VERSION_ROWS rows, each when it is due."""
    keys = np.load(keys_file)
    with closing(open_log(place, partitions=PARTITIONS)) as log:
        publisher = Publisher(log, MODEL, tables=[SCHEMA])
        publisher.begin_continue(None)
        size = min(VERSION_ROWS, len(keys))
        source = deltas(keys, size)
        next(source)  # the first delta takes longest
        began = time.monotonic()
        rows = 0
        while (now := time.monotonic() - began) < seconds:
            due = rows / rows_per_second
            if due > now:
                time.sleep(due - now)
            publisher.publish(TABLE, *next(source))
            publisher.commit()
            rows += size
        elapsed = time.monotonic() - began
    print(json.dumps({"version": publisher.version, "rows_per_second": rows / elapsed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
