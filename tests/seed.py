"""The seed of a test run: PETPS_SEED, or drawn; pytest's header says it, so that a failure can be
repeated. tests/seed.h is the same for C++.
"""

from __future__ import annotations

import os
import secrets
from typing import Final

# In the environment, so that all processes of a run have one.
SEED: Final = int(os.environ.setdefault("PETPS_SEED", str(secrets.randbits(32))))
