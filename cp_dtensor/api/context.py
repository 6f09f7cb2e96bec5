"""`context_parallel`, its entry, and all patches of torch that hold while a context is open.

The first context that is entered in the process installs the patches and the last one that is left removes them, also
after an exception. Each patch looks up the context of its thread and does nothing where there is none.
"""

from __future__ import annotations

import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from cp_dtensor import _torch
from cp_dtensor.api.buffers import InPlaceShard, buffers_of, is_shard_now, refuse_shards
from cp_dtensor.api.flex_attention import flex_redirection
from cp_dtensor.api.functional import takes_options
from cp_dtensor.api.hooks import hooks_held, loaded_hooks
from cp_dtensor.api.interception import TORCHS_TOO, SharedInstallation, intercepted, refuse_torchs_context_parallel
from cp_dtensor.api.sdpa import (
    check_multihead_attention,
    dispatcher_installation,
    lower_right_sdpa,
    refuse_nested,
    sdpa_in_context,
)
from cp_dtensor.api.sharding import checked_buffers
from cp_dtensor.api.varlen import varlen_attn_in_context
from cp_dtensor.comm.calls import END_OF_CONTEXT, calls_of
from cp_dtensor.comm.groups import Mesh
from cp_dtensor.engine.agreement import compare, described, facts_of_options, options_in_signature, warn_once
from cp_dtensor.engine.arguments import checked_of_heads
from cp_dtensor.engine.call import OF_CALLS, OF_CONTEXTS, Call, ContextOptions, checked_lengths, refuse_unknown
from cp_dtensor.engine.contexts import ALONE, OpenContext, current, innermost, opened, queries_alone
from cp_dtensor.spec.layouts import Contiguous
from cp_dtensor.spec.logs import log_once

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


