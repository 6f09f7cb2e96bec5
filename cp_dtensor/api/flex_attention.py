"""FlexAttention of sequence shards: local queries, K/V of all ranks, functions of global positions.

In compiled code the operator `flex_keys` gathers K/V of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from operator import index
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors, differentiated_once
from cp_dtensor._torch.tensors import wide_dtype
from cp_dtensor.api.flex_block_mask import (
    LocalRows,
    cached_block_mask,
    check_mask_lengths,
    has_unaligned_blocks,
    local_block_mask,
    mask_lengths,
    position_of,
)
from cp_dtensor.api.functional import traced_constants
from cp_dtensor.api.interception import SharedInstallation, refuse_wrapped
from cp_dtensor.comm.groups import Mesh
from cp_dtensor.engine.agreement import agreed_pair
from cp_dtensor.engine.arguments import check_batch_size, check_qkv, refuse_beside, refuse_dtensors
from cp_dtensor.engine.base import Tensors as CallTensors
from cp_dtensor.engine.call import Call, Options, call_of, checked_pair, softmax_scale
from cp_dtensor.engine.contexts import CAPTURED_BEFORE, Left, LiveLayout, current, inherited, innermost, queries_alone
from cp_dtensor.engine.gather_kv import GatherKV, KVGather, Pair
from cp_dtensor.engine.handles import fake_handle
from cp_dtensor.spec.layouts import Layout

ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def context_parallel_flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mesh: Mesh, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    layout: Layout | None = None, rotate_method: str | None = None, seq_len: int | tuple[int, int] | None = None,
    return_lse: bool = False, kernel_options: dict[str, Any] | None = None, compiled: bool = False, debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute FlexAttention of a sequence that is sharded over the ranks of `mesh`.

    Every rank passes its shard and gets its rows of `flex_attention` of the whole sequence. The ranks gather K/V;
    gradients of K/V are summed on the ranks that own the tokens. `score_mod` and `block_mask` are those of the whole
    sequence: functions of global positions, which may capture whole tensors, the same on every rank. The gradient of a
    tensor that `score_mod` captures is a share; the sum of the shares of all ranks is the gradient.

    `torch.compile` takes it, also with `fullgraph=True`. Inside `context_parallel`, `flex_attention` itself computes
    the same.

    Args:
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)` changes a scaled logit; positions are global.
        block_mask: `create_block_mask(mask_mod, B, H, global S, global T)` with any block size, where B and H may be
            None; None lets every query see every key. The block mask of local rows is cached as long as it exists.
        q, k, v, mesh, scale, enable_gqa, layout, seq_len, return_lse, debug: as for `context_parallel_attention`.
        rotate_method: "auto" and "symm_mem" read K/V from symmetric memory where the ranks share it (see
            `set_rotate_method`), the others all-gather them; None is the process default.
        kernel_options: as `flex_attention` takes them.
        compiled: True: call `torch.compile(flex_attention)`, which makes one kernel; uncompiled, FlexAttention holds
            the logits of all local queries and global keys in memory.

    Returns:
        out, and with `return_lse` also lse, as `context_parallel_attention`.

    Raises:
        TypeError, ValueError: arguments that do not fit; a block mask of other lengths than the sequence's, on every
            rank alike. (A `seq_len` that is wrong on some ranks only is found there only.)
        NotImplementedError: what `flex_attention` does not support, such as gradients on CPUs.

    Each of 65,536 tokens sees itself and the 4,095 tokens before it:

        mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 4096), None, None, 65536, 65536)
        out = context_parallel_flex_attention(q, k, v, mesh=mesh, block_mask=mask, seq_len=65536)

    Source: FlexAttention (arXiv 2412.05496); gathered K/V as in the Llama 3 report (arXiv 2407.21783), section 3.3.2.
    """
    refuse_dtensors(q=q, k=k, v=v)
    traced = _torch.is_traced(q)
    attention = _compiled() if compiled and not traced else _torch.original_flex_attention
    flex = FlexCall(
        q, k, v, score_mod, block_mask, scale, enable_gqa, attention,
        {"kernel_options": kernel_options, "return_aux": AuxRequest(lse=True) if return_lse else None},
    )  # fmt: skip
    owner = "context_parallel_flex_attention"
    options: Options = {
        "mesh": mesh, "layout": layout, "rotate_method": rotate_method, "seq_len": seq_len, "debug": debug,
    }  # fmt: skip
    if traced:
        key, _ = traced_constants(owner, options, layout=layout is None, mask=False)
        result = _traced_flex(flex, key, checked_pair(seq_len))
    else:
        call = inherited(owner, Call.of(**options), layout=layout is None, mask=False)
        result = _flex_of_shards(flex, call)
    return (result[0], result[1].lse) if return_lse else result


