"""Run a module of figures on its own: python -m bench.lines MODULE 'SIZES as JSON'.

It prints each result of the module's figures() as a line of JSON. bench.report runs those modules
that need PyTorch in this way, in the environment of `make test-train`.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # PyTorch warns about sparse tensors, once a process
    for result in importlib.import_module(sys.argv[1]).figures(json.loads(sys.argv[2])):
        print(json.dumps(result), flush=True)
