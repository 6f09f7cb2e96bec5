"""Ulysses over one axis: ranks exchange rows for heads, compute some heads over all rows, and exchange back.

torchrun --nproc-per-node 4 examples/ways/ulysses.py
"""

from __future__ import annotations

from functools import partial

from check import compare, make_mesh, run

from cp_dtensor import ulysses_attention


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    mesh = make_mesh((4,), ("cp",))
    # Each rank computes 2 of the 8 query heads, which share one of the 4 key heads.
    attend = partial(ulysses_attention, mesh=mesh, is_causal=True, enable_gqa=True, seq_len=50)
    return compare(mesh, attend)


if __name__ == "__main__":
    run("ulysses", main)
