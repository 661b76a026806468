"""The directory log (FORMAT.md): the embedded default, and what tests and the demo run on.

Owns:        log.json, one folder of append-only segments a partition, its lock, its reading.
Never does:  look into a message; need a process of its own; lose what flush() returned for.
Called by:   publish and ingest through the contract in petps/delta/log.py.
"""

from petps.delta.directory.log import DirectoryLog, DirectorySubscription

__all__ = ["DirectoryLog", "DirectorySubscription"]