class FlexCall(NamedTuple):
    """The arguments of `flex_attention` of shards."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    score_mod: ScoreMod | None
    block_mask: BlockMask | None
    scale: float | None
    enable_gqa: bool
    attention: Callable[..., Any]
    """FlexAttention of whole tensors."""
    options: dict[str, Any]
    """Other arguments of `attention`."""

    def check(self) -> None:
        """Refuse arguments that do not fit, as far as one rank can find out by itself."""
        check_qkv(self.q, self.k, self.v, self.enable_gqa)
        if not self.enable_gqa and self.q.size(1) != self.k.size(1):
            raise ValueError(
                f"FlexAttention expects as many key heads as query heads, or enable_gqa=True; got q "
                f"{tuple(self.q.shape)}, k {tuple(self.k.shape)}"
            )
        if self.block_mask is None:
            return
        if not isinstance(self.block_mask, BlockMask):
            raise TypeError(f"expected block_mask to be a BlockMask or None, got {type(self.block_mask).__name__}")
        if self.block_mask.kv_indices.device != self.q.device:
            device = self.block_mask.kv_indices.device
            raise ValueError(f"expected the block mask on the device of q, {self.q.device}, got one on {device}")

    def attend(self, k: torch.Tensor, v: torch.Tensor, score_mod: ScoreMod | None, block_mask: BlockMask | None) -> Any:
        """Return the result for the local queries, with these K/V, score and mask."""
        if self.q.size(2):
            options = self.options if block_mask is self.block_mask else _options_of_rows(self.options)
            return self.attention(
                self.q, k, v, score_mod=score_mod, block_mask=block_mask, scale=self.scale, enable_gqa=self.enable_gqa,
                **options,
            )  # fmt: skip
        # FlexAttention takes no empty queries; but this rank, too, takes part in the backward of gathering K/V, from
        # either result.
        heads = k.size(1)
        out = (self.q.unflatten(1, (heads, -1)).flatten(2, 3) @ k.mT @ v).reshape(*self.q.shape[:3], v.size(3))
        lse = out.sum(3, dtype=wide_dtype(out))
        if self.options.get("return_aux") is not None:
            return out, AuxOutput(lse=lse, max_scores=lse)
        return (out, lse) if self.options.get("return_lse") else out

    def attend_rows(
        self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, local_mask: Callable[[BlockMask], BlockMask]
    ) -> Any:
        """Return the result for the local queries with gathered K/V.

        `positions` are those of `LocalRows`; `local_mask` makes the local mask of that of the whole sequence.
        """
        mask = self.block_mask
        mod: Any = self.score_mod

        def of_rows(
            score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
        ) -> torch.Tensor:
            return mod(score, b, h, position_of(positions, b, q), kv)

        if mask is not None and self.q.size(2) > 0:
            mask = local_mask(mask)
        return self.attend(k, v, None if mod is None else of_rows, mask)


def _options_of_rows(options: dict[str, Any]) -> dict[str, Any]:
    """Return FlexAttention's options without promises about the whole mask that a block mask of local rows may break.

    A local block of queries may span several global blocks. Then its blocks of keys have gaps, and the first of them
    may show some queries no key: kernels that rely on the promises would leave out keys, or return NaN.
    """
    promises = ("BLOCKS_ARE_CONTIGUOUS", "ROWS_GUARANTEED_SAFE")
    kernel_options = options["kernel_options"] or {}
    others = {name: value for name, value in kernel_options.items() if not name.endswith(promises)}
    return {**options, "kernel_options": others or None}


def _agreed_lengths(
    call: Call, t: CallTensors, of_mask: tuple[int, int] | None, needs_grads: tuple[bool, ...] | None
) -> tuple[int, int]:
    """Return `agreed_pair`; a block mask declares the global lengths if nothing else does."""
    is_declared = call.pair is not None or (call.lengths and not call.debug)  # debugging, ranks compare masks
    if is_declared or of_mask is None:
        lengths = agreed_pair(call, t, False, needs_grads, "FlexAttention")
        check_mask_lengths(lengths, of_mask)
        return lengths
    try:
        return agreed_pair(replace(call, pair=of_mask), t, False, needs_grads, "FlexAttention")
    except ValueError as error:
        ranks, local = call.ranks, (t.q.size(2), t.k.size(2))
        if tuple(call.layout.local_length(each, ranks.rank, ranks.size) for each in of_mask) == local:
            raise
        raise ValueError(
            f"expected a block mask of the whole sequence, got one of {of_mask}, of which {local[0]} queries and "
            f"{local[1]} keys are not this rank's share in {call.layout}"
        ) from error


def _check_context(call: Call) -> None:
    """Refuse contexts with a mask, or that promise equal bits in every run, which torch's kernels do not."""
    for name, value in call.of_dtensors.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"FlexAttention does not take the option {name} of its context, got {value!r}: use a context without "
                "it, and for masks the block_mask of flex_attention"
            )


