"""Predictions of the cost model for every method, and a call by the method that it chooses.

torchrun --nproc-per-node 4 examples/ways/explain.py
"""

from __future__ import annotations

from functools import partial

from check import compare, make_mesh, run

from cp_dtensor import context_parallel_attention, explain


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    mesh = make_mesh((2, 2), ("ring", "ulysses"))
    # The table is for a call that is not made here. On CPUs the hardware is assumed, on GPUs it is measured.
    predicted = explain(mesh, seq_len=131072, q_heads=32, kv_heads=8)
    attend = partial(
        context_parallel_attention, mesh=mesh, method=predicted.chosen, is_causal=True, enable_gqa=True, seq_len=50
    )
    return compare(mesh, attend)


if __name__ == "__main__":
    run("explain", main)
