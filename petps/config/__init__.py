"""Room config: what a TOML file may say, with every key's meaning and default.

Owns:        the schema, its checks, the table of keys that documentation shows.
Never does:  open pools or ports; read the environment; guess at an unknown key.
Called by:   cli and server.
"""

from petps.config.load import load, merged, parse
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
    "keys",
    "keys_markdown",
    "load",
    "merged",
    "parse",
]
