"""Room checkpoint: the files that a model's rows are kept in. For now: the base (base.py)."""

from petps.checkpoint.base import Base, BaseFolder, BaseWriter

__all__ = ["Base", "BaseFolder", "BaseWriter"]
