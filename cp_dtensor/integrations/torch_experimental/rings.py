"""`_templated_ring_attention`: ring attention by an op that the caller passes.

A fused op of torch only names a backend. Any other op is called as torch calls it: once for each rank's keys, its own
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor import Causal, Contiguous, Full, HeadTail, Layout
from cp_dtensor.api.extension import (
    Mesh,
    merge,
    refuse_unsupported_sdpa,
    ring_attention_by_backend,
    sequence_ranks,
)
from cp_dtensor.integrations.torch_experimental.options import assumed_layout, axis_group


def _templated_ring_attention(
    group: Mesh, seq_dim: int, op: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    is_causal: bool = False, **kwargs: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute attention of this rank's queries to the keys of all ranks by `op`.

    Args:
        group: the context-parallel axis.
        seq_dim: the sequence dim. Used only for causal attention in head-tail order, where it must be 2; otherwise
            whole tensors go to the op, and any number is accepted.
        op: `op(query, key, value, is_causal=..., **kwargs)` returns `(out, lse, ...)` of local tensors. lse is the
            natural log of the softmax denominator, in out's shape without its last dim or with a last dim of 1. Or a
            fused SDPA op of torch, which names the backend.
        query: (B, H, S, D), this rank's queries.
        key: (B, Hkv, T, D), this rank's keys, of equal shape on all ranks (checked if the group has a CPU backend).
        value: (B, Hkv, T, Dv), this rank's values.
        is_causal: True for a causal mask by global position, in the order in which sequences of this length were
            sharded; if none was, as `_cp_options.enable_load_balance` says.
        **kwargs: for the op.

    Returns:
        (out, lse, *further results of the op's last call). With torch's ops, out is differentiable; with others,
        backward is refused.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        NotImplementedError: dropout; with torch's ops also masks; causal attention of different lengths.
    """
    group = axis_group(group)
    layout = _checked_layout(group, seq_dim, query, key, is_causal, kwargs)
    namespace, _, name = str(op).partition(".")
    name = name.partition(".")[0]  # an aten op with or without overload
    is_fused = namespace == "aten" and name in _BACKENDS
    _refuse_different_shapes([query, key, value] if is_fused else [key, value], group)
    if is_fused:
        return _fused(name, group, layout, query, key, value, kwargs)
    total: tuple[torch.Tensor, ...] = ()
    with torch.no_grad():
        for source, source_key, source_value in _keys_and_values(key, value, group):
            part = _part_of(group.rank(), source, query.size(2), layout, group.size())
            if part is None:
                continue
            first, keys, part_is_causal = part
            q = query.narrow(2, first, query.size(2) - first)
            k, v = (x if keys is None else x.narrow(2, 0, keys) for x in (source_key, source_value))
            out, padded, *rest = op(q, k, v, is_causal=part_is_causal, **kwargs)
            lse = _without_padding(padded, out)
            if not total:  # copies: the tensors that ops return stay theirs
                wide = torch.promote_types(lse.dtype, torch.float32)
                total = tuple(x.to(wide, copy=True, memory_format=torch.contiguous_format) for x in (out, lse))
                continue
            # Four dims, for ops whose results have fewer.
            added = (None,) * max(4 - out.dim(), 0)
            part_out, part_lse, to_out, to_lse = (x[added] for x in (out, lse, *total))
            rows = (first, first + part_out.size(2))
            merge(to_out, to_lse, to_out, to_lse, [(rows, part_out, part_lse.contiguous())])
        result, lse = (x.to(each.dtype) for x, each in zip(total, (out, padded), strict=True))
        lse = lse.unsqueeze(-1) if padded.dim() == out.dim() else lse
    inputs = [tensor for tensor in (query, key, value) if tensor.requires_grad]
    if inputs and torch.is_grad_enabled():
        result = _WithoutBackward.apply(result, *inputs)
    return (result, lse, *rest)


class _WithoutBackward(torch.autograd.Function):
    """Result of an op whose backward around the ring is unknown."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(
            "_templated_ring_attention cannot be differentiated with an op of the program's own: pass a fused SDPA op "
            "of torch, or call cp_dtensor.ring_attention"
        )


def _checked_layout(
    group: dist.ProcessGroup, seq_dim: int, query: torch.Tensor, key: torch.Tensor, is_causal: bool,
    kwargs: dict[str, Any],
) -> Layout | None:  # fmt: skip
    """Return the layout under a causal mask, None without one."""
    refuse_unsupported_sdpa(None, kwargs.get("dropout_p") or 0.0)
    if not is_causal:
        return None
    if query.size(2) != key.size(2):
        raise NotImplementedError(
            "is_causal requires the same query and context sequence lengths on each rank, got "
            f"{query.size(2)} and {key.size(2)}"
        )
    layout = assumed_layout(group, query.size(2) * group.size())
    if layout == HeadTail() and group.size() > 1 and seq_dim % query.dim() != 2:
        raise NotImplementedError(
            f"causal attention in head-tail order expects the sequence in dim 2, got seq_dim={seq_dim}; set "
            "_cp_options.enable_load_balance = False if the ranks' shards are contiguous"
        )
    return layout


def _refuse_different_shapes(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank if shapes differ between ranks and the group can compare them on the host."""
    ranks, device = sequence_ranks(group), tensors[0].device
    # Otherwise the comparison would wait for the GPU.
    if group.size() == 1 or not (ranks.have_cpu_backend or device.type == "cpu"):
        return
    by_rank = ranks.gather_integers([size for tensor in tensors for size in tensor.shape], device)
    if any(sizes != by_rank[0] for sizes in by_rank):
        raise ValueError(
            "expected tensors of the same shapes on every rank, got the sizes "
            + ", ".join(f"{sizes} on rank {rank}" for rank, sizes in enumerate(by_rank))
        )