class context_parallel(ContextDecorator):
    """Shard the sequence over the ranks of `mesh` inside of the `with` block.

    On entry, each tensor of `buffers` becomes this rank's shard, in place. Inside, `F.scaled_dot_product_attention`,
    also in torch's modules such as `nn.MultiheadAttention(..., need_weights=False)`, takes plain tensors as this rank's
    shards and attends to the whole sequence. On exit, also after an exception, buffers are restored bit for bit.

    The context holds in the thread that enters it and in the threads of its backward; not in forked processes, such as
    a DataLoader's workers. Backward may run inside or after the block, and so may the recomputation of
    `torch.utils.checkpoint`, in either mode. What autograd saves of a buffer, also by hooks or by
    `ctx.save_for_backward`, stays the shard. Other Python code that runs after exit, such as a gradient hook that reads
    a buffer from its closure or an autograd function that reads its own `ctx.name = buffer`, sees the whole tensor: let
    it keep `buffer.detach()`. Contexts nest: inside of the inner one its arguments hold. As a decorator, the context is
    entered at every call of the function.

    Args:
        mesh, method, rotate_method, options: as for `context_parallel_attention`.
        buffers: tensors of any dtype, whole and equal on every rank: all that have a sequence dim, also position ids
            and RoPE tables, and the very objects that the code inside uses (a slice or a copy is another tensor). Shift
            labels before they are sharded. Tensors that require grad are refused: `context_parallel_shard` is
            differentiable. A buffer may be set to require grad inside; its `.grad` is that of the shard, and is there
            until the context ends, so call backward inside. Changes made inside to a buffer end with the context.
            Copies made inside (`state_dict`, `deepcopy`) hold shards. Index a parameter by `local_positions`. Buffers
            of a module are allowed; DistributedDataParallel does not broadcast shards.
        buffer_seq_dims: the sequence dim of each buffer, negative counts from the end.
        no_restore_buffers: those of `buffers` (the same objects) that stay sharded after exit; their whole contents
            are freed on entry.
        mask: as for `context_parallel_attention`, for all SDPA inside; None: no mask. An `attn_mask` may be one of
            `buffers`.
        layout: the tokens of each rank; None is `HeadTail()`. Functions and modules of this package inside, over
            the same ranks, take mask and layout over where they have `mask=None` (`Full()`: no mask) or `layout=None`.
        seq_len: a global length, or a tuple of several, that attention runs over besides those of the buffers.
        sinks: as for `context_parallel_attention`, for all SDPA inside. Refused for DTensors over these ranks,
            `varlen_attn`, FlexAttention and in compiled code.
        debug: True: on every entry the ranks compare configuration and buffers, at every attention call what must
            agree, and at passes of attention and exits that all do the same; a disagreement names the rank. False: at
            the first entry and the first attention call of each kind.

    Raises:
        TypeError, ValueError: on creation, for arguments that do not fit, before any collective; on entry, for
            buffers that are shards over these ranks by now, and for configurations and buffers that differ between
            ranks, on every rank alike.
        RuntimeError: on entry, if it is already entered, or inside of a `torch.compile`d function, or while torch's own
            context parallelism is open; on exit, out of order, or a `PeerError`: ranks have made different calls.

    Attention runs over the lengths of the buffers and of `seq_len`, and over any other of which all ranks have equally
    many tokens. Two lengths of which some rank has equally many tokens are refused: pad one. In the first call of each
    kind the ranks also compare q, k and v: if these are equal on all ranks, they were never sharded, which is refused
    (without a mask: warned of).

    Two ranks, 8 tokens, `HeadTail()`: rank 0 has the tokens 0, 1, 6, 7 and rank 1 the tokens 2, 3, 4, 5.

        x = torch.arange(8.0).view(1, 1, 8, 1)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            x.flatten()  # on rank 0: 0, 1, 6, 7
            out = F.scaled_dot_product_attention(torch.zeros_like(x), x, x, is_causal=True)
        out.flatten()  # on rank 0: 0, 0.5, 3, 3.5, the means of the tokens up to each
        x.shape  # (1, 1, 8, 1)

    Source: torch.distributed.tensor.experimental.context_parallel, which has the same first four arguments.
    """

    @takes_options(*OF_CALLS)
    def __init__(
        self, mesh: Mesh, *, buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None, no_restore_buffers: Collection[torch.Tensor] | None = None,
        seq_len: int | tuple[int, ...] | None = None, sinks: torch.Tensor | None = None,
        **options: Unpack[ContextOptions],
    ) -> None:  # fmt: skip
        _torch.refuse_in_compiled_function("context_parallel")  # Dynamo of torch 2.11 fails in what follows
        refuse_unknown("context_parallel", options, OF_CONTEXTS)
        self._beside = {} if sinks is None else {"sinks": checked_of_heads("sinks", sinks)}
        self._call = call = replace(Call.of(mesh, **options), in_context=True)
        tensors, dims = checked_buffers(buffers, buffer_seq_dims, call.layout, whole=True)
        self._buffers = buffers_of(tensors, dims, no_restore_buffers, call)
        self._seq_len = checked_lengths(call.layout, seq_len)
        self._open: tuple[AbstractContextManager[None], OpenContext] | None = None

    def __call__(self, func: F) -> F:
        """Return `func`, with this context entered at every call.

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
        refuse_shards(self._buffers)
        refuse_torchs_context_parallel()
        if not self._buffers:
            _warn_of_other_layout(self._call, self._seq_len)
        self._compare_ranks()
        lengths = tuple(sorted({*self._seq_len, *[each.tensor.size(each.dim) for each in self._buffers]}))
        is_shared = self._call.ranks.size > 1  # a rank alone has all tokens of each row
        differs_by_row = self._buffers and is_shared and len(self._call.layout.batch_groups(2)) > 1
        batch_size = self._buffers[0].tensor.size(0) if differs_by_row else None
        call = replace(self._call, lengths=lengths, batch_size=batch_size)
        context = OpenContext(call, tuple(map(InPlaceShard, self._buffers)), self._beside)
        manager = entered(context)
        manager.__enter__()
        self._open = manager, context

    def _compare_ranks(self) -> None:
        """Refuse options and buffers that differ between ranks: at the first entry of each kind, or with `debug`."""
        call, buffers, x = self._call, self._buffers, None
        signature: list[object] = ["context", *options_in_signature(call), *self._beside, len(self._seq_len)]
        for each in buffers:
            if _torch.is_traced(each.tensor):
                return
            signature += each.tensor.dtype, each.dim
            x = each.tensor if each.tensor.is_cuda else x

        def facts() -> dict[str, object]:  # once for each kind of context
            shapes = ", ".join(f"{tuple(each.tensor.shape)} along dim {each.dim}" for each in buffers)
            log_once(
                "api", logging.INFO,
                f"context_parallel over {call.ranks.size} ranks, method {call.method!r}, {call.layout}, mask "
                f"{call.mask}, buffers {shapes or 'none'}",
            )  # fmt: skip
            beside = {name: described(tensor, values=True) for name, tensor in self._beside.items()}
            found = {"seq_len": self._seq_len, **beside, "the number of buffers": len(buffers)}
            for index, each in enumerate(buffers):
                kind = f"{described(each.tensor)}, sequence dim {each.dim}"
                found[f"buffer {index}"] = f"{kind}, contents {_torch.content_hash(each.tensor) % (1 << 48):012x}"
            return {**facts_of_options(call), **found}

        compare(call, tuple(signature), x, facts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is None:
            if error is not None:  # Dynamo of torch 2.11 also leaves what it could not enter
                return
            raise RuntimeError("this context_parallel is not entered")
        manager, context = self._open
        if innermost() is not context:
            raise RuntimeError(
                "context_parallel contexts must be left in the reverse order of entering them, in the same thread"
            )
        self._open = None
        if error is not None:
            _add_hint(error, context)
        manager.__exit__(kind, error, trace)
        if error is not None:
            return
        for calls in calls_of(context.call.ranks):  # the end of a step (see `Calls.begin`)
            calls.begin(END_OF_CONTEXT, ends_step=True, debug=context.call.debug)
        if "model" in context.seen and "attention" not in context.seen:
            warnings.warn(
                "a model of transformers ran inside of context_parallel, and no attention call was seen there: each "
                "rank has attended to its own shard only, if to anything. docs/limits.md lists what a context sees",
                stacklevel=2,
            )


# Hints on torch's own errors that are raised inside of a context

_SHAPES = re.compile(r"must match|invalid for input of size|cannot be multiplied|[Ee]xpected|out of bounds|mismatch")


def _add_hint(error: BaseException, context: OpenContext) -> None:
    """Add a hint to torch's error about shapes if it names the local and the whole length of buffers.

    Errors of reshapes name the whole length only. The hint is a note (Python 3.11), or in Python 3.10 the last line of
    the message.
    """
    text = str(error)
    if not isinstance(error, (RuntimeError, IndexError, ValueError)) or not _SHAPES.search(text) or _is_ours(error):
        return
    numbers, shards = {*map(int, re.findall(r"\d+", text))}, []
    for index, shard in enumerate(context.buffers):
        local, whole = shard.buffer.tensor.size(shard.buffer.dim), shard.whole_shape[shard.buffer.dim]
        if local != whole and whole in numbers and (local in numbers or "invalid for input of size" in text):
            shards.append(f"buffer {index} is a shard of length {local} of {whole}")
    if not shards:
        return
    hint = (
        f"In this context_parallel {', '.join(shards)}. Was a tensor of the whole length made before the context was "
        "entered? List it in buffers (the very object, no copy), or shard it by context_parallel_shard"
    )
    if hasattr(error, "add_note"):
        if hint not in getattr(error, "__notes__", ()):  # nested contexts
            error.add_note(hint)
    elif error.args and hint not in text:
        error.args = (f"{error.args[0]}\n{hint}", *error.args[1:])


def _is_ours(error: BaseException) -> bool:
    """Return whether this package has raised the error, or called the function that did."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__", "")).startswith("cp_dtensor.")


