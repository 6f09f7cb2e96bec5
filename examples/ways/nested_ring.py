"""Nested ring: K/V enter a node once, over the first axis, and are sent within the node over the second.

torchrun --nproc-per-node 4 examples/ways/nested_ring.py
"""

from __future__ import annotations

from functools import partial

from check import compare, make_mesh, run

from cp_dtensor import context_parallel_attention


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    mesh = make_mesh((2, 2), ("cp_node", "cp_gpu"))  # names that begin with "cp": both axes share the sequence
    attend = partial(context_parallel_attention, mesh=mesh, method="ring", is_causal=True, enable_gqa=True, seq_len=50)
    return compare(mesh, attend)


if __name__ == "__main__":
    run("nested ring", main)
