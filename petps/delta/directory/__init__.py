"""The directory log (FORMAT.md): the embedded default, which tests and the demo use too.

Owns:        log.json; for each partition a folder of append-only segments, its lock, its reader.
Never does:  read the content of a message; need a process of its own; lose a message after flush()
             has returned.
Called by:   publish and ingest through the contract in petps/delta/log.py.
"""

from petps.delta.directory.log import DirectoryLog, DirectorySubscription

__all__ = ["DirectoryLog", "DirectorySubscription"]
