"""Room config: the keys of the TOML configuration file, with their meanings and defaults.

Owns:        the schema, its checks, and the document of its keys (deploy/config/KEYS.md).
Never does:  open pools or ports; read the environment; guess an unknown key.
Called by:   cli and server.
"""

from petps.config.changes import changes
from petps.config.load import load, merge, parse
from petps.config.reference import Key, keys, keys_markdown
from petps.config.schema import (
    AccessConfig,
    Config,
    IngestConfig,
    LimitsConfig,
    ModelConfig,
    PoolConfig,
    ServerConfig,
    TableConfig,
    TlsConfig,
)
from petps.config.secret import hide_password, hide_secrets

__all__ = [
    "AccessConfig",
    "Config",
    "IngestConfig",
    "Key",
    "LimitsConfig",
    "ModelConfig",
    "PoolConfig",
    "ServerConfig",
    "TableConfig",
    "TlsConfig",
    "changes",
    "hide_password",
    "hide_secrets",
    "keys",
    "keys_markdown",
    "load",
    "merge",
    "parse",
]