def _flex_of_shards(flex: FlexCall, call: Call) -> Any:
    """Return this rank's rows of `flex.attention` of the whole sequence; `call` has its ranks, layout and lengths."""
    flex.check()
    check_batch_size(flex.q.shape, call)
    ranks, layout, mask, of_mask = call.ranks, call.layout, flex.block_mask, mask_lengths(flex.block_mask)
    t = CallTensors(flex.q, flex.k, flex.v)
    needs_grads = tuple([x is not None and x.requires_grad and torch.is_grad_enabled() for x in t])
    q_len, kv_len = _agreed_lengths(replace(call, mask=None, scale=flex.scale), t, of_mask, needs_grads)
    if ranks.size == 1:
        return flex.attend(flex.k, flex.v, flex.score_mod, mask)
    rows = LocalRows.of(layout, q_len, ranks.rank, ranks.size, flex.q.size(0))
    if mask is not None:
        rows.check_batch_size(mask.kv_indices.size(0))
    # Gather first: the host makes tables and launches attention while K/V are in flight.
    gather = KVGather(call, kv_len)
    keys, values = GatherKV.apply(flex.k, flex.v, gather)
    local_mask = partial(cached_block_mask, kv_len=kv_len, rows=rows)
    return flex.attend_rows(keys, values, rows.positions(flex.q.device), local_mask)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(_torch.original_flex_attention)


# In compiled code


