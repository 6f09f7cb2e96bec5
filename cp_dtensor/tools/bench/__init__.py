"""The benchmark: `torchrun --nproc-per-node N -m cp_dtensor.tools.bench --help`."""
