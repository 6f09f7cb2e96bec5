"""Triton kernels. Only kernels and their launchers: what runs where is decided elsewhere."""

from importlib.util import find_spec

TRITON_AVAILABLE = find_spec("triton") is not None
