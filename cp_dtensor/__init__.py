"""Context-parallel attention for DTensor: `F.scaled_dot_product_attention` over sequences too long for one device."""

from cp_dtensor.areas import imbalance
from cp_dtensor.block_layouts import BalancedBlocks
from cp_dtensor.compiled_op import ATTENTION_OPS
from cp_dtensor.context import context_parallel
from cp_dtensor.documents import Documents
from cp_dtensor.dtensor.dispatcher import disable_context_parallel_dispatcher, enable_context_parallel_dispatcher
from cp_dtensor.explain import explain
from cp_dtensor.flex import context_parallel_flex_attention
from cp_dtensor.functional import context_parallel_attention, ring_attention, ulysses_attention
from cp_dtensor.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.mask_layouts import Balanced, PerDocument
from cp_dtensor.masks import Batched, Causal, Full, Mask, PrefixLM, SlidingWindow
from cp_dtensor.parallel_style import ContextParallel
from cp_dtensor.rotation.choice import set_rotate_method
from cp_dtensor.sharding import context_parallel_shard, context_parallel_unshard, local_positions
from cp_dtensor.varlen import varlen_attention

__all__ = [
    "ATTENTION_OPS",
    "Balanced",
    "BalancedBlocks",
    "Batched",
    "Causal",
    "ContextParallel",
    "Contiguous",
    "Documents",
    "Full",
    "HeadTail",
    "Layout",
    "Mask",
    "MirroredBatch",
    "PerDocument",
    "PrefixLM",
    "SlidingWindow",
    "Striped",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_flex_attention",
    "context_parallel_shard",
    "context_parallel_unshard",
    "disable_context_parallel_dispatcher",
    "enable_context_parallel_dispatcher",
    "explain",
    "imbalance",
    "local_positions",
    "ring_attention",
    "set_rotate_method",
    "ulysses_attention",
    "varlen_attention",
]
