"""Context-parallel attention for DTensor: `F.scaled_dot_product_attention` over sequences that no device holds whole."""

from cp_dtensor.functional import ring_attention
from cp_dtensor.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.rotation.choice import set_rotate_method

__all__ = ["Contiguous", "HeadTail", "Layout", "MirroredBatch", "Striped", "ring_attention", "set_rotate_method"]
