"""Labels for profiles, at no cost where no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


def label(text: str, *values: object) -> AbstractContextManager[object]:
    """A block that a running `torch.profiler` shows as `text.format(*values)`, with the kernels launched in it."""
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"cp_dtensor: {text.format(*values)}")
