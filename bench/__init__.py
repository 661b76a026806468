"""Benchmarks: every figure beside the limit that it is compared to, in one run."""
