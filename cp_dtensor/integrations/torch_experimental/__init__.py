"""Drop-in names of torch's experimental context parallel.

    from cp_dtensor.integrations.torch_experimental import context_parallel, set_rotate_method
    # was: from torch.distributed.tensor.experimental import context_parallel
    # and: from torch.distributed.tensor.experimental._attention import set_rotate_method

Or leave the program unchanged and call `redirect_imports()` before its own imports. Names and signatures are those of
torch 2.11 to 2.15, underscores included, because programs import them.
"""

from cp_dtensor.integrations.torch_experimental.context import (
    _ContextParallel,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    context_parallel,
)
from cp_dtensor.integrations.torch_experimental.options import (
    _ContextParallelOptions,
    _cp_options,
    _RotateMethod,
    set_rotate_method,
)
from cp_dtensor.integrations.torch_experimental.private import flex_cp_allgather, redirect_imports
from cp_dtensor.integrations.torch_experimental.rings import _templated_ring_attention
from cp_dtensor.integrations.torch_experimental.sharding import (
    _context_parallel_shard,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    context_parallel_unshard,
)

__all__ = [
    "_ContextParallel", "_ContextParallelOptions", "_HeadTailLoadBalancer", "_LoadBalancer", "_PTRRLoadBalancer",
    "_PerDocumentHeadTailLoadBalancer", "_RotateMethod", "_context_parallel_shard", "_cp_options",
    "_disable_context_parallel_dispatcher", "_enable_context_parallel_dispatcher", "_templated_ring_attention",
    "context_parallel", "context_parallel_unshard", "flex_cp_allgather", "redirect_imports", "set_rotate_method",
]  # fmt: skip