# Entry and patches


@contextmanager
def entered(context: OpenContext) -> Iterator[None]:
    """Make this the context of the current thread, and its buffers their shards, while open.

    Contexts nest. One may be entered again later, for a recompute.
    """
    with ExitStack() as stack:  # takes everything back if a part fails
        stack.enter_context(_installation.held())
        for buffer in context.buffers:
            stack.enter_context(buffer.in_place())
        stack.enter_context(_torch.present_hooks_detached(is_shard_now))
        stack.enter_context(opened(context))
        for buffer in context.buffers:
            buffer.release_whole()  # last, since it cannot be undone
        yield


def _patches() -> Iterator[AbstractContextManager[object]]:
    """Yield the patches, in the order of their installation."""
    yield dispatcher_installation.held()
    yield intercepted(sdpa_in_context)
    yield _torch.jagged_sdpa_checked(refuse_nested)
    yield _torch.torchs_modules_checked(_refuse_torchs_modules)
    yield _torch.checkpointed_functions_bound(_bound_to_context)
    yield _torch.hooks_detached(is_shard_now)
    yield _torch.compiled_code_kept_apart(_variant_of_compiled_code, _check_compiled)
    yield _torch.lower_right_bias_redirected(lower_right_sdpa)
    yield flex_redirection.held()
    yield _torch.varlen_attn_overridden(varlen_attn_in_context)
    yield _torch.multihead_attention_ends_in_sdpa(check_multihead_attention)
    yield _torch.module_buffers_broadcast_but(is_shard_now)
    yield hooks_held()


