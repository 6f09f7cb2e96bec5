"""The one door to torch's private symbols. Everything that depends on torch's version is decided here."""

from cp_dtensor._torch.collectives import (
    all_gather_single,
    has_cpu_backend,
    reduce_scatter_single,
    start_all_to_all,
    traced_broadcast,
    uses_nccl,
)
from cp_dtensor._torch.compiler import (
    compiled_code_kept_apart,
    constant_in_trace,
    is_traced,
    never_compiled,
    refuse_in_compiled_function,
    traced_inside,
)
from cp_dtensor._torch.cuda_graphs import is_before_capture, is_in_cuda_graph, prepared
from cp_dtensor._torch.dtensor import (
    OpHandler,
    bound_arguments,
    dtensor_dispatcher,
    dtensor_tables,
    expand_strategies,
    mesh_of,
    propagated,
    run_locally,
    tensor_inputs,
)
from cp_dtensor._torch.experimental import experimental_context_parallel_settings
from cp_dtensor._torch.flex import (
    FLEX_ATTENTION_IS_KNOWN,
    WHOLE_BLOCK,
    captured_flex_attention_checked,
    flex_attention_redirected,
    original_flex_attention,
    with_write_order_like,
)
from cp_dtensor._torch.groups import group_of_name, name_of_group
from cp_dtensor._torch.patches import (
    checkpointed_functions_bound,
    lower_right_bias_redirected,
    module_buffers_broadcast_but,
    multihead_attention_ends_in_sdpa,
)
from cp_dtensor._torch.profiling import label
from cp_dtensor._torch.sdpa import (
    FUSED_SDPA_OPS,
    SDPA_BACKENDS,
    enabled_sdpa_backends,
    math_sdpa,
    original_sdpa,
    override_sdpa,
    user_sdpa_priority,
)
from cp_dtensor._torch.symmetric_memory import SymmetricBuffer, symmetric_buffer
from cp_dtensor._torch.tensors import (
    below_autograd,
    current_stream_handle,
    is_batched,
    is_wrapper,
    no_modes,
    swap_identities,
    version_of,
)
from cp_dtensor._torch.threads import (
    backward_may_come_again,
    current_backward,
    get_thread_state,
    in_autograd_thread,
    in_main_thread,
    thread_state,
)
from cp_dtensor._torch.varlen import varlen_attn_overridden

__all__ = [
    "FLEX_ATTENTION_IS_KNOWN",
    "FUSED_SDPA_OPS",
    "SDPA_BACKENDS",
    "WHOLE_BLOCK",
    "OpHandler",
    "SymmetricBuffer",
    "all_gather_single",
    "backward_may_come_again",
    "below_autograd",
    "bound_arguments",
    "captured_flex_attention_checked",
    "checkpointed_functions_bound",
    "compiled_code_kept_apart",
    "constant_in_trace",
    "current_backward",
    "current_stream_handle",
    "dtensor_dispatcher",
    "dtensor_tables",
    "enabled_sdpa_backends",
    "expand_strategies",
    "experimental_context_parallel_settings",
    "flex_attention_redirected",
    "get_thread_state",
    "group_of_name",
    "has_cpu_backend",
    "in_autograd_thread",
    "in_main_thread",
    "is_batched",
    "is_before_capture",
    "is_in_cuda_graph",
    "is_traced",
    "is_wrapper",
    "label",
    "lower_right_bias_redirected",
    "math_sdpa",
    "mesh_of",
    "module_buffers_broadcast_but",
    "multihead_attention_ends_in_sdpa",
    "name_of_group",
    "never_compiled",
    "no_modes",
    "original_flex_attention",
    "original_sdpa",
    "override_sdpa",
    "prepared",
    "propagated",
    "reduce_scatter_single",
    "refuse_in_compiled_function",
    "run_locally",
    "start_all_to_all",
    "swap_identities",
    "symmetric_buffer",
    "tensor_inputs",
    "thread_state",
    "traced_broadcast",
    "traced_inside",
    "user_sdpa_priority",
    "uses_nccl",
    "varlen_attn_overridden",
    "version_of",
    "with_write_order_like",
]
