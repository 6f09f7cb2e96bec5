"""Triton kernels. Only kernels and their launchers: what runs where is decided elsewhere."""

MAX_PARTS = 2
"""Parts that a kernel adds at once. Each argument costs launch time; two parts are what head-tail needs."""
