"""Room server/cluster: a server's part of a cluster that etcd holds together.

Owns:        the server's records in etcd (membership.py), its lease (lease.py), the map that it
             follows and the copy of it beside the pool (map.py), the removal of partitions
             (removal.py), and the copies of push-fed partitions that move (handover.py).
Never does:  delay a request, or change what is served because etcd is slow, away or wrong; decide
             which partitions the server has; remove a partition that the map in use names.
Called by:   lifecycle.
Invariants:  A map is reported as used after it is in use and on the disk. A partition's progress is
             gone before the first of its rows is.
             A promise to take no more pushes is on the disk before it is in etcd.
Threads:     one speaks to etcd, one keeps the lease alive, one removes rows, and one sends or
             receives each partition that moves with its rows. The server's main thread takes over
             maps.
"""

from petps.server.cluster.map import MapCopy
from petps.server.cluster.membership import ClusterPart, Facts, access_of

__all__ = ["ClusterPart", "Facts", "MapCopy", "access_of"]
