"""How many partitions each member should own: its fair share, and the bounds around it.

A zone holds at most one replica of a partition if there are enough zones, so a zone with more than
its part of the weight cannot own more than every partition once. What it cannot take is divided
over the others by their weights: water-filling, first over the zones, then over the members of each
zone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

__all__ = ["TOLERANCE", "bounds_of", "fair_shares", "imbalance", "zone_limit"]

TOLERANCE: Final = 0.05  # a member may own this part of its share more or less than its share
_ROUNDING: Final = 1e-6
_HALVINGS: Final = 100


def zone_limit(replicas: int, members_of_zones: Sequence[int]) -> int:
    """Return how many replicas of one partition a zone must be able to hold; usually 1."""
    most = max(members_of_zones, default=1)
    for limit in range(1, most):
        if sum(min(limit, members) for members in members_of_zones) >= replicas:
            return limit
    return most


def fair_shares(
    demands: Counter[int], zones: Sequence[Sequence[int]], weights: Sequence[float]
) -> list[float]:
    """Return the share of each member, in partitions.

    demands: how many partitions need a given number of replicas. zones: the members of each zone.
    The number of replicas is at most the number of members.
    """
    zone_weights = [sum(weights[member] for member in members) for members in zones]
    quotas = [0.0] * len(zones)
    # Those with the most replicas leave the least choice, so they come first.
    for replicas in sorted(demands, reverse=True):
        count = demands[replicas]
        limit = zone_limit(replicas, [len(members) for members in zones])
        caps = [count * min(limit, replicas, len(members)) for members in zones]
        added = _fill(zone_weights, caps, quotas, replicas * count)
        quotas = [quota + more for quota, more in zip(quotas, added, strict=True)]
    shares = [0.0] * len(weights)
    partitions = sum(demands.values())
    for members, quota in zip(zones, quotas, strict=True):
        part = [weights[member] for member in members]
        filled = _fill(part, [partitions] * len(part), [0.0] * len(part), quota)
        for member, share in zip(members, filled, strict=True):
            shares[member] = share
    return shares


def _fill(
    weights: Sequence[float], caps: Sequence[float], bases: Sequence[float], total: float
) -> list[float]:
    """Divide ``total``: amounts of at most ``caps``, and with the bases in proportion to weights.

    Where the caps or the bases do not allow the proportion, come as close to it as they do.
    """
    if sum(caps) <= total:
        return [float(cap) for cap in caps]

    def amounts(level: float) -> list[float]:
        return [
            min(max(level * weight - base, 0.0), cap)
            for weight, cap, base in zip(weights, caps, bases, strict=True)
        ]

    low, high = 0.0, 1.0
    while sum(amounts(high)) < total:
        high *= 2.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(amounts(middle)) < total:
            low = middle
        else:
            high = middle
    return amounts(high)


def bounds_of(share: float) -> tuple[int, int]:
    """Return how many partitions a member may own: its share, 5 % more or less, or rounded."""
    low = min(math.floor(share + _ROUNDING), math.ceil(share * (1 - TOLERANCE) - _ROUNDING))
    high = max(math.ceil(share - _ROUNDING), math.floor(share * (1 + TOLERANCE) + _ROUNDING))
    return low, high


def imbalance(loads: Sequence[int], shares: Sequence[float]) -> float:
    """Return the largest distance of a load from its share, as a part of the share."""
    return max(
        (
            abs(load / share - 1.0) if share > _ROUNDING else float(load)
            for load, share in zip(loads, shares, strict=True)
        ),
        default=0.0,
    )
