"""Hints on torch's own errors that are raised inside of a context."""

from __future__ import annotations

import re
import traceback

from cp_dtensor.engine.contexts import OpenContext

_SHAPES = re.compile(r"must match|invalid for input of size|cannot be multiplied|[Ee]xpected|out of bounds|mismatch")


def add_hint(error: BaseException, context: OpenContext) -> None:
    """Add a hint to torch's error about shapes if it names lengths of the context's buffers.

    The hint is a note (Python 3.11), or in Python 3.10 the last line of the message.
    """
    if not isinstance(error, (RuntimeError, IndexError, ValueError)) or _is_ours(error):
        return
    hint = hint_on(str(error), context)
    if hint is None:
        return
    if hasattr(error, "add_note"):
        if hint not in getattr(error, "__notes__", ()):  # nested contexts
            error.add_note(hint)
    elif error.args and hint not in str(error):
        error.args = (f"{error.args[0]}\n{hint}", *error.args[1:])


def _is_ours(error: BaseException) -> bool:
    """Return whether this package has raised the error, or called the function that did."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__", "")).startswith("cp_dtensor.")


def hint_on(message: str, context: OpenContext) -> str | None:
    """Return the hint on a message with a shard's and the whole length, or with the whole length of a reshape."""
    if not _SHAPES.search(message):
        return None
    numbers = {*map(int, re.findall(r"\d+", message))}
    by_lengths: dict[tuple[int, int], list[int]] = {}
    for index, shard in enumerate(context.buffers):
        buffer = shard.buffer
        local, whole = buffer.tensor.size(buffer.dim), shard.whole_shape[buffer.dim]
        if local != whole and whole in numbers and (local in numbers or "invalid for input of size" in message):
            by_lengths.setdefault((local, whole), []).append(index)
    if not by_lengths:
        return None
    shards = "; ".join(
        f"{_named(indices)} of length {local} of {whole}" for (local, whole), indices in by_lengths.items()
    )
    (whole, *_) = (whole for _, whole in by_lengths)
    return (
        f"In this context_parallel {shards}. Was a tensor of length {whole} made before the context was entered? "
        "List it in buffers (the very object, no copy), or shard it by context_parallel_shard"
    )


def _named(indices: list[int]) -> str:
    if len(indices) == 1:
        return f"buffer {indices[0]} is a shard"
    return f"buffers {', '.join(map(str, indices[:-1]))} and {indices[-1]} are shards"