def _traced_flex(flex: FlexCall, key: str, lengths: tuple[int, int] | None = None) -> Any:
    """Return `_flex_of_shards` in a program that is being captured; `key` is that of its `Call`.

    Sizes are constants of the program, which is compiled for each. Where neither the caller nor a mask has the global
    lengths, all ranks have equally many tokens.
    """
    flex.check()
    of_mask = mask_lengths(flex.block_mask)
    if lengths is not None:
        check_mask_lengths(lengths, of_mask)
    count = _rank_count(key)
    if count == 1:
        return flex.attend(flex.k, flex.v, flex.score_mod, flex.block_mask)
    q_len, kv_len = lengths or of_mask or (count * flex.q.size(2), count * flex.k.size(2))
    whole = index(q_len), index(kv_len)
    declared = lengths is not None or of_mask is not None  # Dynamo of torch 2.11 knows no bool() of a tuple
    keys, values, positions, _ = torch.ops.cp_dtensor.flex_keys(
        flex.q, flex.k, flex.v, key, *whole, declared, softmax_scale(flex.q.size(3), flex.scale),
        torch.is_grad_enabled(),
    )  # fmt: skip

    def local_mask(mask: BlockMask) -> BlockMask:
        batch_size = index(positions.size(0)) if positions.dim() > 1 else 1
        of_mask, q_block = index(mask.kv_indices.size(0)), index(mask.BLOCK_SIZE[0])
        unaligned = _may_be_unaligned(key, whole[0], batch_size, of_mask, q_block)
        return local_block_mask(mask, whole[1], positions, unaligned)

    return flex.attend_rows(keys, values, positions, local_mask)


@_torch.constant_in_trace
def _rank_count(key: str) -> int:
    return call_of(key).ranks.size


def _keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str, q_len: int, kv_len: int, declared: bool,
    scale: float, needs_backward: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gather K/V and find the positions of local queries; `declared`: the caller or a block mask has the lengths."""
    of_key = call_of(key)
    found = Left.by(of_key, q, k)
    call, is_live = found.call, isinstance(of_key.layout, LiveLayout)
    _check_context(call)
    agreed = _agreed_lengths(
        replace(call, mask=None, scale=scale), CallTensors(q, k, v), (q_len, kv_len) if declared else None, None
    )
    if agreed != (q_len, kv_len):
        raise ValueError(
            f"compiled FlexAttention without a block mask takes equally many tokens on all ranks, {q_len} queries and "
            f"{kv_len} keys in all; got a sequence of {agreed}: pass seq_len, or a block mask of the whole sequence"
        )
    ranks, layout = call.ranks, call.layout
    if is_live and len(layout.batch_groups(q.size(0))) > 1:
        raise NotImplementedError(
            "compiled FlexAttention takes layouts that are made for one length if they divide batch rows alike, got "
            f"{layout}"
        )
    keys, values = KVGather(call, kv_len).gather(k, v)
    positions = LocalRows.of(layout, q_len, ranks.rank, ranks.size, q.size(0)).positions(q.device)
    return keys, values, positions.clone(), found.handle(needs_backward)


def _fake_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str, _q_len: int, kv_len: int, *_: Any
) -> tuple[torch.Tensor, ...]:
    layout = call_of(key).layout
    per_row = not isinstance(layout, LiveLayout) and len(layout.batch_groups(int(q.size(0)))) > 1
    return (
        k.new_empty(*k.shape[:2], kv_len, k.size(3)),
        v.new_empty(*v.shape[:2], kv_len, v.size(3)),
        q.new_empty(*((q.size(0),) * per_row), q.size(2), dtype=torch.int32),
        fake_handle(),
    )


def _keys_backward(grad_k: torch.Tensor, grad_v: torch.Tensor, left: torch.Tensor, local: int) -> Pair:
    """Return the gradients of this rank's keys and values: sums over the ranks of those of the gathered rows."""
    found = Left.of(left, in_backward=True)
    assert found is not None
    return KVGather(found.call, grad_k.size(2)).reduce_gradients(grad_k, grad_v, local)


def _fake_keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, _left: torch.Tensor, local: int
) -> tuple[torch.Tensor, ...]:
    return tuple(grad.new_empty(*grad.shape[:2], local, grad.size(3)) for grad in (grad_k, grad_v))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *_, positions, left = output
    ctx.save_for_backward(left)
    ctx.local = inputs[1].size(2)
    ctx.mark_non_differentiable(positions, left)


