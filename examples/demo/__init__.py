"""The demos: train, publish, serve, kill and compare, on real accesses; training/ with PyTorch.

Owns:        the trace, the model, the trainer process, the client's traffic, the kill, the
             comparison, and their display; also samples (ratings.py) and a small DLRM (dlrm.py)
             for code that trains with PyTorch. training/ is a room of its own that uses this
             room's child processes, traffic, comparison and screen.
Never does:  anything that petps does: it uses the server, the log, the publisher and the client
             as any user would.
Called by:   `make demo` and `make demo-train`; bench calls trace.py, ratings.py and dlrm.py.
Invariants:  No code learns from an access, or predicts with it, before it happens. Exit status 0
             means that the demo pulled and compared every key of the trace, and none was wrong.
             The demo always terminates its child processes, by process id.
"""
