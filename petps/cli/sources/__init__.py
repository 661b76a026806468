"""Files of rows, read in chunks, so that memory stays bounded whatever a file's size.

A source yields keys (uint64[n]) and rows (float32[n, dim]) in the order of the file. Kinds: .npz, a
pair of .npy, Parquet, Arrow IPC (file or stream), a folder as HPS writes it (``key`` and
``emb_vector``), a petps base and a petps checkpoint store.
"""

from petps.cli.sources.base import Source
from petps.cli.sources.find import Columns, open_sources

__all__ = ["Columns", "Source", "open_sources"]