_installation = SharedInstallation(_patches)


def _bound_to_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function under `torch.utils.checkpoint` that enters the present context around each of its calls.

    Backward calls it again to recompute activations, maybe after the context has been left, or in another thread. Where
    no context is open, that is the function itself.
    """
    context = current()
    if context is None:
        return function
    queries_are_shards = queries_alone(context)
    if queries_are_shards is not None:
        function = local_sdpa(queries_are_shards=queries_are_shards)(function)
    return entered(context)(function)


def _variant_of_compiled_code() -> str:
    """Encode the context of this thread for Dynamo, which reuses compiled code only where this string is equal."""
    context = innermost()
    if context is None:
        return ""
    context.seen.add("attention")  # compiled code may have attention, which is not counted
    context.store_keys()
    is_alone = queries_alone(context) is not None
    return f"cp_dtensor: {', '.join([context.key, *context.beside])}{', each rank alone' * is_alone}"


def _check_compiled(arguments: dict[str, Any]) -> None:
    """Let hooks of other programs refuse the arguments of a function before it is compiled."""
    for hook in loaded_hooks():
        hook.check_compiled(arguments)


def _refuse_torchs_modules() -> None:
    """Refuse modules with torch's `_ContextParallel`, whose DTensors are contiguous, where shards are not."""
    context = innermost()
    if context is not None and context.call.ranks.size > 1 and context.call.layout != Contiguous():
        raise RuntimeError(TORCHS_TOO)


def _warn_of_other_layout(call: Call, seq_len: tuple[int, ...]) -> None:
    """Warn, once, of a context without buffers inside of one whose buffers are shards in another layout.

    `call` and `seq_len` are those of the inner one. Other lengths than those of the outer one are of shards of its own.
    """
    around = innermost()
    if around is None or not around.buffers or call.ranks.size == 1 or around.call.layout == call.layout:
        return
    outer = around.call
    if outer.ranks.shares_sequence_with(call.ranks) and {*seq_len} <= {*(outer.lengths)}:
        text = (
            f"a context_parallel without buffers, in {call.layout} (layout=None is HeadTail()), was entered inside "
            f"of one over the same ranks whose buffers are shards in {outer.layout}: attention of these shards inside "
            f"takes their tokens for others. Pass layout={outer.layout}, or list the buffers of the inner context"
        )
        warn_once(call.ranks, (type(outer.layout), type(call.layout)), text)


# SDPA of local tensors inside an active context


@contextmanager
def local_sdpa(*, queries_are_shards: bool) -> Iterator[None]:
    """Leave SDPA of this thread to torch while open, although a context is active.

    Without an active context it changes nothing. Functions under `torch.utils.checkpoint` are recomputed under it.
    FlexAttention inside is refused. Contexts that are entered inside are not affected.

    Args:
        queries_are_shards: True if q is this rank's shard while k and v are whole on every rank (cross-attention to a
            text prompt); `is_causal=True` is refused then, because the positions of the queries are not known. False
            if q is whole too.
    """
    context = innermost()
    if context is None:
        yield
        return
    with _torch.thread_state(ALONE, (context, queries_are_shards)):
        yield