@differentiated_once
def _gradients(
    ctx: Any, saved: Tensors, grad_k: torch.Tensor, grad_v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.cp_dtensor.flex_keys_backward(grad_k, grad_v, *saved, ctx.local)
    return None, *grads, *[None] * 6


_torch.define_operator(
    "flex_keys(Tensor q, Tensor k, Tensor v, str key, int q_len, int kv_len, bool declared, float scale, "
    "bool needs_backward) -> (Tensor keys, Tensor values, Tensor positions, Tensor left)",
    _keys, _fake_keys, gradients=_gradients, save=_save_for_backward,
)  # fmt: skip
_torch.define_operator(
    "flex_keys_backward(Tensor grad_k, Tensor grad_v, Tensor left, SymInt local) -> (Tensor grad_k, Tensor grad_v)",
    _keys_backward,
    _fake_keys_backward,
)


@_torch.constant_in_trace
def _may_be_unaligned(key: str, q_len: int, batch_size: int, of_mask: int, q_block: int) -> bool:
    """Return whether a local block of queries may span several global blocks.

    Args:
        key: of the call; where code asks for a layout when it runs, only the alignment of that is known.
        batch_size: that of positions; 1 if all batch rows have the same.
        of_mask: batch rows of the block mask.
    """
    call = call_of(key)
    if isinstance(call.layout, LiveLayout):
        return call.layout.alignment % q_block != 0
    rows = LocalRows.of(call.layout, q_len, call.ranks.rank, call.ranks.size, batch_size)
    rows.check_batch_size(of_mask)
    return has_unaligned_blocks(rows, q_block)


# flex_attention in contexts


def _flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *,
    return_aux: Any = None,
) -> Any:  # fmt: skip
    """Compute FlexAttention of this rank's shards; call torch's own outside of contexts."""
    key_of_context = _context_key()
    options = {"return_lse": return_lse, "kernel_options": kernel_options, "return_aux": return_aux}
    call = FlexCall(
        query, key, value, score_mod, block_mask, scale, enable_gqa, _torch.original_flex_attention, options
    )
    if not key_of_context or query.is_meta:
        return call.attend(key, value, score_mod, block_mask)
    refuse_wrapped("FlexAttention", query, key, value)
    if _torch.is_traced(query):
        return _traced_flex(call, key_of_context)
    context = current()
    assert context is not None
    context.seen.add("attention")
    return _flex_of_shards(call, context.call)


@_torch.constant_in_trace
def _context_key() -> str:
    """Return the key of a call in the open context, "" outside of any; a constant of compiled code."""
    of_module = _torch.traced_scope()
    if of_module is not None:
        _check_context(call_of(of_module))
        return of_module
    context = current()
    if context is None:
        return ""
    _check_context(context.call)
    refuse_beside(context.beside, "FlexAttention")
    if queries_alone(context) is not None:
        raise NotImplementedError(
            "FlexAttention is not supported where attention is left to each rank alone, inside context_parallel: use "
            "F.scaled_dot_product_attention"
        )
    return context.inside(None, traced=True).key


def _check_captured() -> None:
    """Refuse FlexAttention of local shards in captured code that is run or traced further inside a context."""
    context = innermost()
    if context is None:
        return
    if not _torch.FLEX_ATTENTION_IS_KNOWN:
        raise NotImplementedError(
            f"FlexAttention of torch {torch.__version__} is not supported inside context_parallel: its parameters "
            "differ from those of the supported versions"
        )
    if _torch.get_thread_state(CAPTURED_BEFORE) is context and not _torch.flex_attention_is_redirected():
        raise NotImplementedError(
            "a compiled module with ContextParallel calls FlexAttention, whose code another package has replaced: it "
            "would attend to the local shard only. Call context_parallel_flex_attention instead"
        )


flex_redirection = SharedInstallation(
    lambda: [_torch.flex_attention_redirected(_flex_attention), _torch.captured_flex_attention_checked(_check_captured)]
)
"""Redirects FlexAttention: held by open contexts and by modules with `ContextParallel`."""
