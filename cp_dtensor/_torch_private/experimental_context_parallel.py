"""The settings of torch's own context parallel, which live in a module of torch's that is not public."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def experimental_context_parallel_settings(rotate_method: str, *, load_balance: bool) -> Iterator[None]:
    """While open, `torch.distributed.tensor.experimental.context_parallel` moves K/V so, in head-tail order or not."""
    from torch.distributed.tensor.experimental import _attention as torchs  # takes long, and only benchmarks need it

    options = torchs._cp_options
    before = options.rotate_method, options.enable_load_balance
    torchs.set_rotate_method(rotate_method)
    options.enable_load_balance = load_balance
    try:
        yield
    finally:
        options.rotate_method, options.enable_load_balance = before
