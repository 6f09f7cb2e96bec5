"""Ring over one axis: queries stay, keys and values travel. Any number of heads.

torchrun --nproc-per-node 4 examples/ways/ring.py
"""

from __future__ import annotations

from functools import partial

from check import compare, make_mesh, run

from cp_dtensor import ring_attention


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    mesh = make_mesh((4,), ("cp",))
    # rotate_method="symm_mem", "allgather" or "alltoall" selects the KV transport; the default is "auto".
    attend = partial(ring_attention, mesh=mesh, is_causal=True, enable_gqa=True, seq_len=50)
    return compare(mesh, attend)


if __name__ == "__main__":
    run("ring", main)
