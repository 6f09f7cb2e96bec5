"""`_templated_ring_attention`, its backward and `_SDPAMerger`: ring attention by an op that the caller passes.

A fused op of torch only names a backend. Any other op is called as torch calls it: once for each rank's keys, its own
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from cp_dtensor import Causal, Contiguous, Full, HeadTail, Layout
from cp_dtensor.api.extension import (
    Mesh,
    merge,
    refuse_unsupported_sdpa,
    ring_attention_backward,
    ring_attention_by_backend,
    sequence_ranks,
)
from cp_dtensor.integrations.torch_experimental.options import _cp_options, assumed_layout, axis_group


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
    layout, fused_op = _checked_call(group, seq_dim, op, query, key, value, is_causal, kwargs)
    if fused_op is not None:
        return _fused_forward(fused_op, query, key, value, _ring_arguments(group, layout, query, key, kwargs))
    merger = _SDPAMerger(_cp_options.convert_to_f32, seq_dim if layout is None else 2)
    rest: list[Any] = []
    length = query.size(2) * group.size()
    with torch.no_grad():
        for source, source_key, source_value in _keys_and_values(key, value, group):
            part = _part_of(group.rank(), source, length, layout, group.size())
            if part is not None:
                q, k, v = part.rows(query), part.columns(source_key), part.columns(source_value)
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
    layout, fused_op = _checked_call(group, seq_dim, op, query, key, value, is_causal, kwargs)
    if fused_op is not None:
        arguments = _ring_arguments(group, layout, query, key, kwargs)
        lse = _without_padding(logsumexp, out).contiguous()
        grads = ring_attention_backward(_BACKENDS[fused_op], grad_out, query, key, value, out, lse, **arguments)
        return (*grads, None) if fused_op == _EFFICIENT else grads
    rank, world_size = group.rank(), group.size()
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
                    **{name: part.rows(tensor) for name, tensor in rows.items()},
                    key=part.columns(source_key),
                    value=part.columns(source_value),
                    logsumexp=part.rows(logsumexp).contiguous(),
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
            like = [] if theirs is None else [theirs.columns(grad_k), theirs.columns(grad_v)]
            transfers.append(_Transfer(contribution, source, like, reader, group, key.device))
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


def _checked_call(
    group: dist.ProcessGroup,
    seq_dim: int,
    op: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    kwargs: dict[str, Any],
) -> tuple[Layout | None, str | None]:
    """The layout under a causal mask (None without one), and the name of a fused op (None for others)."""
    layout = None
    if is_causal:
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
    refuse_unsupported_sdpa(None, kwargs.get("dropout_p") or 0.0)
    namespace, _, name = str(op).partition(".")
    name = name.partition(".")[0].removesuffix("_backward")  # an aten op with or without overload
    is_fused = namespace == "aten" and name in _BACKENDS
    _refuse_different_shapes([query, key, value] if is_fused else [key, value], group)
    return layout, name if is_fused else None


def _refuse_different_shapes(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank if shapes differ between ranks and the group can compare them on the host."""
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


# torch's fused ops

_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_CUDNN = "_scaled_dot_product_cudnn_attention"
_BACKENDS = {
    "_scaled_dot_product_flash_attention": "FLASH_ATTENTION",
    _CPU_FLASH: "FLASH_ATTENTION",
    _EFFICIENT: "EFFICIENT_ATTENTION",
    _CUDNN: "CUDNN_ATTENTION",
}


def _fused_forward(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
) -> tuple[Any, ...]:
    """The results of a fused op; differentiable. There is no random state, since there is no dropout."""
    out, lse = ring_attention_by_backend(_BACKENDS[name], query, key, value, **arguments)
    if name == _CPU_FLASH:
        return out, lse
    state = query.new_empty(0, dtype=torch.int64)
    if name == _EFFICIENT:
        return out, lse, state, state
    if name == _CUDNN:
        lse = lse.unsqueeze(-1)
    return out, lse, None, None, query.size(2), key.size(2), state, state, query.new_empty(0)


