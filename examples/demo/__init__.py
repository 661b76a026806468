"""The demos: the whole loop on real accesses, and (training/) the same with a trainer.

Owns:        the trace, the model, the trainer process, the client's traffic, the kill, the
             comparison, and their display; also samples (ratings.py) and a small DLRM (dlrm.py)
             for code that trains with PyTorch. training/ is a room of its own that uses this
             room's child processes, traffic, comparison and screen.
Never does:  anything that petps does: it uses the server, the log, the publisher and the client
             as any user would.
Called by:   `make demo` and `make demo-train`; bench calls trace.py, ratings.py and dlrm.py.
Invariants:  no code learns from or predicts with an access that has not happened yet; exit status
             0 says that every key of the trace was pulled and compared, and none was wrong; child
             processes are ended by process id, whatever happens.
"""
