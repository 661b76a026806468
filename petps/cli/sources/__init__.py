"""Files of rows, read in chunks: memory stays bounded whatever a file's size.

A source gives keys (uint64[n]) and rows (float32[n, dim]) in the order of the file. Kinds: .npz, a
pair of .npy, Parquet, Arrow IPC (file or stream), a folder as HPS writes it (``key`` and
``emb_vector``) and a petps base.
"""

from petps.cli.sources.base import Source
from petps.cli.sources.find import Columns, open_sources

__all__ = ["Columns", "Source", "open_sources"]
