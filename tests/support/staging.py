"""Stagings without a minimum of work in a stage, for small problems."""

import functools

from cp_dtensor.comm.collective import Staging

fine = functools.partial(
    Staging, flops_per_stage=1e-3, grad_flops_per_stage=1e-3, queries_per_stage=1, grad_keys_per_stage=1,
    keys_per_stage_by_row=1,
)  # fmt: skip
BY_HEAD = fine(stage_bytes=1, grad_stage_bytes=1, grad_local_bytes=1)
