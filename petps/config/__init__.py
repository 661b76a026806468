"""Room config: the keys of the TOML configuration file, with their meanings and defaults.

Owns:        the schema, its checks, the names of its variables (environment.py), and the document
             of its keys (deploy/config/KEYS.md).
Never does:  open pools or ports; guess an unknown key; read a variable of a process by itself.
Called by:   cli and server.
"""

from petps.config.changes import Change, changes, replaced
from petps.config.load import COMMAND_LINE, Settings, load, merge, parse, read_settings
from petps.config.reference import Key, keys, keys_markdown
from petps.config.schema import (
    AccessConfig,
    ClusterConfig,
    Config,
    IngestConfig,
    LimitsConfig,
    LogConfig,
    ModelConfig,
    OtelConfig,
    PoolConfig,
    RouterConfig,
    ServerConfig,
    TableConfig,
    TlsConfig,
)
from petps.config.secret import hide_password, hide_secrets
from petps.config.variable import variable_of

__all__ = [
    "COMMAND_LINE",
    "AccessConfig",
    "Change",
    "ClusterConfig",
    "Config",
    "IngestConfig",
    "Key",
    "LimitsConfig",
    "LogConfig",
    "ModelConfig",
    "OtelConfig",
    "PoolConfig",
    "RouterConfig",
    "ServerConfig",
    "Settings",
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
    "read_settings",
    "replaced",
    "variable_of",
]
