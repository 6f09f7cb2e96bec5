"""Hybrid: Ulysses over the axis "ulysses", and a ring over the axis "ring".

torchrun --nproc-per-node 4 examples/ways/hybrid.py
"""

from __future__ import annotations

from functools import partial

from check import compare, make_mesh, run

from cp_dtensor import context_parallel_attention


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    mesh = make_mesh((2, 2), ("ring", "ulysses"))
    attend = partial(
        context_parallel_attention, mesh=mesh, method="hybrid", is_causal=True, enable_gqa=True, seq_len=50
    )
    return compare(mesh, attend)


if __name__ == "__main__":
    run("hybrid", main)
