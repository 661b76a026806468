"""Room router: the process of `petps router`, around native/router.

Owns:        its signals, its HTTP port, its metrics, the files of its certificate.
Never does:  touch a request: native/router answers them; decide what a token may do.
Called by:   cli.
"""

from petps.router.process import serve

__all__ = ["serve"]
