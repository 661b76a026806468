"""Room tracker: which rows a trainer touched. For now: distinct ids of many tables (unique.py)."""

from petps.tracker.unique import JaggedUnique, jagged_unique

__all__ = ["JaggedUnique", "jagged_unique"]