def _ring_arguments(
    group: dist.ProcessGroup, layout: Layout | None, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a ring attention from those of a fused op, except tensors."""
    mask = next((kwargs[name] for name in ("attn_bias", "attn_mask") if kwargs.get(name) is not None), None)
    refuse_unsupported_sdpa(mask, 0.0)
    if kwargs.get("return_debug_mask"):
        raise NotImplementedError("no rank has the attention weights of the whole sequence: got return_debug_mask")
    return {
        "mesh": group,
        "mask": Full() if layout is None else Causal(),
        "layout": layout or Contiguous(),
        "scale": kwargs.get("scale"),
        "seq_len": (query.size(2) * group.size(), key.size(2) * group.size()),
    }


# Calls of other ops


class _Part(NamedTuple):
    """The queries and keys of one call of an op."""

    first_query: int
    """The call takes this rank's queries from here on."""
    keys: int | None
    """The number of leading keys; None for all."""
    is_causal: bool

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The call's part of a tensor of queries."""
        return tensor.narrow(2, self.first_query, tensor.size(2) - self.first_query) if self.first_query else tensor

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """The call's part of keys, values or their gradients."""
        return tensor if self.keys is None else tensor.narrow(2, 0, self.keys)


def _part_of(rank: int, source: int, length: int, layout: Layout | None, world_size: int) -> _Part | None:
    """The call of the queries of `rank` on the keys of `source`; None if no query sees them.

    `layout` is `Contiguous()` or `HeadTail()` under a causal mask, None without a mask.
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


def _add_columns(totals: tuple[torch.Tensor, ...], grads: list[torch.Tensor]) -> None:
    for total, grad in zip(totals, grads, strict=False):
        total.narrow(2, 0, grad.size(2)).add_(grad)


def _keys_and_values(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields (source rank, its keys, its values): this rank's own, then those of rank - 1, rank - 2, ...

    K/V come directly from their owner. The next transfer is in flight while the caller computes.
    """
    rank, world_size = group.rank(), group.size()
    own = key.contiguous(), value.contiguous()

    def start(hop: int) -> _Transfer:
        return _Transfer(own, (rank + hop) % world_size, own, (rank - hop) % world_size, group, key.device)

    transfer = start(1) if world_size > 1 else None
    yield rank, *own
    for hop in range(1, world_size):
        assert transfer is not None
        source_key, source_value = transfer.wait()
        transfer = start(hop + 1) if hop + 1 < world_size else None
        yield (rank - hop) % world_size, source_key, source_value


class _Transfer:
    """An asynchronous send of tensors to one rank and receive of tensors like others from another; either may be none.

    `device` is that of all tensors.
    """

    def __init__(
        self,
        outgoing: Sequence[torch.Tensor],
        to_rank: int,
        like: Sequence[torch.Tensor],
        from_rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._like = like
        self._sizes = [tensor.numel() * tensor.element_size() for tensor in like]
        # Bytes, because process groups do not support every dtype.
        sent = [tensor.contiguous().flatten().view(torch.uint8) for tensor in outgoing]
        self._sent = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *sent])
        self._received = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
        splits_in, splits_out = [0] * group.size(), [0] * group.size()
        splits_in[from_rank], splits_out[to_rank] = self._received.numel(), self._sent.numel()
        self._work = dist.all_to_all_single(
            self._received, self._sent, splits_in, splits_out, group=group, async_op=True
        )

    def wait(self) -> list[torch.Tensor]:
        """The received tensors, contiguous."""
        self._work.wait()
        pieces = self._received.split(self._sizes)
        return [piece.view(x.dtype).view(x.shape) for piece, x in zip(pieces, self._like, strict=True)]


class _SDPAMerger:
    """Merges the results of attention calls over different keys.

    Args:
        convert_to_f32: no effect: sums are always in float32 (float64 for float64 results).
        seq_dim: the sequence dim of `out`; calls with `partial` are about its last rows.

    Rows that saw no key (lse -inf) do not count; they are zero if no call saw a key.
    """

    def __init__(self, convert_to_f32: bool, seq_dim: int) -> None:
        self._seq_dim = seq_dim
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None
        self._dtypes = (torch.float32, torch.float32)
        self._lse_has_last_dim = False

    def step(self, out: torch.Tensor, lse: torch.Tensor, partial: bool) -> None:
        """Adds the result of a call.

        Args:
            out: (B, H, S, D) in torch's own calls; otherwise any shape whose last dim is not the sequence.
            lse: natural log of the softmax denominator, in out's shape without its last dim or with a last dim of 1;
                longer in dim 2 if padded by the efficient backend.
            partial: True if the result is about the last rows only.

        Raises:
            ValueError: shapes that do not fit.
            RuntimeError: the first result is partial.
        """
        if partial and self._state is None:
            raise RuntimeError("expected the first result to be of all rows, got partial=True")
        self._dtypes = (out.dtype, lse.dtype)
        self._lse_has_last_dim = lse.dim() == out.dim()
        lse = _without_padding(lse, out)
        if self._state is None:
            state_dtype = torch.promote_types(lse.dtype, torch.float32)
            # Copies: the tensors that ops return stay theirs.
            total_out, total_lse = (
                x.to(state_dtype, copy=True, memory_format=torch.contiguous_format) for x in (out, lse)
            )
            self._state = total_out, total_lse
            return
        total_out, total_lse = self._state
        if partial:
            rows = out.size(self._seq_dim)
            first = total_out.size(self._seq_dim) - rows
            total_out, total_lse = (x.narrow(self._seq_dim, first, rows) for x in (total_out, total_lse))
        if total_out.shape != out.shape:
            raise ValueError(f"expected a result of shape {tuple(total_out.shape)}, got {tuple(out.shape)}")
        out, lse, total_out, total_lse = (x[(None,) * max(4 - out.dim(), 0)] for x in (out, lse, total_out, total_lse))
        merge(total_out, total_lse, total_out, total_lse, [((0, out.size(2)), out, lse.contiguous())])

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(out, lse)` over all keys, in the form and dtypes of the last call.

        Raises:
            RuntimeError: no call was merged.
        """
        if self._state is None:
            raise RuntimeError("expected at least one result to have been merged")
        out, lse = (x.to(dtype) for x, dtype in zip(self._state, self._dtypes, strict=True))
        return out, lse.unsqueeze(-1) if self._lse_has_last_dim else lse


def _without_padding(lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """(B, H, S) of an LSE that may have a last dim of 1, or be padded to 32 rows by the efficient backend."""
    lse = lse.squeeze(-1) if lse.dim() == out.dim() else lse
    if out.dim() == 4 and lse.shape[:2] == out.shape[:2] and lse.size(-1) > out.size(2):
        lse = lse[..., : out.size(2)]
    if lse.shape != out.shape[:-1]:
        raise ValueError(f"expected an lse of shape {tuple(out.shape[:-1])}, got {tuple(lse.shape)}")
    return lse
