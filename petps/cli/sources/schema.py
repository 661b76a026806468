"""The schema of a table that has no pool yet, from the files of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from petps.cli.sources.base import Source
from petps.delta import TableSchema
from petps.errors import InvalidArgument

__all__ = ["schema_of"]


def schema_of(table: str, dtype: str, dim: int | None, sources: Sequence[Source]) -> TableSchema:
    """Return the schema; dim: None takes that of the files. Raises InvalidArgument."""
    if dim is None:
        dims = {source.dim for source in sources if source.dim is not None}
        if not dims:
            raise InvalidArgument("the files do not state the table's dim; name it with --dim")
        if len(dims) > 1:
            raise InvalidArgument(
                f"the files have rows of dim {', '.join(map(str, sorted(dims)))}; all must be equal"
            )
        dim = dims.pop()
    for source in sources:
        if source.dim not in (None, dim):
            raise InvalidArgument(f"{source.name} has rows of dim {source.dim}, expected {dim}")
    return TableSchema(table, dtype, dim)
