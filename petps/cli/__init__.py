"""Room cli: the `petps` command.

Owns:        the commands' arguments and their output on a terminal, files of rows (sources/), exit
             codes.
Never does:  decide anything that another room decides; import slow packages before they are needed.
Called by:   the `petps` script.
"""

from petps.cli.app import app, main

__all__ = ["app", "main"]
