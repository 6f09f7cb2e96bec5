"""Checks of a machine for context parallelism; `python -m cp_dtensor doctor`."""
