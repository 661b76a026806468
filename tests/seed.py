"""The seed of a test run: PETPS_SEED, or else a random number.

The header of pytest shows it, so that a failure can be repeated. tests/seed.h is the same for C++.
"""

from __future__ import annotations

import os
import secrets
from typing import Final

# The environment carries it, so that all processes of a run have the same seed.
SEED: Final = int(os.environ.setdefault("PETPS_SEED", str(secrets.randbits(32))))
