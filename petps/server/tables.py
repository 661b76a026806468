"""Comparison of the configuration's tables with those of the pool."""

from __future__ import annotations

from collections.abc import Iterator

from petps import _native
from petps.config import Config
from petps.config.duration import duration_text
from petps.errors import NotFound
from petps.log import WARNING, Line

__all__ = ["ignored_tables"]


def ignored_tables(config: Config, tables: _native.Tables) -> Iterator[str]:
    """Yield a line for each table whose configuration differs from the pool's, which counts."""
    try:
        instance = tables.resolve(config.model.name).id
    except NotFound:
        return  # a model of another name is served
    records = {t.name: t.record for t in tables.tables() if t.record.instance == instance}
    for name, table in config.tables.items():
        record = records.get(name)
        if record is None:
            text = (
                f"WARNING: the pool has no table '{name}' of the configuration; add it with "
                "`petps create --add`"
            )
            yield Line(text, "table_missing", WARNING, table=name)
            continue
        expiry = record.expire_after
        if expiry != table.expire_after_seconds():
            text = (
                f"WARNING: [tables.{name}] expire_after = '{table.expire_after}' is ignored: the "
                f"pool's table has '{duration_text(expiry)}'; change it with `petps table expire`"
            )
            yield Line(text, "setting_ignored", WARNING, table=name, key="expire_after")
        for key in ("dim", "dtype", "capacity", "feed"):
            given, stored = getattr(table, key), getattr(record, key)
            has_grown = key == "capacity" and table.grow == "auto" and stored > given
            if given != stored and not has_grown:
                text = (
                    f"WARNING: [tables.{name}] {key} = {given} is ignored: the pool's table has "
                    f"{stored}, and keeps it"
                )
                yield Line(text, "setting_ignored", WARNING, table=name, key=key)
