"""Triton kernels of attention, their launchers, and reference implementations in torch operations."""

MAX_PARTS = 2
"""Parts that a merge or sum kernel adds at once. Each argument costs launch time; head-tail needs two parts."""
