"""Access to torch's private symbols. All code that depends on torch's version is in this package."""

# ruff: noqa: F401, I001  (names for the other rooms)
# fmt: off

from cp_dtensor._torch.attention import (
    FLEX_ATTENTION_IS_KNOWN, FUSED_SDPA_OPS, SDPA_BACKENDS, WHOLE_BLOCK,
    captured_flex_attention_checked, dtensor_sdpa_handled, enabled_sdpa_backends, flex_attention_is_redirected,
    flex_attention_redirected, jagged_sdpa_checked, original_flex_attention, original_sdpa, sdpa_overridden,
    torchs_context_parallel_is_open, torchs_modules_checked, user_sdpa_priority, varlen_attn_overridden,
    with_write_order_like,
)
from cp_dtensor._torch.autograd import (
    autograd_recorded,
    backward_may_come_again, checkpoint_keeps, current_backward, get_thread_state, in_autograd_thread, in_main_thread,
    in_selective_checkpoint, main_thread_state, open_modes, thread_state,
)
from cp_dtensor._torch.cache import is_before_capture, is_in_cuda_graph, prepared
from cp_dtensor._torch.collectives import (
    SymmetricBuffer, all_gather_single, group_count, group_of_name, group_store, group_timeout, has_cpu_backend,
    local_group, name_of_group, reduce_scatter_single, start_all_to_all, symmetric_buffer, traced_broadcast, uses_nccl,
)
from cp_dtensor._torch.compiler import (
    begin_traced_scope, compiled_code_kept_apart, constant_in_trace, define_operator, end_traced_scope, is_traced,
    never_compiled, refuse_in_compiled_function, traced_inside, traced_scope, when_loaded,
)
from cp_dtensor._torch.patches import (
    attribute_replaced, checkpointed_functions_bound, entry_replaced, lower_right_bias_redirected,
    hooks_detached, module_buffers_broadcast_but, multihead_attention_ends_in_sdpa, present_hooks_detached,
    wrapped,
)
from cp_dtensor._torch.tensors import (
    below_autograd, content_hash, current_stream_handle, installed_version, is_wrapper, label, no_modes,
    swap_identities, version_of,
)