_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_CUDNN = "_scaled_dot_product_cudnn_attention"
_BACKENDS = {
    "_scaled_dot_product_flash_attention": "FLASH_ATTENTION", _CPU_FLASH: "FLASH_ATTENTION",
    _EFFICIENT: "EFFICIENT_ATTENTION", _CUDNN: "CUDNN_ATTENTION",
}  # fmt: skip


def _fused(
    name: str, group: dist.ProcessGroup, layout: Layout | None, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, kwargs: dict[str, Any],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the results of a fused op; differentiable. There is no random state, since there is no dropout."""
    bias = next((kwargs[name] for name in ("attn_bias", "attn_mask") if kwargs.get(name) is not None), None)
    refuse_unsupported_sdpa(bias, 0.0)
    if kwargs.get("return_debug_mask"):
        raise NotImplementedError("no rank has the attention weights of the whole sequence: got return_debug_mask")
    out, lse = ring_attention_by_backend(
        _BACKENDS[name], query, key, value, mesh=group, mask=Full() if layout is None else Causal(),
        layout=layout or Contiguous(), scale=kwargs.get("scale"),
        seq_len=(query.size(2) * group.size(), key.size(2) * group.size()),
    )  # fmt: skip
    if name == _CPU_FLASH:
        return out, lse
    state = query.new_empty(0, dtype=torch.int64)
    if name == _EFFICIENT:
        return out, lse, state, state
    lse = lse.unsqueeze(-1) if name == _CUDNN else lse
    return out, lse, None, None, query.size(2), key.size(2), state, state, query.new_empty(0)


def _part_of(
    rank: int, source: int, local_length: int, layout: Layout | None, world_size: int
) -> tuple[int, int | None, bool] | None:
    """Return the op's call of the queries of `rank` on the keys of `source`; None if no query sees them.

    The call is (the first query, the number of leading keys or None for all, is_causal). `layout` is `Contiguous()` or
    `HeadTail()` under a causal mask, None without a mask.
    """
    if layout is None or rank == source:
        return 0, None, layout is not None
    if layout != HeadTail():
        return (0, None, False) if source < rank else None
    length = local_length * world_size
    if source < rank:  # all local queries come after the head of the source, and before its tail
        return 0, layout.segments(length, source, world_size)[0].length, False
    return layout.segments(length, rank, world_size)[0].length, None, False


def _keys_and_values(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (source rank, its keys, its values): this rank's own, then those of rank - 1, rank - 2, ...

    K/V come directly from their owner. The next transfer is in flight while the caller computes.
    """
    rank, ranks = group.rank(), group.size()
    own = key.contiguous(), value.contiguous()
    sent = torch.cat([each.flatten().view(torch.uint8) for each in own])  # groups do not support every dtype
    sizes = [each.numel() * each.element_size() for each in own]

    def start(hop: int) -> tuple[torch.Tensor, Any]:
        received = torch.empty_like(sent)
        received_from, sent_to = [0] * ranks, [0] * ranks
        received_from[(rank - hop) % ranks] = sent_to[(rank + hop) % ranks] = sent.numel()
        return received, dist.all_to_all_single(received, sent, received_from, sent_to, group=group, async_op=True)

    transfer = start(1) if ranks > 1 else None
    yield rank, *own
    for hop in range(1, ranks):
        assert transfer is not None
        received, work = transfer
        work.wait()
        transfer = start(hop + 1) if hop + 1 < ranks else None
        k, v = (x.view(like.dtype).view(like.shape) for x, like in zip(received.split(sizes), own, strict=True))
        yield (rank - hop) % ranks, k, v


def _without_padding(lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the (B, H, S) of an LSE that may have a last dim of 1, or be padded to 32 rows by a backend."""
    lse = lse.squeeze(-1) if lse.dim() == out.dim() else lse
    if out.dim() == 4 and lse.shape[:2] == out.shape[:2] and lse.size(-1) > out.size(2):
        lse = lse[..., : out.size(2)]
    if lse.shape != out.shape[:-1]:
        raise ValueError(f"expected an lse of shape {tuple(out.shape[:-1])}, got {tuple(lse.shape)}")
    return lse
