"""Sharding of whole tensors along the sequence, and unsharding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import RankFunction, Tensors, differentiated_once, refuse_batches
from cp_dtensor._torch.tensors import indexable
from cp_dtensor.api.buffers import positions_of_batch, take_shard
from cp_dtensor.comm.groups import Mesh, SequenceRanks, sequence_ranks
from cp_dtensor.engine.agreement import global_length, hash_of, length_of, warn_once
from cp_dtensor.engine.arguments import check_devices
from cp_dtensor.engine.call import Sharding, checked_layout, checked_length, refuse_other_lengths
from cp_dtensor.engine.contexts import around
from cp_dtensor.engine.gather_kv import select_rows
from cp_dtensor.spec.layouts import HeadTail, Layout, shard_lengths
from cp_dtensor.spec.masks import is_integer


def context_parallel_shard(
    mesh: Mesh, buffers: Sequence[torch.Tensor], buffer_seq_dims: Sequence[int], layout: Layout | None = None
) -> list[torch.Tensor]:
    """Return this rank's shards of tensors that every rank has whole.

    Args:
        mesh: the ranks that share the sequence, as for `context_parallel_attention`.
        buffers: tensors of any dtype and shape, equal on every rank; not changed.
        buffer_seq_dims: the sequence dim of each, negative counts from the end.
        layout: the tokens of each rank. None takes the layout of the context (or module) around the call, if that
            is over these ranks, else `HeadTail()`. With `MirroredBatch`, dim 0 is the batch.

    Returns:
        new tensors, in local order, differentiable: a rank's gradient of the whole tensor is zero outside of its own
        tokens, so that the sum over ranks is the gradient.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: `layout=None` in a backward inside of a context, which the call may belong to or not.

    Rank 0 of two ranks owns the first and the last quarter:

        context_parallel_shard(mesh, [torch.arange(8)], [0])  # rank 0: [0, 1, 6, 7]; rank 1: [2, 3, 4, 5]
    """
    ranks, layout = _ranks_and_layout("context_parallel_shard", mesh, layout)
    buffers, dims = checked_buffers(buffers, buffer_seq_dims, layout, whole=True)
    return [take_shard(tensor, dim, layout, ranks.rank, ranks.size) for tensor, dim in zip(buffers, dims, strict=True)]


@_torch.never_compiled
def context_parallel_unshard(
    mesh: Mesh, buffers: Sequence[torch.Tensor], buffer_seq_dims: Sequence[int], layout: Layout | None = None, *,
    grad: Literal["replicated", "partial"] = "replicated",
) -> list[torch.Tensor]:  # fmt: skip
    """Return whole tensors, on every rank, from the ranks' shards: the inverse of `context_parallel_shard`.

    Args:
        mesh: as for `context_parallel_shard`.
        buffers: this rank's shards, of the layout's lengths, which may differ between ranks.
        buffer_seq_dims: the sequence dim of each.
        layout: the layout of the shards; None as for `context_parallel_shard`.
        grad: "replicated": all ranks compute the same loss from the result, so each has the whole gradient and takes
            its own part. "partial": each rank computes its share of the loss, so gradients are summed over the ranks.

    Returns:
        new tensors, differentiable.

    Raises:
        TypeError, ValueError: arguments that do not fit. On all ranks alike: shards whose lengths are not the layout's,
            and ranks that differ in anything but lengths. (With a layout made for one length, nothing is exchanged: a
            wrong length is refused on the ranks that have it.)
        NotImplementedError: a call recorded as a graph (make_fx, torch.export); compiled code runs it between graphs.
        RuntimeError: as `context_parallel_shard`.
    """
    if grad not in ("replicated", "partial"):
        raise ValueError(f'expected grad to be "replicated" or "partial", got {grad!r}')
    ranks, layout = _ranks_and_layout("context_parallel_unshard", mesh, layout)
    buffers, dims = checked_buffers(buffers, buffer_seq_dims, layout)
    for buffer in buffers:
        check_devices("context_parallel_unshard", [buffer])
        if _torch.is_traced(buffer):
            raise NotImplementedError(
                "context_parallel_unshard cannot be part of a graph (make_fx, torch.export), which would not wait for "
                "the exchange between ranks: call it outside of the recorded code"
            )
    found: list[torch.Tensor] = []
    for index, (tensor, dim) in enumerate(zip(buffers, dims, strict=True)):
        found.append(_Unshard.apply(tensor, dim, layout, ranks, grad == "partial", f"one of {len(dims)} buffers"))
        _warn_of_whole(f"buffer {index}", tensor, found[-1], dim, layout, ranks)
    return found


def _warn_of_whole(
    what: str, shard: torch.Tensor, whole: torch.Tensor, dim: int, layout: Layout, ranks: SequenceRanks
) -> None:
    """Warn, once for each kind, of a shard that is equal on all ranks and varies along `dim`: it was whole already."""
    # Booleans, masks and position ids of packed documents may repeat from rank to rank.
    if ranks.size == 1 or not shard.numel() or not shard.is_floating_point():
        return

    def find() -> str | None:
        mine, every = indexable(shard), indexable(whole)
        others = (take_shard(every, dim, layout, rank, ranks.size) for rank in range(ranks.size))
        is_constant = torch.equal(mine, mine.narrow(dim, 0, 1).expand_as(mine))
        if is_constant or not all(torch.equal(mine, other) for other in others):
            return None
        return (
            f"context_parallel_unshard: {what} of shape {tuple(shard.shape)} is equal on all {ranks.size} ranks, which "
            f"makes {whole.size(dim)} tokens of it: expected this rank's shard. A buffer is whole again where its "
            "context was left, and so is what context_parallel_unshard has returned"
        )

    warn_once(ranks, ("unshard", shard.dtype, shard.shape, dim, type(layout)), find)


def local_positions(
    mesh: Mesh, seq_len: int, layout: Layout | None = None, *, batch_size: int | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the global positions of this rank's tokens, for position ids and RoPE.

    Args:
        mesh: as for `context_parallel_shard`.
        seq_len: global number of tokens.
        layout: as for `context_parallel_shard`.
        batch_size: rows of the batch; required by `MirroredBatch` only, where positions depend on the row.
        device: of the result; None is the default device, as for `torch.arange`.

    Returns:
        (local tokens,) int64; with `batch_size`, (batch_size, local tokens).

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: as `context_parallel_shard`.

        local_positions(mesh, 8)  # of two ranks, rank 0: [0, 1, 6, 7]
    """
    ranks, layout = _ranks_and_layout("local_positions", mesh, layout)
    seq_len = checked_length(seq_len)
    if batch_size is not None and checked_length(batch_size, "batch_size") == 0:
        raise ValueError("expected batch_size to be at least 1, got 0")
    if batch_size is None and len(layout.batch_groups(2)) > 1:
        raise ValueError(f"positions in {layout} depend on the batch row: pass batch_size")
    positions = positions_of_batch(layout, seq_len, ranks.rank, ranks.size, batch_size or 1, device)
    return positions if batch_size is None else positions.expand(batch_size, -1).contiguous()


