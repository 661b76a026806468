"""Room demo: `petps demo`, the whole loop on real accesses; training/: `petps demo --train`.

Owns:        the trace, the model, the trainer process, the client's traffic, the kill, the
             comparison, and their display; also samples (ratings.py) and a small DLRM (dlrm.py)
             for code that trains with PyTorch. training/ is a room of its own that uses this
             room's child processes, traffic, comparison and screen.
Never does:  anything that petps does: it uses the server, the log, the publisher and the client
             as any user would.
Called by:   cli; bench and training/ call ratings.py and dlrm.py.
Invariants:  no code learns from or predicts with an access that has not happened yet; exit status
             0 says that every key of the trace was pulled and compared, and none was wrong; child
             processes are ended by process id, whatever happens.
"""

from __future__ import annotations

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run `petps demo ARGUMENTS`. Return the exit status; raise PetpsError or KeyboardInterrupt."""
    from petps.demo.command import main as run

    return run(arguments)
