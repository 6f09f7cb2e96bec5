"""Settings of torch that belong to the user, and the library's caches."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.distributed.tensor import DTensor

from cp_dtensor.api import hooks
from cp_dtensor.attention.backends import interval
from cp_dtensor.engine import gather_kv


def cold_caches() -> None:
    """Clears all caches of the library, as in a new process, but for the patches that it holds."""
    for name, module in list(sys.modules.items()):
        if name.startswith("cp_dtensor"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and value is not hooks._patches:
                    value.cache_clear()
    interval._cached_rows.clear()
    gather_kv._cache.clear()


@dataclass(frozen=True)
class PatchedTorch:
    """The functions and settings of torch that the library patches; equal if all objects are the same ones."""

    functions: tuple[Any, ...]
    kernels: str
    fastpath: bool
    handlers: dict[Any, Any]

    @classmethod
    def now(cls) -> PatchedTorch:
        dispatcher: Any = DTensor._op_dispatcher
        module: Any = torch.utils.checkpoint
        return cls(
            functions=(
                F.scaled_dot_product_attention,
                F.multi_head_attention_forward,
                vars(module.CheckpointFunction)["forward"],
                vars(module.CheckpointFunction)["backward"],
                module._checkpoint_without_reentrant_generator,
                module.checkpoint,
                torch._dynamo.eval_frame._callback_from_stance,
                vars(nn.parallel.DistributedDataParallel)["_distributed_broadcast_coalesced"],
                nn.parallel.distributed._sync_module_states,
            ),
            kernels="".join(
                torch._C._dispatch_dump_table(name)
                for name in ("aten::scaled_dot_product_attention", "torch_attn::_varlen_attn")
            ),
            fastpath=torch.backends.mha.get_fastpath_enabled(),
            handlers=dict(dispatcher._custom_op_handlers),
        )


def thread_state() -> list[object]:
    """Returns the user's settings of this thread and process."""
    asked = (
        torch.get_default_device, torch.get_default_dtype, torch.is_grad_enabled, torch.is_inference_mode_enabled,
        torch.is_autocast_cache_enabled, torch.is_anomaly_enabled, torch.get_num_threads,
        torch.get_deterministic_debug_mode, torch._C._is_multithreading_enabled, torch.get_float32_matmul_precision,
        torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.math_sdp_enabled, _len_torch_function_stack,
        _len_torch_dispatch_stack,
    )  # fmt: skip
    fill = torch.utils.deterministic.fill_uninitialized_memory
    of_autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return [*(each() for each in asked), fill, of_autocast, F.scaled_dot_product_attention]
