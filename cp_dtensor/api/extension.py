"""Building blocks for layers, providers and drop-ins.

Layers and integrations, in this package or elsewhere, import the public names of `cp_dtensor` and of this module only.
"""

from __future__ import annotations

from cp_dtensor._torch import (
    attribute_replaced,
    autograd_recorded,
    compiled_code_kept_apart,
    constant_in_trace,
    current_backward,
    define_operator,
    entry_replaced,
    never_compiled,
    version_of,
    when_loaded,
    wrapped,
)
from cp_dtensor._torch.autograd import RankFunction, differentiated_once, refuse_batches, refuse_traced_transforms
from cp_dtensor._torch.cache import Shared, capturing
from cp_dtensor._torch.tensors import content_hash, indexable, no_autocast, wide_dtype
from cp_dtensor.api.buffers import take_shard
from cp_dtensor.api.context import entered, local_sdpa
from cp_dtensor.api.dtensor_attention import from_local, local_beside, refuse_other_place
from cp_dtensor.api.explain import Assumed, Explanation, check_numbers, cluster_of_mesh, counted_ranks, shortened
from cp_dtensor.api.functional import cast_by_autocast, takes_options
from cp_dtensor.api.hooks import ContextHook, hooks_held, register_context_hook
from cp_dtensor.api.interception import SdpaArguments, SharedInstallation, intercepted
from cp_dtensor.api.mla import check_latents
from cp_dtensor.api.sdpa import attention_of_shards
from cp_dtensor.api.sharding import checked_buffers, checked_sequence_dim, gathered_shards, refuse_first_dim
from cp_dtensor.api.varlen import bottom_right_mask, heads_before_rows, heads_first_of_packed
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.first_use import first_use, wrong_result
from cp_dtensor.attention.backends.packages import quiet
from cp_dtensor.attention.backends.select import register_backend
from cp_dtensor.attention.masked import positions_of, seen_positions
from cp_dtensor.comm.calls import Signature, begin_pass
from cp_dtensor.comm.collective import CollectiveTransport
from cp_dtensor.comm.faults import exchanged
from cp_dtensor.comm.groups import MOST_AXES, Mesh, SequenceRanks, sequence_ranks
from cp_dtensor.comm.links import cluster_of
from cp_dtensor.comm.transports import register_transport
from cp_dtensor.engine.agreement import LENGTH, Facts, compare, global_length, length_of
from cp_dtensor.engine.arguments import check_devices, check_tensors
from cp_dtensor.engine.call import (
    Call,
    Sharding,
    both_masks,
    checked_bools,
    checked_layout,
    checked_length,
    checked_mask,
    refuse_other_lengths,
    softmax_scale,
)
from cp_dtensor.engine.choose import Estimate, fastest
from cp_dtensor.engine.contexts import OpenContext, around, current, inherited, innermost, queries_alone
from cp_dtensor.engine.handles import Keys, Parts, handle_of, is_handle, made_of, parts_of, value_of
from cp_dtensor.engine.run import CallMask
from cp_dtensor.plan.cluster import Cluster, Hardware
from cp_dtensor.plan.cost import Step, seconds
from cp_dtensor.plan.plan import ring_plan
from cp_dtensor.spec.documents import ascending, refuse_ids_and_lengths
from cp_dtensor.spec.layouts import CachedHash, Segment
from cp_dtensor.spec.masks import is_integer

__all__ = [  # noqa: RUF022, grouped by purpose
    # ranks, and layouts of your own
    "Mesh", "MOST_AXES", "SequenceRanks", "sequence_ranks", "Segment",
    "CachedHash", "take_shard",
    # checks of arguments
    "bottom_right_mask", "heads_before_rows", "heads_first_of_packed", "ascending", "refuse_ids_and_lengths",
    "is_integer", "check_devices", "check_tensors", "checked_layout", "checked_length", "refuse_other_lengths",
    "softmax_scale", "checked_bools", "checked_mask", "both_masks", "check_latents",
    "checked_buffers", "takes_options",
    # SDPA of the whole process, and parts of attention
    "intercepted", "SdpaArguments", "SharedInstallation", "local_sdpa",
    "attention_of_shards",
    # registries
    "AttentionBackend", "register_backend", "CollectiveTransport", "ring_plan", "register_transport",
    # contexts of models, and masks that travel through them as tensors
    "ContextHook", "hooks_held", "register_context_hook", "gathered_shards", "positions_of",
    "seen_positions", "entered", "content_hash",
    "OpenContext", "around", "current", "innermost", "inherited", "queries_alone",
    "Call", "CallMask", "is_handle", "handle_of", "value_of",
    # calls of layers: what ranks share, their lengths, and what ranks compare
    "Sharding", "Keys", "Parts", "made_of", "parts_of", "length_of", "global_length", "compare", "Facts",
    "LENGTH", "Signature",
    "begin_pass",
    # cost of the methods of a layer, and its table
    "Cluster", "Hardware", "Step", "seconds", "cluster_of", "cluster_of_mesh", "Estimate", "fastest",
    "Assumed", "Explanation", "check_numbers", "counted_ranks", "shortened",
    # tensors, DTensors and casts of a layer
    "no_autocast", "wide_dtype", "indexable", "cast_by_autocast", "checked_sequence_dim", "refuse_first_dim",
    "from_local", "local_beside", "refuse_other_place",
    # exchange of rows, tables that CUDA graphs read, and kernels of other packages
    "exchanged", "Shared", "capturing", "first_use", "wrong_result", "quiet",
    # autograd and compiler
    "RankFunction", "differentiated_once", "refuse_batches", "autograd_recorded",
    "compiled_code_kept_apart", "constant_in_trace",
    "current_backward", "define_operator",
    "never_compiled", "refuse_traced_transforms", "version_of",
    # patches of other programs
    "attribute_replaced", "entry_replaced", "when_loaded", "wrapped",
]  # fmt: skip
