"""`_templated_ring_attention` and its backward: ring attention by an op that the caller passes.

A fused op of torch only names a backend. Any other op is called as torch calls it: once for each rank's keys, its own
first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from cp_dtensor import HeadTail, Layout
from cp_dtensor.api.extension import Mesh, refuse_unsupported_sdpa, sequence_ranks
from cp_dtensor.integrations.torch_experimental.options import _cp_options, assumed_layout, axis_group
from cp_dtensor.integrations.torch_experimental.ring_ops import _SDPAMerger, as_aten_op


class _AttentionOp(Protocol):
    """An attention of local tensors that returns (out, lse, ...)."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: object
    ) -> tuple[torch.Tensor, ...]: ...


def _templated_ring_attention(
    group: Mesh,
    seq_dim: int,
    op: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Attention of this rank's queries to the keys of all ranks, computed by `op`.

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
    layout = _causal_layout(group, seq_dim, query, key) if is_causal else None
    aten_op = as_aten_op(op)
    if aten_op is not None:
        _refuse_different_shapes([query, key, value], group)
        return aten_op.forward(group, layout, query, key, value, kwargs)
    refuse_unsupported_sdpa(None, kwargs.get("dropout_p") or 0.0)
    _refuse_different_shapes([key, value], group)
    merger = _SDPAMerger(_cp_options.convert_to_f32, seq_dim if layout is None else 2)
    rest: list[Any] = []
    length = query.size(2) * group.size()
    with torch.no_grad():
        for source, source_key, source_value in _keys_and_values(key, value, group):
            part = _part_of(group.rank(), source, length, layout, group.size())
            if part is not None:
                q, k, v = _rows(part, query), _columns(part, source_key), _columns(part, source_value)
                partial_out, partial_lse, *rest = op(q, k, v, is_causal=part.is_causal, **kwargs)
                merger.step(partial_out, partial_lse, part.first_query > 0)
        out, lse = merger.results()
    inputs = [tensor for tensor in (query, key, value) if tensor.requires_grad]
    if inputs and torch.is_grad_enabled():
        out = _WithoutBackward.apply(out, *inputs)
    return (out, lse, *rest)


def _templated_ring_attention_backward(
    group: Mesh,
    seq_dim: int,
    op: Any,
    grad_out: torch.Tensor,
    grad_out_name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Gradients of `_templated_ring_attention`.

    Args:
        group, seq_dim, query, key, value, is_causal: as there.
        op: returns `(dq, dk, dv, ...)` of local tensors; called with the keywords `query`, `key`, `value`, `out`,
            `logsumexp`, `is_causal`, the one in `grad_out_name`, and `kwargs`. out and logsumexp are those over all
            keys. Or the backward of a fused SDPA op of torch.
        grad_out: (B, H, S, Dv).
        grad_out_name: keyword of `op` for `grad_out`.
        out, logsumexp: the results of `_templated_ring_attention`.
        **kwargs: for the op.

    Returns:
        (dq, dk, dv, *further results of the op's last call), in the dtypes of query, key and value; sums over ranks
        are in float32 (float64 for float64).

    Raises:
        as `_templated_ring_attention`.
    """
    group = axis_group(group)
    rank, world_size = group.rank(), group.size()
    layout = _causal_layout(group, seq_dim, query, key) if is_causal else None
    aten_op = as_aten_op(op)
    if aten_op is not None:
        _refuse_different_shapes([query, key, value], group)
        return aten_op.backward(group, layout, grad_out, query, key, value, out, logsumexp, kwargs)
    refuse_unsupported_sdpa(None, kwargs.get("dropout_p") or 0.0)
    _refuse_different_shapes([key, value], group)
    length = query.size(2) * world_size
    sum_dtype = torch.promote_types(query.dtype, torch.float32)
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=sum_dtype) for x in (query, key, value))
    transfers: list[_Transfer] = []
    rest: list[Any] = []
    with torch.no_grad():
        for hop, (source, source_key, source_value) in enumerate(_keys_and_values(key, value, group)):
            part = _part_of(rank, source, length, layout, world_size)
            contribution: list[torch.Tensor] = []
            if part is not None:
                rows = {"query": query, "out": out, grad_out_name: grad_out}
                part_q, *grads = op(
                    **{name: _rows(part, tensor) for name, tensor in rows.items()},
                    key=_columns(part, source_key),
                    value=_columns(part, source_value),
                    logsumexp=_rows(part, logsumexp).contiguous(),
                    is_causal=part.is_causal,
                    **kwargs,
                )
                contribution, rest = [grad.to(sum_dtype) for grad in grads[:2]], grads[2:]
                grad_q.narrow(2, part.first_query, part_q.size(2)).add_(part_q)
            if hop == 0:
                _add_columns((grad_k, grad_v), contribution)
                continue
            reader = (rank + hop) % world_size
            theirs = _part_of(reader, rank, length, layout, world_size)
            like = [] if theirs is None else [_columns(theirs, grad_k), _columns(theirs, grad_v)]
            to_rank, from_rank = source if contribution else None, reader if like else None
            transfers.append(_Transfer(contribution, to_rank, like or [grad_k], from_rank, group))
        for transfer in transfers:
            _add_columns((grad_k, grad_v), transfer.wait())
    return grad_q.to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype), *rest


class _WithoutBackward(torch.autograd.Function):
    """Result of an op whose backward around the ring is unknown."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(
            "_templated_ring_attention cannot be differentiated with an op of the program's own: call it in the "
            "forward of a torch.autograd.Function, and _templated_ring_attention_backward in its backward"
        )


# Rows and columns of one call


def _causal_layout(group: dist.ProcessGroup, seq_dim: int, query: torch.Tensor, key: torch.Tensor) -> Layout:
    if query.size(2) != key.size(2):
        raise NotImplementedError(
            f"causal ring attention expects as many queries as keys on each rank, got {query.size(2)} and {key.size(2)}"
        )
    length = query.size(2) * group.size()
    layout = assumed_layout(group, length)
    if layout == HeadTail() and group.size() > 1 and seq_dim % query.dim() != 2:
        raise NotImplementedError(
            f"causal attention in head-tail order expects the sequence in dim 2, got seq_dim={seq_dim}; set "
            "_cp_options.enable_load_balance = False if the ranks' shards are contiguous"
        )
    return layout


class _Part(NamedTuple):
    """The queries and keys of one call of an op."""

    first_query: int
    """The call takes this rank's queries from here on."""
    keys: int | None
    """The number of leading keys; None for all."""
    is_causal: bool


def _part_of(rank: int, source: int, length: int, layout: Layout | None, world_size: int) -> _Part | None:
    """Returns the call of `rank` on the keys of `source`; None if no query sees them.

    Args:
        rank: of the queries.
        source: rank of the keys.
        length: global length.
        layout: `Contiguous()` or `HeadTail()` under a causal mask, None without a mask.
        world_size: number of ranks.
    """
    if layout is None:
        return _Part(0, None, False)
    if rank == source:
        return _Part(0, None, True)
    if layout != HeadTail():
        return _Part(0, None, False) if source < rank else None
    if source < rank:  # all local queries come after the head of the source, and before its tail
        return _Part(0, layout.segments(length, source, world_size)[0].length, False)
    return _Part(layout.segments(length, rank, world_size)[0].length, None, False)


def _rows(part: _Part, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.narrow(2, part.first_query, tensor.size(2) - part.first_query) if part.first_query else tensor


def _columns(part: _Part, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if part.keys is None else tensor.narrow(2, 0, part.keys)


def _add_columns(totals: tuple[torch.Tensor, ...], grads: list[torch.Tensor]) -> None:
    for total, grad in zip(totals, grads, strict=False):
        total.narrow(2, 0, grad.size(2)).add_(grad)


# Transfers between ranks


class _Transfer:
    """An asynchronous send to one rank and receive from another; either may be None."""

    def __init__(
        self,
        outgoing: Sequence[torch.Tensor],
        to_rank: int | None,
        like: Sequence[torch.Tensor],
        from_rank: int | None,
        group: dist.ProcessGroup,
    ) -> None:
        self._like = like
        device = like[0].device
        # Bytes, because process groups do not support every dtype.
        sent = [tensor.contiguous().flatten().view(torch.uint8) for tensor in outgoing]
        self._sent = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8, device=device)
        size = sum(tensor.numel() * tensor.element_size() for tensor in like) if from_rank is not None else 0
        self._received = torch.empty(size, dtype=torch.uint8, device=device)
        splits_in, splits_out = [0] * group.size(), [0] * group.size()
        if from_rank is not None:
            splits_in[from_rank] = size
        if to_rank is not None:
            splits_out[to_rank] = self._sent.numel()
        self._work = dist.all_to_all_single(
            self._received, self._sent, splits_in, splits_out, group=group, async_op=True
        )

    def wait(self) -> list[torch.Tensor]:
        """Returns the received tensors, contiguous and shaped as `like`; none without a sender."""
        self._work.wait()
        if not self._received.numel():
            return []
        sizes = [tensor.numel() * tensor.element_size() for tensor in self._like]
        pieces = self._received.split(sizes)
        return [piece.view(x.dtype).view(x.shape) for piece, x in zip(pieces, self._like, strict=True)]


def _keys_and_values(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields (source rank, its keys, its values): this rank's own, then those of rank - 1, rank - 2, ...

    K/V come directly from their owner. The next transfer is in flight while the caller computes.
    """
    rank, world_size = group.rank(), group.size()
    own = key.contiguous(), value.contiguous()

    def start(hop: int) -> _Transfer:
        return _Transfer(own, (rank + hop) % world_size, own, (rank - hop) % world_size, group)

    transfer = start(1) if world_size > 1 else None
    yield rank, *own
    for hop in range(1, world_size):
        assert transfer is not None
        source_key, source_value = transfer.wait()
        transfer = start(hop + 1) if hop + 1 < world_size else None
        yield (rank - hop) % world_size, source_key, source_value


def _refuse_different_shapes(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Refuses tensors of different shapes on the ranks, if the group can compare them on the host.

    Raises:
        ValueError: on every rank alike.
    """
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


# Parts of the ring that a program has replaced

_PARTS: dict[str, object] = {
    "_SDPAMerger": _SDPAMerger,
    "_templated_ring_attention": _templated_ring_attention,
    "_templated_ring_attention_backward": _templated_ring_attention_backward,
}
_METHODS = dict(vars(_SDPAMerger))


class _Watched:
    """The modules in which programs find the names of `_PARTS`."""

    def __init__(self) -> None:
        self.redirected: list[ModuleType] = []

    def modules(self) -> list[ModuleType]:
        ours = sys.modules.get(__package__ or "")
        return [*self.redirected, *([] if ours is None else [ours])]


watched = _Watched()


def refuse_patched_rings() -> None:
    """Refuses attention of contexts and modules, which does not call names that a program has replaced.

    Raises:
        NotImplementedError: naming the replaced functions.
    """
    replaced = [
        f"{module.__name__}.{name}"
        for module in watched.modules()
        for name, ours in _PARTS.items()
        if vars(module).get(name, ours) is not ours
    ]
    replaced += [f"_SDPAMerger.{name}" for name in ("step", "results") if vars(_SDPAMerger)[name] is not _METHODS[name]]
    if replaced:
        raise NotImplementedError(
            f"{', '.join(replaced)} have been replaced, which would have no effect: attention in contexts and modules "
            "does not call them. Call _templated_ring_attention with an op of your own, or stay with torch's "
            "context parallel for this model"
        )
