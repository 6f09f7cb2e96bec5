"""Stages without a minimum of work, for small problems: of transfers, and of the heads of Ulysses."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock
from weakref import WeakKeyDictionary

from cp_dtensor.comm.collective import Staging
from cp_dtensor.engine import planner
from cp_dtensor.plan.partition import head_stages

fine = functools.partial(
    Staging, flops_per_stage=1e-3, grad_flops_per_stage=1e-3, queries_per_stage=1, grad_keys_per_stage=1,
    keys_per_stage_by_row=1,
)  # fmt: skip
BY_HEAD = fine(stage_bytes=1, grad_stage_bytes=1, grad_local_bytes=1)


@contextmanager
def in_stages(most: int) -> Iterator[None]:
    """While open, Ulysses exchanges heads in up to `most` stages, and calls are planned anew."""
    staging = functools.partial(head_stages, flops_per_stage=1e-3, most=most)
    with mock.patch.object(planner, "head_stages", staging), mock.patch.object(planner, "_plans", WeakKeyDictionary()):
        yield
