"""Plans which member of a cluster owns which partitions, and moves them through etcd.

Owns:        the planner: fair shares (shares.py), the search (assign.py, exact.py), the order and
             the pace of moves (order.py). The records in etcd (records.py, maps.py), the client of
             etcd (etcd.py), the next step (steps.py), and the elected controller (controller.py).
Never does:  read a file, or speak to a server. The planner and steps.py use no clock, no chance and
             no network: their results are functions of their arguments.
Called by:   `petps cluster`, `petps controller`; server/cluster uses the records and the client.
Invariants:  No move takes a live replica of a partition before it has added another one, unless the
             partition has more replicas than wanted. A push-fed partition never leaves an owner
             that is away, and leaves another one only with its acknowledgement. CONTROLLER.md has
             those of a move in its phases.
Threads:     no state, but for a Controller, which one thread uses, and an Etcd, which any may use.
"""

from petps.cluster.model import Member, Model, Move, Owners, Plan
from petps.cluster.plan import REPLACE_AFTER_SECONDS, make_plan

__all__ = ["REPLACE_AFTER_SECONDS", "Member", "Model", "Move", "Owners", "Plan", "make_plan"]
