"""Hints on torch's own errors that are raised inside of a context."""

from __future__ import annotations

import re
import traceback

from cp_dtensor.engine.contexts import OpenContext

_SHAPES = re.compile(r"must match|invalid for input of size|cannot be multiplied|[Ee]xpected|out of bounds|mismatch")


def add_hint(error: BaseException, context: OpenContext) -> None:
    """Add a hint to torch's error about shapes if it names the local and the whole length of buffers.

    Errors of reshapes name the whole length only. The hint is a note (Python 3.11), or in Python 3.10 the last line of
    the message.
    """
    text = str(error)
    if not isinstance(error, (RuntimeError, IndexError, ValueError)) or not _SHAPES.search(text) or _is_ours(error):
        return
    numbers, shards = {*map(int, re.findall(r"\d+", text))}, []
    for index, shard in enumerate(context.buffers):
        local, whole = shard.buffer.tensor.size(shard.buffer.dim), shard.whole_shape[shard.buffer.dim]
        if local != whole and whole in numbers and (local in numbers or "invalid for input of size" in text):
            shards.append(f"buffer {index} is a shard of length {local} of {whole}")
    if not shards:
        return
    hint = (
        f"In this context_parallel {', '.join(shards)}. Was a tensor of the whole length made before the context was "
        "entered? List it in buffers (the very object, no copy), or shard it by context_parallel_shard"
    )
    if hasattr(error, "add_note"):
        if hint not in getattr(error, "__notes__", ()):  # nested contexts
            error.add_note(hint)
    elif error.args and hint not in text:
        error.args = (f"{error.args[0]}\n{hint}", *error.args[1:])


def _is_ours(error: BaseException) -> bool:
    """Return whether this package has raised the error, or called the function that did."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__", "")).startswith("cp_dtensor.")
