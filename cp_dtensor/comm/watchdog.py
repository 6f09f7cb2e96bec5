"""Deadlines of waits in symmetric memory, which no watchdog of torch sees.

A thread of the process reads the words of host memory that tell whether a stream waits (`WaitStatus`). That needs no
CUDA call, so it does not disturb the capture of a graph. When a wait takes longer than the timeout of its process
group, the thread reports the wait and then sets the flags itself, also those of later waits, so that the streams go on
and the process can raise an error or end. If they do not go on, it aborts the process, as the watchdog of NCCL does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from weakref import WeakSet

from cp_dtensor.comm.flags import Flag, WaitStatus

_log = logging.getLogger("cp_dtensor.comm")

RECOVERY_SECONDS = 8.0
"""Time in which the streams have to go on after the thread has set the flags."""
_MOST_SECONDS, _LOOKS = 1.0, 20
"""Longest time between two looks, and the number of looks until a deadline."""
_SECONDS_AFTER_FAILURE = 0.02


class WatchedWaits(ABC):
    """Waits of streams that have the same status and the same deadline."""

    def __init__(self, status: WaitStatus, seconds: float) -> None:
        self._status, self._seconds = status, seconds
        self._since, self._seen, self._failed = time.monotonic(), status.progress(), False

    @abstractmethod
    def fail(self, flags: dict[Flag, int], seconds: float) -> None:
        """Report that the streams have waited so long for these flags to have these values."""

    @abstractmethod
    def release(self) -> None:
        """Submit operations that set flags as the streams await them, without waiting for the device."""

    def look(self) -> float:
        """Act if a wait is over its deadline; return the seconds until the next look."""
        now, progress, waiting = time.monotonic(), self._status.progress(), self._status.waiting()
        if not waiting or progress != self._seen:
            self._since, self._seen = now, progress
        elif not self._failed and now - self._since > self._seconds:
            self._failed = True
            self.fail(waiting, now - self._since)
            self._since = now
        if not self._failed:
            return min(_MOST_SECONDS, self._seconds / _LOOKS)
        if waiting:
            if now - self._since > RECOVERY_SECONDS:
                _abort("the streams that wait in symmetric memory do not go on")
            self.release()
        return _SECONDS_AFTER_FAILURE


class _Watchdog:
    """The thread, and what it watches."""

    def __init__(self) -> None:
        self._lock, self._thread, self._added = threading.Lock(), threading.Thread(), threading.Event()
        self._watched: WeakSet[WatchedWaits] = WeakSet()

    def watch(self, waits: WatchedWaits) -> None:
        """Watch these waits for as long as the caller holds them."""
        with self._lock:
            self._watched.add(waits)
            if not self._thread.is_alive():  # a forked process does not have the thread of its parent
                self._thread = threading.Thread(target=self._look_on, name="cp_dtensor-watchdog", daemon=True)
                self._thread.start()
        self._added.set()

    def _look_on(self) -> None:
        while True:
            with self._lock:
                watched = list(self._watched)
            try:
                delay = min((waits.look() for waits in watched), default=_MOST_SECONDS)
            except Exception:
                _log.exception("the watchdog of symmetric memory failed")
                _abort("waits in symmetric memory are not watched any more")
            watched.clear()
            self._added.wait(delay)
            self._added.clear()


watch = _Watchdog().watch


def _abort(reason: str) -> None:
    _log.critical("%s: the process is aborted", reason)
    sys.stdout.flush()
    sys.stderr.flush()
    os.abort()
