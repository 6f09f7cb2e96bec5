"""Context-parallel attention for DTensor: `F.scaled_dot_product_attention` of sequences too long for one device."""

import os

from cp_dtensor.api.batch import plan_batch
from cp_dtensor.api.context import context_parallel
from cp_dtensor.api.explain import explain
from cp_dtensor.api.flex_attention import context_parallel_flex_attention
from cp_dtensor.api.functional import context_parallel_attention, ring_attention, ulysses_attention
from cp_dtensor.api.hooks import register_context_hook as _register_context_hook
from cp_dtensor.api.mla import context_parallel_mla
from cp_dtensor.api.parallel_style import ContextParallel
from cp_dtensor.api.sdpa import disable_context_parallel_dispatcher, enable_context_parallel_dispatcher
from cp_dtensor.api.sharding import context_parallel_shard, context_parallel_unshard, local_positions
from cp_dtensor.api.varlen import ATTENTION_OPS, varlen_attention
from cp_dtensor.comm.faults import PeerError
from cp_dtensor.comm.transports import set_rotate_method
from cp_dtensor.layers.explain import explain_recurrence, explain_sparse
from cp_dtensor.layers.pooled import pool_blocks, select_pooled
from cp_dtensor.layers.recurrent import gated_delta_rule, kda, linear_attention, mamba2
from cp_dtensor.layers.sequence import affine_scan, causal_conv1d, halo, local_runs, relayout, shift
from cp_dtensor.layers.sparse import (
    block_attention,
    indexed_attention,
    indexer_loss,
    pooled_attention,
    pooled_indexer_loss,
    select_blocks,
    select_keys,
)
from cp_dtensor.plan.cluster import GPUS, LINKS, Cluster, Hardware
from cp_dtensor.spec.balanced_layouts import Balanced, BalancedBlocks, PerDocument
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.spec.logs import show_logs
from cp_dtensor.spec.masks import Batched, Causal, Full, Mask, PrefixLM, SlidingWindow, imbalance

__version__ = "0.1.0"

__all__ = [
    "ATTENTION_OPS",
    "GPUS",
    "LINKS",
    "Balanced",
    "BalancedBlocks",
    "Batched",
    "Causal",
    "Cluster",
    "ContextParallel",
    "Contiguous",
    "Documents",
    "Full",
    "Hardware",
    "HeadTail",
    "Layout",
    "Mask",
    "MirroredBatch",
    "PeerError",
    "PerDocument",
    "PrefixLM",
    "SlidingWindow",
    "Striped",
    "affine_scan",
    "block_attention",
    "causal_conv1d",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_flex_attention",
    "context_parallel_mla",
    "context_parallel_shard",
    "context_parallel_unshard",
    "disable_context_parallel_dispatcher",
    "enable_context_parallel_dispatcher",
    "explain",
    "explain_recurrence",
    "explain_sparse",
    "gated_delta_rule",
    "halo",
    "imbalance",
    "indexed_attention",
    "indexer_loss",
    "kda",
    "linear_attention",
    "local_positions",
    "local_runs",
    "mamba2",
    "plan_batch",
    "pool_blocks",
    "pooled_attention",
    "pooled_indexer_loss",
    "relayout",
    "ring_attention",
    "select_blocks",
    "select_keys",
    "select_pooled",
    "set_rotate_method",
    "shift",
    "ulysses_attention",
    "varlen_attention",
]

_register_context_hook("transformers", "cp_dtensor.integrations.transformers.hooks:hook")

if os.environ.get("CP_DTENSOR_LOGS"):
    show_logs(os.environ["CP_DTENSOR_LOGS"])
