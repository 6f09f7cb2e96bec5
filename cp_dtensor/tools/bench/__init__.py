"""Benchmark of context-parallel attention: `torchrun --nproc-per-node N -m cp_dtensor bench`."""
