"""Files of rows. They are read in chunks, so memory stays bounded whatever a file's size.

A source yields keys (uint64[n]) and rows (float32[n, dim]) in the order of the file. A source is a
.npz, a pair of .npy, Parquet, Arrow IPC (file or stream), a folder as HPS writes it (``key`` and
``emb_vector``), a petps base or a petps checkpoint store.
"""

from petps.cli.sources.base import Source, total_rows
from petps.cli.sources.find import Columns, open_sources

__all__ = ["Columns", "Source", "open_sources", "total_rows"]
