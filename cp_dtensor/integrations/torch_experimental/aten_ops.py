"""Torch's fused SDPA ops, as names of backends and forms of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor._torch_private.experimental_modules import aten_name
from cp_dtensor.arguments import check_qkv
from cp_dtensor.attention_call import Attention
from cp_dtensor.division import LayoutDivision
from cp_dtensor.extras import NO_EXTRAS
from cp_dtensor.integrations.torch_experimental.merger import without_padding
from cp_dtensor.layouts import Contiguous, Layout
from cp_dtensor.local_attention.policy import backend_by_name
from cp_dtensor.mask_arguments import refuse_unsupported_sdpa
from cp_dtensor.masks import Causal, Full
from cp_dtensor.planning import CallRequest, decide_ring, describe_problem
from cp_dtensor.ring import RingCall, ring_backward
from cp_dtensor.rotation.choice import rotation_by_name
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.shard_attention import positive_scale, softmax_scale
from cp_dtensor.tensors import no_autocast

_BACKENDS = {
    "_scaled_dot_product_flash_attention": "FLASH_ATTENTION",
    "_scaled_dot_product_flash_attention_for_cpu": "FLASH_ATTENTION",
    "_scaled_dot_product_efficient_attention": "EFFICIENT_ATTENTION",
    "_scaled_dot_product_cudnn_attention": "CUDNN_ATTENTION",
}
_SUFFIX = "_backward"


@dataclass(frozen=True)
class AtenOp:
    """A fused SDPA op or its backward: the ring is ours, tiles are computed by the op's backend."""

    name: str
    """Without the suffix of backwards."""

    def forward(
        self,
        group: dist.ProcessGroup,
        layout: Layout | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        """Everything that the op returns; there is no random state without dropout. Differentiable.

        Args:
            group: the ranks of the ring.
            layout: the order of the tokens under a causal mask, None without a mask.
            query, key, value: (B, H, S, D), of equal shapes on all ranks.
            kwargs: those of the op.

        Raises:
            TypeError, ValueError: tensors that do not fit.
            NotImplementedError: masks, dropout, and what the backend refuses.
        """
        query, call = self._call(group, layout, query, key, value, kwargs)
        out, lse, _ = Attention.apply(query, key, value, None, None, NO_EXTRAS, call, True)
        if self.name == "_scaled_dot_product_flash_attention_for_cpu":
            return out, lse
        state = query.new_empty(0, dtype=torch.int64)
        if self.name == "_scaled_dot_product_efficient_attention":
            return out, lse, state, state
        if self.name == "_scaled_dot_product_cudnn_attention":
            lse = lse.unsqueeze(-1)
        return out, lse, None, None, query.size(2), key.size(2), state, state, query.new_empty(0)

    def backward(
        self,
        group: dist.ProcessGroup,
        layout: Layout | None,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        """Everything that the op's backward returns.

        Raises:
            as `forward`.
        """
        with torch.enable_grad():  # a scale of zero or less goes into the queries, and has a derivative
            given = query.detach().requires_grad_()
            scaled, call = self._call(group, layout, given, key, value, kwargs)
        lse = without_padding(lse.squeeze(-1) if lse.dim() == out.dim() else lse, out)
        with torch.no_grad(), no_autocast(query):
            grad_q, grad_k, grad_v = ring_backward(grad_out, scaled.detach(), key, value, out, lse.contiguous(), call)
        if scaled is not given:
            (grad_q,) = torch.autograd.grad(scaled, given, grad_q)
        grads = grad_q, grad_k, grad_v
        return (*grads, None) if self.name == "_scaled_dot_product_efficient_attention" else grads

    def _call(
        self,
        group: dist.ProcessGroup,
        layout: Layout | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, RingCall]:
        mask = next((kwargs[name] for name in ("attn_bias", "attn_mask") if kwargs.get(name) is not None), None)
        refuse_unsupported_sdpa(mask, kwargs.get("dropout_p") or 0.0)
        if kwargs.get("return_debug_mask"):
            raise NotImplementedError("no rank has the attention weights of the whole sequence: got return_debug_mask")
        check_qkv(query, key, value, True)
        problem = describe_problem(query, key, value, staircase=False)
        backend = backend_by_name(_BACKENDS[self.name], query.device.type)
        refusal = backend.refusal(problem)
        if refusal is not None:
            raise NotImplementedError(f"{self.name} cannot compute this attention ({problem}): {refusal}")
        lengths = (query.size(2) * group.size(), key.size(2) * group.size())
        request = CallRequest(
            division=LayoutDivision(layout or Contiguous(), *lengths, query.size(0), group.size()),
            mask=Full() if layout is None else Causal(),
            problem=problem,
            batch_size=query.size(0),
            itemsize=query.element_size(),
            device=query.device,
            backend=backend,
            rotation=rotation_by_name(None),
        )
        query, scale = positive_scale(query, softmax_scale(query, kwargs.get("scale")))
        ranks = SequenceRanks(group) if group.size() > 1 else None
        return query, decide_ring(request, group if ranks else None, group.rank() if ranks else 0).call(ranks, scale)


def as_aten_op(op: Any) -> AtenOp | None:
    """The fused SDPA op that `op` is, with or without overload, forward or backward; None for anything else."""
    name = (aten_name(op) or "").removesuffix(_SUFFIX)
    return AtenOp(name) if name in _BACKENDS else None
