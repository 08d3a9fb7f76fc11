"""The package's logger: short lines on stderr; the level is `TPENGINE_LOG_LEVEL`."""

from __future__ import annotations

import logging

from tpengine import envs

_FORMAT = "%(levelname)s %(asctime)s %(name)s] %(message)s"


def init_logger(name: str) -> logging.Logger:
    """Returns the logger `name`; the first call installs the handler of the package."""
    root = logging.getLogger("tpengine")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%m-%d %H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(envs.log_level())
        root.propagate = False
    return logging.getLogger(name)
