"""Loading of whole tables by a Ray cluster, into a base that servers restore their part of.

Workers read pieces of the sources and write spills, and then parts of the base (petps.checkpoint.
bulk). The command commits the base once all parts are whole.
"""

from petps.cli.bulk.load import Input, load_base
from petps.cli.bulk.pieces import open_parquet
from petps.cli.bulk.report import Report, TableReport

__all__ = ["Input", "Report", "TableReport", "load_base", "open_parquet"]
