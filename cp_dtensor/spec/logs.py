"""Loggers of the rooms, and `CP_DTENSOR_LOGS`, the environment variable that shows them."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from functools import lru_cache

_lock = threading.Lock()
ROOMS = ("plan", "comm", "engine", "attention", "api")


def log_once(room: str, level: int, text: str) -> None:
    """Log a text to `cp_dtensor.<room>`, the first time that it comes. For choices, where plans are made."""
    if is_logged(room, level):
        with _lock:  # threads would both find that the text is new
            _log(room, level, text)


def is_logged(room: str, level: int = logging.INFO) -> bool:
    """Return whether a room's messages of a level are shown anywhere."""
    return logging.getLogger(f"cp_dtensor.{room}").isEnabledFor(level)


@lru_cache(maxsize=1024)
def _log(room: str, level: int, text: str) -> None:
    logging.getLogger(f"cp_dtensor.{room}").log(level, "%s", text)


def show_logs(names: str) -> None:
    """Show messages of level INFO and above on stderr, of rooms joined by commas, or of "all".

    Called at import with `CP_DTENSOR_LOGS`. Python's logging does the same: each room is a logger, `cp_dtensor.engine`.
    """
    rooms = [name.strip() for name in names.split(",") if name.strip()]
    unknown = sorted({*rooms} - {*ROOMS, "all"})
    if unknown:
        warnings.warn(
            f"CP_DTENSOR_LOGS: expected names among {', '.join(ROOMS)} and all, got {', '.join(unknown)}", stacklevel=3
        )
    handler = logging.StreamHandler()
    rank = f"rank {os.environ['RANK']} " if "RANK" in os.environ else ""
    handler.setFormatter(logging.Formatter(f"[{rank}%(name)s] %(message)s"))
    for room in ROOMS if "all" in rooms else {*rooms} & {*ROOMS}:
        logger = logging.getLogger(f"cp_dtensor.{room}")
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False  # or the handlers of the program would show them again
