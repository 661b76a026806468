"""A process that writes a directory log until it is killed.

Message number n of partition p is number p + n * P of all messages. Arguments: folder, first number
of each partition, messages per flush. After each flush the process prints the next number of each
partition; all messages before it are durable.
"""

from __future__ import annotations

import sys
from pathlib import Path

from petps.delta import Message
from petps.delta.directory import DirectoryLog

P = 2


def body_of(number: int) -> bytes:
    """Return a body. Sizes differ widely, so that a kill hits all parts of a frame."""
    return number.to_bytes(8, "little") * (1 + number * 7919 % 4000)


def main() -> None:
    log = DirectoryLog(Path(sys.argv[1]), partitions=P, segment_bytes=256 << 10)
    numbers = [int(text) for text in sys.argv[2 : 2 + P]]
    group = int(sys.argv[2 + P])
    print("open", flush=True)
    while True:
        for _ in range(group):
            for partition in range(P):
                number = partition + numbers[partition] * P
                log.publish(partition, Message([("n", str(number).encode())], body_of(number)))
                numbers[partition] += 1
        log.flush()
        print(*numbers, flush=True)


if __name__ == "__main__":
    main()
