"""Runs one fuzz target in Python: python -m tests.fuzz.drive NAME [options of libFuzzer]."""

from __future__ import annotations

import gc
import importlib
import sys
from types import FunctionType
from typing import Final

# Packages whose branches guide the fuzzer: ours, and what parses for us in Python.
PACKAGES: Final = {"petps", "http", "email", "json", "tomllib"}


def main() -> None:
    """Instrument the packages, then fuzz until an option of libFuzzer says stop."""
    import atheris

    target = importlib.import_module(f"tests.fuzz.{sys.argv[1]}")
    # Not atheris.instrument_imports(): it does not see modules of an editable install.
    for function in gc.get_objects():
        if isinstance(function, FunctionType):
            package = (function.__module__ or "").partition(".")[0]
            if package in PACKAGES:
                atheris.instrument_func(function)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