def _ranks_and_layout(owner: str, mesh: Mesh, layout: Layout | None) -> tuple[SequenceRanks, Layout]:
    ranks = sequence_ranks(mesh)
    return ranks, _inherited_layout(owner, ranks) if layout is None else checked_layout(layout)


@_torch.never_compiled
def _inherited_layout(owner: str, ranks: SequenceRanks) -> Layout:
    """Return the layout of the context over these ranks, `HeadTail()` without one; refuse ranks in another order."""
    context = around(owner, ranks, layout=True)
    return HeadTail() if context is None else context.call.layout


def _checked_sequence(what: str, values: Iterable[Any] | None) -> list[Any]:
    """Return `values` as a list, [] for None; refuse a tensor, a string and a value that cannot be iterated over."""
    if values is None:
        return []
    if isinstance(values, (torch.Tensor, str)) or not isinstance(values, Iterable):
        raise TypeError(f"expected {what} to be a sequence such as a list, got {type(values).__name__}")
    return list(values)


def checked_buffers(
    buffers: Sequence[torch.Tensor] | None, buffer_seq_dims: Sequence[int] | None, layout: Layout, *,
    whole: bool = False,
) -> tuple[list[torch.Tensor], list[int]]:  # fmt: skip
    """Check tensors and their sequence dims; return both as lists, the dims counted from the front.

    Args:
        whole: True if the tensors are whole; their lengths must be of the layout then.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its index.
    """
    tensors = _checked_sequence("buffers", buffers)
    given = _checked_sequence("buffer_seq_dims", buffer_seq_dims)
    if len(tensors) != len(given):
        raise ValueError(
            f"expected buffer_seq_dims to have one sequence dim per buffer, got {len(given)} for {len(tensors)}"
        )
    dims, differs_by_row = [], len(layout.batch_groups(2)) > 1
    for index, (tensor, dim) in enumerate(zip(tensors, given, strict=True)):
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
            kind = type(tensor).__name__
            raise TypeError(f"buffer {index}: expected a plain torch.Tensor that every rank has whole, got {kind}")
        dims.append(checked_sequence_dim(f"buffer {index}", tensor, dim))
        if dims[-1] == 0 and differs_by_row:
            refuse_first_dim(f"buffer {index}", layout)
        if whole:
            refuse_other_lengths(layout, tensor.size(dims[-1]), f"buffer {index}")
    if differs_by_row and len({tensor.size(0) for tensor in tensors}) > 1:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"{layout} expects one batch size (dim 0) in all buffers, got shapes {shapes}")
    return tensors, dims


