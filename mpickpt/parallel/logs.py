"""Shows the library's log on stderr where ``MPICKPT_LOG`` asks for it, without code."""

import logging
import os
from functools import cache


@cache
def log_as_asked() -> None:
    """Send the log to stderr at the level of ``MPICKPT_LOG``: debug, info, warning.

    Notes
    -----
    Once a process. Rank 0 speaks for all, so a line comes once.
    """
    name = os.environ.get("MPICKPT_LOG", "").upper()
    if not name:
        return
    level = logging.getLevelNamesMapping().get(name)
    if level is None:
        raise ValueError(f"MPICKPT_LOG is {name!r}; expected debug, info or warning")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    logger = logging.getLogger("mpickpt")
    logger.addHandler(handler)
    logger.setLevel(level)
