"""Rotations: how K/V travel between the ranks of a context-parallel axis."""