def checked_sequence_dim(what: str, tensor: torch.Tensor, dim: int) -> int:
    """Return the sequence dim of a tensor, counted from the front; refusals begin with `what`."""
    if tensor.is_nested:
        raise TypeError(f"{what}: expected a tensor whose sequence is one dim, got a nested tensor")
    is_quantized = getattr(tensor, "is_quantized", False)  # deprecated in torch 2.13
    if tensor.layout != torch.strided or is_quantized:
        kind = tensor.dtype if is_quantized else tensor.layout
        raise TypeError(f"{what}: expected a dense tensor, got one of {kind}")
    if not is_integer(dim):
        raise TypeError(f"{what}: expected an integer sequence dim, got {dim!r}")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{what}: sequence dim {dim} is out of range for shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def refuse_first_dim(what: str, layout: Layout) -> None:
    """Refuse layouts that divide rows of the batch differently, where the sequence dim is 0."""
    if len(layout.batch_groups(2)) > 1:
        raise ValueError(
            f"{what}: {layout} divides rows of the batch (dim 0) differently, so it needs a batch dim before the "
            "sequence dim; got sequence dim 0"
        )


class _Unshard(RankFunction):
    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, dim: int, layout: Layout, ranks: SequenceRanks, sum_gradients: bool, which: str
    ) -> torch.Tensor:
        shape = ", ".join(":" if each == dim else str(size) for each, size in enumerate(shard.shape))
        kind = f"{which}, {shard.dtype} ({shape}), {layout}, grad {'partial' if sum_gradients else 'replicated'}"
        lengths, seq_len = _lengths(shard.size(dim), kind, layout, ranks, shard.device)
        ctx.arguments = (dim, layout, ranks, sum_gradients, lengths)
        whole = shard.new_empty((*shard.shape[:dim], seq_len, *shard.shape[dim + 1 :]))
        rows = shard.movedim(dim, 0)
        padded = torch.cat([rows, rows.new_zeros(max(lengths) - rows.size(0), *rows.shape[1:])])
        if padded.numel():
            # As bytes: process groups do not support every dtype.
            rows = ranks.gather(padded.view(-1).view(torch.uint8)).view(padded.dtype).view(-1, *padded.shape[1:])
            rows = indexable(rows.movedim(0, dim))
            select_rows(rows, indexable(whole), dim, layout, seq_len, len(lengths), to_shards=False)
        return whole

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, _saved: Tensors, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dim, layout, ranks, sum_gradients, lengths = ctx.arguments
        world_size, rank = len(lengths), ranks.rank
        if not sum_gradients or world_size == 1:
            return take_shard(grad, dim, layout, rank, world_size), None, None, None, None, None
        refuse_batches(grad)
        blocks = grad.new_empty(world_size * max(lengths), *grad.movedim(dim, 0).shape[1:])
        if blocks.numel():
            select_rows(grad, blocks.movedim(0, dim), dim, layout, grad.size(dim), world_size, to_shards=True)
        own = ranks.reduce_scatter(blocks.unflatten(0, (world_size, max(lengths))))
        return own[: lengths[rank]].movedim(0, dim).contiguous(), None, None, None, None, None


def gathered_shards(
    shard: torch.Tensor, layout: Layout, ranks: SequenceRanks, what: str, *, dim: int = 1, has_gradient: bool = False
) -> torch.Tensor:
    """Return the whole of a tensor on every rank; errors name it as `what`. A gradient is summed over the ranks."""
    with torch.set_grad_enabled(has_gradient and torch.is_grad_enabled()):
        whole: torch.Tensor = _Unshard.apply(shard, dim, layout, ranks, has_gradient, what)
    return whole


def _lengths(
    length: int, kind: str, layout: Layout, ranks: SequenceRanks, device: torch.device
) -> tuple[list[int], int]:
    """Return the local lengths of all ranks, and the global length; `kind` must be equal on all ranks."""
    if layout.only_length is not None:
        seq_len = length_of(Sharding(ranks, layout), length)
        return list(shard_lengths(layout, seq_len, ranks.size)), seq_len
    lengths, kinds = map(list, zip(*ranks.gather_integers([length, hash_of(kind)], device), strict=True))
    usual = max(kinds, key=kinds.count)
    if odd := ", ".join(str(rank) for rank, each in enumerate(kinds) if each != usual):
        raise ValueError(
            f"expected shards that differ between ranks in their lengths alone; what rank {odd} unshards differs from "
            f"the others (here: {kind})"
        )
    return lengths, global_length(lengths, layout, "shard")
