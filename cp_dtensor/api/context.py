"""The context manager that most users touch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ContextDecorator, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import torch

from cp_dtensor import _torch
from cp_dtensor.api.active_context import ActiveContext, innermost_context
from cp_dtensor.api.buffers import (
    Buffer,
    LocalContents,
    refuse_different_buffers,
    refuse_non_leaf,
    refuse_shards,
    refuse_wrapper,
)
from cp_dtensor.api.deprecated import renamed_keywords
from cp_dtensor.api.patches import entered
from cp_dtensor.api.sharding import check_whole_lengths, checked_buffers, checked_sequence
from cp_dtensor.engine.config import AttentionConfig
from cp_dtensor.engine.validation import Mesh, checked_length, checked_mask, refuse_other_lengths
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask

F = TypeVar("F", bound=Callable[..., Any])


class context_parallel(ContextDecorator):
    """Inside of the `with` block, the sequence is sharded over the ranks of `mesh`.

    On entry, `buffers` are sharded in place: each tensor holds this rank's tokens, in `layout` order. Inside,
    `F.scaled_dot_product_attention` on plain tensors means "these are my shards" and attends to the whole sequence;
    so do torch's modules that call it, such as `nn.MultiheadAttention(..., need_weights=False)` and
    `nn.TransformerEncoderLayer`. SDPA under `torch.vmap` is refused. On exit, also after an exception, buffers are
    restored bit for bit.

    Only the thread that enters is in the region, and the threads in which autograd runs its backward; forks of the
    process, such as a DataLoader's workers, are not. Backward may run inside or after; recomputation under
    `torch.utils.checkpoint` likewise, in either mode. Contexts nest: the inner one's mesh and settings hold inside of
    it. As a decorator it is entered at every call of the function.

    Args:
        mesh: the ranks that share the sequence: a DeviceMesh of one dim or a process group; or a DeviceMesh of two
            dims, of which the one whose name begins with "ulysses" is the inner axis, otherwise the second.
        buffers: tensors that every rank has whole and equal, of any dtype: the very objects that the code inside uses
            (a slice or a copy is another tensor), all that have a sequence dim, position ids and RoPE tables too.
            Labels are shifted before they become shards. Leaf tensors may require grad: inside they are leaves
            of the local shape, and on exit `.grad` has the full shape, zero outside of this rank's tokens, so that its
            sum over the ranks is the gradient. Other tensors that require grad are refused; shard those with
            `context_parallel_shard`, which is differentiable. Changes that are made inside to a buffer, by an optimizer
            say, end with the context; copies that are made inside (`state_dict`, `deepcopy`) have shards; hooks of the
            leaf do not see gradients of its shard, so DistributedDataParallel does not reduce them: index a parameter
            by `local_positions` there. Module buffers, which it makes equal to those of its first rank, may be among
            these buffers; it leaves shards alone.
        buffer_seq_dims: the sequence dim of each buffer, negative counts from the end.
        no_restore_buffers: those of `buffers` (the same objects) that stay sharded after exit; their full contents
            are freed on entry.
        method: "ring", "ulysses", "hybrid" or "auto" (see `context_parallel_attention`).
        mask: which query may see which key, by global position, in all SDPA inside, as a value such as
            `Documents(cu_seqlens)`; together with a call's `is_causal` and `attn_mask`, what all of them show. (The
            `attn_mask` of a call has this rank's query rows, in `layout` order, and the keys of the whole sequence, in
            the order of their positions; it may be one of `buffers`.)
        layout: which rank owns which tokens, `HeadTail()` if None. Functions that are called inside do not take it
            over: pass it to `context_parallel_unshard`, `local_positions` and their like as well (without one they are
            refused, unless this is `HeadTail()`).
        rotate_method: how K/V travel in rings: "auto", "symm_mem", "allgather" or "alltoall" (see
            `set_rotate_method`); the process default if None.
        seq_len: a global length, or several, that attention runs over besides those of the buffers.
        debug: on entry let the ranks compare the buffers, and at every attention call what must agree; a disagreement
            names the rank.

    Raises:
        TypeError, ValueError: on creation, for arguments that do not fit, before any collective; with `debug`, on
            entry, for buffers that differ between ranks, on every rank alike.
        RuntimeError: on entry, if it is already entered, or was and has `no_restore_buffers`, or inside of a
            `torch.compile`d function; on exit, out of order.

    Attention over other lengths than those of the buffers and `seq_len` is allowed; the ranks then exchange their
    local lengths in one small collective per call. Only, on GPUs, lengths within about the number of ranks of those
    must be among `seq_len`, since some ranks could not tell them apart; they are refused otherwise.
    """

    @renamed_keywords(seq_lens="seq_len")
    def __init__(
        self,
        mesh: Mesh,
        *,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[torch.Tensor] | None = None,
        method: str = "auto",
        mask: Mask | None = None,
        layout: Layout | None = None,
        rotate_method: str | None = None,
        seq_len: int | tuple[int, ...] | None = None,
        debug: bool = False,
    ) -> None:
        settings = AttentionConfig.of(mesh, method, layout, rotate_method, debug=debug)
        self._settings = settings if mask is None else replace(settings, mask=checked_mask(mask, False))
        layout = self._settings.layout
        tensors = checked_sequence("buffers", () if buffers is None else buffers)
        dims = checked_buffers(tensors, () if buffer_seq_dims is None else buffer_seq_dims, layout)
        check_whole_lengths(tensors, dims, layout)
        kept_sharded = _identities(tensors, () if no_restore_buffers is None else no_restore_buffers)
        for index, tensor in enumerate(tensors):
            refuse_non_leaf(index, tensor)
            refuse_wrapper(index, tensor)
        ranks = self._settings.ranks
        refuse_shards(tensors, dims, ranks.global_ranks())
        self._buffers = [
            Buffer(tensor, dim, layout, ranks, restore=id(tensor) not in kept_sharded)
            for tensor, dim in zip(tensors, dims, strict=True)
        ]
        self._seq_len = _lengths(seq_len)
        for length in self._seq_len:
            refuse_other_lengths(layout, length, "seq_len")
        self._open: ExitStack | None = None
        self._context: ActiveContext | None = None
        self._entered_before = False

    def __call__(self, func: F) -> F:
        """`func`, called inside of this context.

        Raises:
            TypeError: a generator or a coroutine function, whose body runs when such a call has ended already.
        """
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_kind(func) for is_kind in kinds):
            raise TypeError(
                "context_parallel decorates plain functions: got a generator or coroutine function, "
                f"{getattr(func, '__qualname__', func)}, whose body would run after the context has been left; open "
                "the context inside of it"
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        _torch.refuse_in_compiled_function("context_parallel")
        if self._open is not None:
            raise RuntimeError("this context_parallel is already entered; make another one to nest")
        if self._entered_before and any(not buffer.restore for buffer in self._buffers):
            raise RuntimeError(
                "this context_parallel was entered before and has left its no_restore_buffers sharded; make another one"
            )
        if self._settings.debug:
            refuse_different_buffers(self._buffers, self._settings.ranks)
        lengths = tuple(sorted({*self._seq_len, *(buffer.length for buffer in self._buffers)}))
        differs_by_row = self._buffers and len(self._settings.layout.batch_groups(2)) > 1
        batch_size = self._buffers[0].tensor.size(0) if differs_by_row else None
        settings = replace(self._settings, declared_lengths=lengths or None, batch_size=batch_size, lengths_vary=True)
        context = ActiveContext(settings, tuple(LocalContents(buffer) for buffer in self._buffers))
        with ExitStack() as stack:
            stack.enter_context(entered(context))
            self._open, self._context = stack.pop_all(), context
        self._entered_before = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is None:
            raise RuntimeError("this context_parallel is not entered")
        if innermost_context() is not self._context:
            raise RuntimeError(
                "context_parallel contexts must be left in the reverse order of entering them, in the same thread"
            )
        stack, self._open, self._context = self._open, None, None
        stack.__exit__(kind, error, trace)


def _lengths(seq_len: Any) -> tuple[int, ...]:
    """The global lengths that `seq_len` names: none, one, or those of a sequence."""
    if seq_len is None:
        return ()
    lengths = seq_len if isinstance(seq_len, Iterable) and not isinstance(seq_len, torch.Tensor) else (seq_len,)
    return tuple(checked_length(length) for length in lengths)


def _identities(buffers: list[torch.Tensor], no_restore: Collection[torch.Tensor]) -> set[int]:
    """ids of the buffers to leave sharded.

    Raises:
        ValueError: a buffer listed twice, or one to leave sharded that is no buffer.
    """
    if isinstance(no_restore, torch.Tensor):
        raise TypeError("expected no_restore_buffers to be a collection of tensors, got one tensor")
    known = [id(tensor) for tensor in buffers]
    for index, identity in enumerate(known):
        if identity in known[:index]:
            raise ValueError(f"buffer {index} is the same tensor as buffer {known.index(identity)}: list it once")
    for tensor in no_restore:
        if id(tensor) not in known:
            raise ValueError(
                "expected no_restore_buffers to be among buffers (the same objects); got one of shape "
                f"{tuple(tensor.shape)} that is not"
            )
    return {id(tensor) for tensor in no_restore}
