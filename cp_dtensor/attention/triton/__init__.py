"""Triton kernels of attention and their launchers, with descriptions of masks and dropout that need no Triton."""

MAX_PARTS = 2
"""Parts that a merge or sum kernel adds at once. Each argument costs launch time; head-tail needs two parts."""
