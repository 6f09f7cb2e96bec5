"""`context_parallel`, the context manager."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import torch

from cp_dtensor import _torch
from cp_dtensor.api.active_context import ActiveContext, checked_context_sinks, checked_deterministic, innermost_context
from cp_dtensor.api.buffers import Buffer, InPlaceShard, check_in_place, refuse_different_buffers
from cp_dtensor.api.deprecated import renamed_keywords
from cp_dtensor.api.patches import entered
from cp_dtensor.api.sharding import checked_buffers, checked_sequence
from cp_dtensor.engine.config import AttentionConfig, Mesh, checked_length, checked_mask, refuse_other_lengths
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask

F = TypeVar("F", bound=Callable[..., Any])


class context_parallel(ContextDecorator):
    """Inside of the `with` block, the sequence is sharded over the ranks of `mesh`.

    On entry, each tensor of `buffers` becomes this rank's shard, in place. Inside, `F.scaled_dot_product_attention`,
    also in torch's modules such as `nn.MultiheadAttention(..., need_weights=False)`, takes plain tensors as this rank's
    shards and attends to the whole sequence. On exit, also after an exception, buffers are restored bit for bit.

    The context holds in the thread that enters it and in the threads of its backward; not in forked processes, such as
    a DataLoader's workers. Backward may run inside or after the block, and so may the recomputation of
    `torch.utils.checkpoint`, in either mode. Contexts nest: inside of the inner one its mesh and settings hold. As a
    decorator, the context is entered at every call of the function.

    Args:
        mesh: the ranks that share the sequence: a DeviceMesh of one dim or a process group; or a DeviceMesh of two
            dims. Of these the one whose name begins with "ulysses" is the inner axis, otherwise the second.
        buffers: tensors of any dtype, whole and equal on every rank: all that have a sequence dim, also position ids
            and RoPE tables, and the very objects that the code inside uses (a slice or a copy is another tensor). Shift
            labels before they are sharded.
            A leaf tensor may require grad: inside it is a leaf of the local shape. On exit its `.grad` has the whole
            shape, zero outside of this rank's tokens, so that the sum over ranks is the gradient. Other tensors that
            require grad are refused: `context_parallel_shard` is differentiable.
            Changes made inside to a buffer, for example by an optimizer, end with the context. Copies made inside
            (`state_dict`, `deepcopy`) hold shards. Hooks of the leaf do not run for its shard, so
            DistributedDataParallel does not reduce its gradient: index a parameter by `local_positions` there.
            Buffers of a module are allowed; DistributedDataParallel does not broadcast shards.
        buffer_seq_dims: the sequence dim of each buffer, negative counts from the end.
        no_restore_buffers: those of `buffers` (the same objects) that stay sharded after exit; their whole contents
            are freed on entry.
        method: "ring", "ulysses", "hybrid" or "auto" (see `context_parallel_attention`).
        mask: which query sees which key in all SDPA inside, by global position, such as `Documents(cu_seqlens)`. A key
            is seen if this mask and the `is_causal` and `attn_mask` of the call all allow it. An `attn_mask` has this
            rank's query rows, in `layout` order, and the keys of the whole sequence, in the order of their positions;
            it may be one of `buffers`. None: no mask.
        layout: which rank owns which tokens; None is `HeadTail()`. Functions and modules of this package inside, over
            the same ranks, take mask and layout over where they have `mask=None` (`Full()`: no mask) or `layout=None`.
        rotate_method: how K/V travel in rings: "auto", "symm_mem", "allgather" or "alltoall" (see
            `set_rotate_method`); None is the process default.
        seq_len: a global length, or a tuple of several, that attention runs over besides those of the buffers.
        sinks: (H,), any floating dtype: a logit of each of this rank's query heads that counts in the softmax
            denominator of all SDPA inside (see `context_parallel_attention`). Its gradient is the share of this rank's
            queries. Not for DTensors over these ranks, `varlen_attn`, FlexAttention and compiled code: these are
            refused.
        deterministic: True: equal inputs give equal bits on GPUs too, in SDPA and `varlen_attn` (see
            `context_parallel_attention`).
        debug: True: on entry the ranks compare the buffers, and at every attention call what must agree; a disagreement
            names the rank.

    Raises:
        TypeError, ValueError: on creation, for arguments that do not fit, before any collective; with `debug`, on
            entry, for buffers that differ between ranks, on every rank alike.
        RuntimeError: on entry, if it is already entered, or was and has `no_restore_buffers`, or inside of a
            `torch.compile`d function; on exit, out of order.

    Attention over lengths other than those of the buffers and `seq_len` is allowed; the ranks then exchange their
    local lengths in one small collective per call. On GPUs, a length that differs from one of those by about the
    number of ranks or less is refused unless `seq_len` has it, since both may have equal shards on some ranks.

    Two ranks, 8 tokens, `HeadTail()`: rank 0 has the tokens 0, 1, 6, 7 and rank 1 the tokens 2, 3, 4, 5.

        x = torch.arange(8.0).view(1, 1, 8, 1)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            x.flatten()  # on rank 0: 0, 1, 6, 7
            out = F.scaled_dot_product_attention(torch.zeros_like(x), x, x, is_causal=True)
        out.flatten()  # on rank 0: 0, 0.5, 3, 3.5, the means of the tokens up to each
        x.shape  # (1, 1, 8, 1)

    Source: torch.distributed.tensor.experimental.context_parallel has the same arguments `mesh`, `buffers`,
    `buffer_seq_dims` and `no_restore_buffers`.
    """

    @renamed_keywords(seq_lens="seq_len")
    def __init__(
        self, mesh: Mesh, *, buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None, no_restore_buffers: Collection[torch.Tensor] | None = None,
        method: str = "auto", mask: Mask | None = None, layout: Layout | None = None, rotate_method: str | None = None,
        seq_len: int | tuple[int, ...] | None = None, sinks: torch.Tensor | None = None, deterministic: bool = False,
        debug: bool = False,
    ) -> None:  # fmt: skip
        checked_deterministic(deterministic)
        self._sinks = None if sinks is None else checked_context_sinks(sinks)
        settings = AttentionConfig.of(mesh, method, layout, rotate_method, debug=debug, deterministic=deterministic)
        self._settings = settings if mask is None else replace(settings, mask=checked_mask(mask, False))
        layout = self._settings.layout
        tensors = checked_sequence("buffers", () if buffers is None else buffers)
        dims = checked_buffers(tensors, () if buffer_seq_dims is None else buffer_seq_dims, layout, whole=True)
        stay_sharded = _identities(tensors, () if no_restore_buffers is None else no_restore_buffers)
        ranks = self._settings.ranks
        check_in_place(tensors, dims, ranks.global_ranks())
        self._buffers = [
            Buffer(tensor, dim, layout, ranks, restore=id(tensor) not in stay_sharded)
            for tensor, dim in zip(tensors, dims, strict=True)
        ]
        lengths: Any = () if seq_len is None else seq_len
        if not isinstance(lengths, Iterable) or isinstance(lengths, torch.Tensor):
            lengths = (lengths,)
        self._seq_len = tuple(checked_length(length) for length in lengths)
        for length in self._seq_len:
            refuse_other_lengths(layout, length, "seq_len")
        self._open: tuple[AbstractContextManager[None], ActiveContext] | None = None
        self._entered_before = False

    def __call__(self, func: F) -> F:
        """`func`, with this context entered at every call.

        Raises:
            TypeError: a generator or a coroutine function, whose body runs after the call has returned.
        """
        if inspect.isgeneratorfunction(func) or inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
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
        lengths = tuple(sorted({*self._seq_len, *(each.tensor.size(each.dim) for each in self._buffers)}))
        differs_by_row = self._buffers and len(self._settings.layout.batch_groups(2)) > 1
        batch_size = self._buffers[0].tensor.size(0) if differs_by_row else None
        settings = replace(self._settings, declared_lengths=lengths or None, batch_size=batch_size, lengths_vary=True)
        context = ActiveContext(settings, tuple(map(InPlaceShard, self._buffers)), self._sinks)
        manager = entered(context)
        manager.__enter__()
        self._open = manager, context
        self._entered_before = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is None:
            raise RuntimeError("this context_parallel is not entered")
        manager, context = self._open
        if innermost_context() is not context:
            raise RuntimeError(
                "context_parallel contexts must be left in the reverse order of entering them, in the same thread"
            )
        self._open = None
        manager.__exit__(kind, error, trace)


def _identities(buffers: list[torch.Tensor], no_restore: Collection[torch.Tensor]) -> set[int]:
    """ids of the buffers to leave sharded.

    Raises:
        ValueError: a buffer listed twice, or one to leave sharded that is no buffer.
    """
    if isinstance(no_restore, torch.Tensor):
        raise TypeError("expected no_restore_buffers to be a collection of tensors, got one tensor")
    listed = [id(tensor) for tensor in buffers]
    for index, identity in enumerate(listed):
        if identity in listed[:index]:
            raise ValueError(f"buffer {index} is the same tensor as buffer {listed.index(identity)}: list it once")
    for tensor in no_restore:
        if id(tensor) not in listed:
            raise ValueError(
                "expected no_restore_buffers to be among buffers (the same objects); got one of shape "
                f"{tuple(tensor.shape)} that is not"
            )
    return {id(tensor) for tensor in no_restore}
