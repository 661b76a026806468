"""Room config: the keys of the TOML configuration file, with their meanings and defaults.

Owns:        the schema, its checks, and the document of its keys (deploy/config/KEYS.md).
Never does:  open pools or ports; read the environment; guess an unknown key.
Called by:   cli and server.
"""

from petps.config.changes import changes
from petps.config.load import load, merge, parse
from petps.config.reference import Key, keys, keys_markdown
from petps.config.schema import (
    Config,
    IngestConfig,
    LimitsConfig,
    ModelConfig,
    PoolConfig,
    ServerConfig,
    TableConfig,
)

__all__ = [
    "Config",
    "IngestConfig",
    "Key",
    "LimitsConfig",
    "ModelConfig",
    "PoolConfig",
    "ServerConfig",
    "TableConfig",
    "changes",
    "keys",
    "keys_markdown",
    "load",
    "merge",
    "parse",
]
