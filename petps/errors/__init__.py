"""The classes of all errors that petps raises: those of package petps_client."""

from petps_client.errors import *  # noqa: F403
from petps_client.errors import __all__ as __all__
