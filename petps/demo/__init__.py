"""Room demo: `petps demo`, the whole loop on real accesses; training/: `petps demo --train`.

Owns:        the trace, the model, the trainer process, the client's traffic, the kill, the
             comparison, and what all that looks like. Beside it samples (ratings.py) and a small
             DLRM (dlrm.py) for whoever trains with PyTorch. training/ has a front door of its own,
             and uses this room's children, traffic, comparison and screen.
Never does:  anything that petps does: it uses the server, the log, the publisher and the client as
             any user would.
Called by:   cli; ratings.py and dlrm.py by bench and training/.
Invariants:  nothing learns from or predicts with an access that has not happened; exit status 0
             means that every key of the trace was pulled and compared, and none was wrong; children
             are ended by process id, whatever happens.
"""

from __future__ import annotations

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Runs `petps demo ARGUMENTS`; the exit status. Raises PetpsError and KeyboardInterrupt."""
    from petps.demo.command import main as run

    return run(arguments)
