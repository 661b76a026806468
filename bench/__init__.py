"""Benchmarks. A run measures each figure together with the limit that it is compared to."""
