"""FlexAttention of sequence shards: local queries, K/V of all ranks, functions of global positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

from cp_dtensor import _torch
from cp_dtensor._torch.tensors import wide_dtype
from cp_dtensor.api.active_context import (
    CAPTURED_BEFORE,
    current_context,
    innermost_context,
    open_local_sdpa,
    refuse_sinks,
    with_inherited,
    with_inherited_in_trace,
)
from cp_dtensor.api.flex_block_mask import (
    FULL,
    PARTIAL,
    LocalRows,
    Tables,
    cached_tables,
    check_mask_lengths,
    mask_lengths,
)
from cp_dtensor.api.flex_operators import TableCall, check_context_mask, layout_is_found, traced_tables
from cp_dtensor.api.interception import SharedInstallation
from cp_dtensor.attention.modifiers import NO_MODIFIERS
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.engine.compiled_spec import CompiledCallSpec, compiled_spec_of, key_of, made_of, parts_of
from cp_dtensor.engine.config import (
    AttentionConfig,
    Mesh,
    check_batch_size,
    check_qkv,
    checked_seq_len,
    refuse_dtensors,
    softmax_scale,
)
from cp_dtensor.engine.gather_kv import GatherKV, KVGather
from cp_dtensor.engine.lengths import global_lengths
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Full

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def context_parallel_flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mesh: Mesh, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    layout: Layout | None = None, rotate_method: str | None = None, seq_len: int | tuple[int, int] | None = None,
    return_lse: bool = False, kernel_options: dict[str, Any] | None = None, compiled: bool = False, debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlexAttention of a sequence that is sharded over the ranks of `mesh`.

    Every rank passes its shard and gets its rows of `flex_attention` of the whole sequence. The ranks gather K/V;
    gradients of K/V are summed on the ranks that own the tokens. `score_mod` and `block_mask` are those of the whole
    sequence: functions of global positions, which may capture whole tensors, the same on every rank. The gradient of a
    tensor that `score_mod` captures is a share; the sum of the shares of all ranks is the gradient.

    `torch.compile` takes it, also with `fullgraph=True`. Inside `context_parallel`, `flex_attention` itself computes
    the same.

    Args:
        q: (B, H, S, D), this rank's queries in `layout` order; S may differ between ranks, and be 0.
        k: (B, Hkv, T, D), this rank's keys. T may differ from S (cross-attention).
        v: (B, Hkv, T, Dv), this rank's values.
        mesh: the ranks that share the sequence, as for `context_parallel_attention`.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)` changes a scaled logit; positions are global.
        block_mask: `create_block_mask(mask_mod, B, H, global S, global T)` with any block size, where B and H may be
            None; None lets every query see every key. The block mask of local rows is cached as long as it exists.
        scale, enable_gqa, layout, seq_len, return_lse, debug: as for `context_parallel_attention`.
        rotate_method: "auto" and "symm_mem" read K/V from symmetric memory where the ranks share it (see
            `set_rotate_method`), the others all-gather them; None is the process default.
        kernel_options: as `flex_attention` takes them.
        compiled: True: call `torch.compile(flex_attention)`, which makes one kernel; uncompiled, FlexAttention holds
            the logits of all local queries and global keys in memory.

    Returns:
        out: (B, H, S, Dv). With `return_lse`, also lse: (B, H, S), natural log of the softmax denominator, -inf for a
        query that sees no key.

    Raises:
        TypeError, ValueError: arguments that do not fit; a block mask of other lengths than the sequence's, on every
            rank alike. (A `seq_len` that is wrong on some ranks only is found there only.)
        NotImplementedError: what `flex_attention` does not support, such as gradients on CPUs.

    Each of 65,536 tokens sees itself and the 4,095 tokens before it:

        mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 4096), None, None, 65536, 65536)
        out = context_parallel_flex_attention(q, k, v, mesh=mesh, block_mask=mask, seq_len=65536)

    Source: FlexAttention (arXiv 2412.05496); gathered K/V as in the Llama 3 report (arXiv 2407.21783), section 3.3.2.
    """
    lengths = None if seq_len is None else checked_seq_len(seq_len)
    refuse_dtensors(q=q, k=k, v=v)
    traced = _torch.is_traced(q)
    attention = _compiled() if compiled and not traced else _torch.original_flex_attention
    call = FlexCall(
        q, k, v, score_mod, block_mask, scale, enable_gqa, attention,
        {"kernel_options": kernel_options, "return_aux": AuxRequest(lse=True) if return_lse else None},
    )  # fmt: skip
    if traced:
        rotate_method = transport_by_name(rotate_method).name  # Dynamo guards the process default
        result = _traced_flex(call, _spec_key(mesh, parts_of(layout), rotate_method, debug), lengths)
    else:
        config = AttentionConfig.of(mesh, "auto", layout, rotate_method, debug=debug)
        config = with_inherited("context_parallel_flex_attention", config, layout=layout is None, mask=False)
        result = _flex_of_shards(call, config, lengths)
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
        """Refuses arguments that do not fit, as far as one rank can find out by itself."""
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

    def attend(
        self, k: torch.Tensor, v: torch.Tensor, score_mod: ScoreMod | None, block_mask: BlockMask | None
    ) -> Any:  # fmt: skip
        """The result for the local queries, with these K/V, score and mask."""
        if self.q.size(2):
            options = self.options if block_mask is self.block_mask else _options_of_rows(self.options)
            return self.attention(
                self.q, k, v, score_mod=score_mod, block_mask=block_mask, scale=self.scale, enable_gqa=self.enable_gqa,
                **options,
            )  # fmt: skip
        # FlexAttention takes no empty queries; but this rank, too, takes part in the backward of gathering K/V.
        heads = k.size(1)
        out = (self.q.unflatten(1, (heads, -1)).flatten(2, 3) @ k.mT @ v).reshape(*self.q.shape[:3], v.size(3))
        lse = out.new_zeros(out.shape[:3], dtype=wide_dtype(out))
        if self.options.get("return_aux") is not None:
            return out, AuxOutput(lse=lse, max_scores=lse)
        return (out, lse) if self.options.get("return_lse") else out


def _options_of_rows(options: dict[str, Any]) -> dict[str, Any]:
    """FlexAttention's options without promises about the whole mask that a block mask of local rows may break.

    A local block of queries may span several global blocks. Then its blocks of keys have gaps, and the first of them
    may show some queries no key: kernels that rely on the promises would leave out keys, or return NaN.
    """
    promises = ("BLOCKS_ARE_CONTIGUOUS", "ROWS_GUARANTEED_SAFE")
    kernel_options = options["kernel_options"] or {}
    others = {name: value for name, value in kernel_options.items() if not name.endswith(promises)}
    return {**options, "kernel_options": others or None}


def _flex_of_shards(call: FlexCall, config: AttentionConfig, lengths: tuple[int, int] | None = None) -> Any:
    """This rank's rows of `call.attention` of the whole sequence; `lengths` are global, if the caller passed them."""
    call.check()
    check_batch_size(call.q, config)
    ranks, layout, mask, of_mask = config.ranks, config.layout, call.block_mask, mask_lengths(call.block_mask)
    if lengths is not None:
        check_mask_lengths(lengths, of_mask)
    elif config.debug:
        lengths = of_mask  # so that ranks compare them
    lengths = global_lengths(
        call.q, call.k, call.v, config, Full(), NO_MODIFIERS, softmax_scale(call.q, call.scale), lengths
    )
    check_mask_lengths(lengths, of_mask)
    if ranks.size == 1:
        return call.attend(call.k, call.v, call.score_mod, mask)
    rows = LocalRows.of(layout, lengths[0], ranks.rank, ranks.size, call.q.size(0))
    if mask is not None and of_mask is not None:
        rows.check_batch_size(mask.kv_indices.size(0))
    # Gather first: the host makes tables and launches attention while K/V are in flight.
    gather = KVGather(ranks, layout, lengths[1], lengths[1], config.transport, config.debug)
    keys, values = GatherKV.apply(call.k, call.v, gather)
    positions = rows.positions(call.q.device)
    if mask is not None and rows.count:
        tables = Tables.of(mask)
        if of_mask is not None:
            tables = cached_tables(tables, mask.BLOCK_SIZE, lengths[1], rows, mask.q_indices is not None)
        mask = block_mask_of_rows(mask, tables, (rows.count, lengths[1]), positions)
    return call.attend(keys, values, _local_score_mod(call.score_mod, positions, None), mask)


def _traced_flex(call: FlexCall, spec_key: str, lengths: tuple[int, int] | None = None) -> Any:
    """`_flex_of_shards` in a program that is being captured; `spec_key` is the key of its configuration.

    Sizes are constants of the program, which is compiled for each. Where neither the caller nor a mask has the global
    lengths, they are known at run time only: K/V have room for the longest sequence that fits the local lengths, and
    keys after the last one are masked.
    """
    call.check()
    mask, of_mask = call.block_mask, mask_lengths(call.block_mask)
    if lengths is not None:
        check_mask_lengths(lengths, of_mask)
    if _is_alone(spec_key):
        return call.attend(call.k, call.v, call.score_mod, mask)
    declared = lengths is not None
    lengths = lengths or of_mask or (-1, -1)
    lengths = index(lengths[0]), index(lengths[1])
    if lengths[1] < 0 and layout_is_found(spec_key):
        raise NotImplementedError(
            "in a compiled function, FlexAttention in a layout that is made for one length, such as PerDocument and "
            "Balanced, needs a block mask of the whole sequence, which has that length: got none"
        )
    batch_size, q_local, _ = index(call.q.size(0)), index(call.q.size(2)), index(call.k.size(2))
    keys, values, positions, total, found = torch.ops.cp_dtensor.flex_keys(
        call.q, call.k, call.v, spec_key, *lengths, declared, softmax_scale(call.q, call.scale), torch.is_grad_enabled()
    )
    kv_total = total if lengths[1] < 0 else None
    if mask is None and kv_total is not None:
        mask = _mask_of_one_block(call.q)
    if mask is not None and q_local:
        tables = Tables.of(mask)
        if of_mask is not None:
            sizes = (*lengths, batch_size, q_local, index(mask.BLOCK_SIZE[0]), index(mask.BLOCK_SIZE[1]))
            tables = traced_tables(tables, found, TableCall(spec_key, *sizes, mask.q_indices is not None))
        elif kv_total is not None and mask.full_kv_num_blocks is not None:
            raise NotImplementedError(
                "in a compiled function, a block mask of one block that is full needs seq_len, since keys after the "
                "last cannot be masked: pass seq_len, or a mask that create_block_mask made"
            )
        mask = block_mask_of_rows(mask, tables, (q_local, keys.size(2)), positions, kv_total)
    return call.attend(keys, values, _local_score_mod(call.score_mod, positions, kv_total), mask)


@_torch.constant_in_trace
def _is_alone(spec_key: str) -> bool:
    return compiled_spec_of(spec_key).config().ranks.size == 1


def _mask_of_one_block(q: torch.Tensor) -> BlockMask:
    """A mask of a single partial block, which fits every length."""
    counts, indices = q.new_ones(1, 1, 1, dtype=torch.int32), q.new_zeros(1, 1, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=_torch.WHOLE_BLOCK, seq_lengths=(1, 1))


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(_torch.original_flex_attention)


@_torch.constant_in_trace
def _spec_key(mesh: Mesh, layout: Any, rotate_method: str, debug: bool) -> str:
    config = AttentionConfig.of(mesh, "auto", made_of(layout), rotate_method, debug=debug)
    config = with_inherited_in_trace("context_parallel_flex_attention", config, layout=layout is None, mask=False)
    return key_of(CompiledCallSpec.of(config))


# Functions of global positions as functions of local rows


def block_mask_of_rows(
    whole: BlockMask, tables: Tables, lengths: tuple[int, int], positions: torch.Tensor,
    kv_total: torch.Tensor | None = None,
) -> BlockMask:  # fmt: skip
    """The block mask of local rows from their tables; `lengths` are those of local queries and gathered keys.

    Args:
        positions: global positions of the local rows, (rows,) or (batch, rows).
        kv_total: (1,), the global number of keys, if more may have been gathered.
    """
    mod, kinds, (q_block, kv_block) = whole.mask_mod, tables.block_kinds, whole.BLOCK_SIZE

    def of_rows(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        position = _position(positions, b, q)
        visible = mod(b, h, position, _existing(kv, kv_total))
        if kinds is not None:
            mask_b, mask_h = b if kinds.size(0) > 1 else b * 0, h if kinds.size(1) > 1 else h * 0
            kind = kinds[mask_b, mask_h, position // q_block, kv // kv_block]
            visible = (kind == FULL) | ((kind == PARTIAL) & visible)
        return visible if kv_total is None else visible & (kv < kv_total[0])

    is_noop = mod is noop_mask and kinds is None and kv_total is None
    mask = BlockMask(lengths, *tables[:8], whole.BLOCK_SIZE, mod if is_noop else of_rows)  # type: ignore[arg-type]
    return _torch.with_write_order_like(mask, whole)


def _local_score_mod(
    mod: ScoreMod | None, positions: torch.Tensor, kv_total: torch.Tensor | None
) -> ScoreMod | None:  # fmt: skip
    """`mod` as a function of local rows; arguments as of `block_mask_of_rows`."""
    if mod is None:
        return None

    def of_rows(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return mod(score, b, h, _position(positions, b, q), _existing(kv, kv_total))

    return of_rows


def _position(positions: torch.Tensor, b: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return positions[b, q] if positions.dim() > 1 else positions[q]


def _existing(kv: torch.Tensor, kv_total: torch.Tensor | None) -> torch.Tensor:
    """The position of a key; 0 after the last one, since functions may index tensors by it."""
    return kv if kv_total is None else torch.where(kv < kv_total[0], kv, 0)


# flex_attention in contexts


def _flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *,
    return_aux: Any = None,
) -> Any:  # fmt: skip
    """FlexAttention of this rank's shards; torch's own outside of contexts."""
    spec_key = _context_key()
    options = {"return_lse": return_lse, "kernel_options": kernel_options, "return_aux": return_aux}
    call = FlexCall(
        query, key, value, score_mod, block_mask, scale, enable_gqa, _torch.original_flex_attention, options
    )
    if not spec_key or query.is_meta:
        return call.attend(key, value, score_mod, block_mask)
    if any(tensor.is_nested or isinstance(tensor, DTensor) for tensor in (query, key, value)):
        raise NotImplementedError(
            "FlexAttention takes plain tensors inside context_parallel, this rank's shards; got nested tensors or "
            "DTensors"
        )
    if _torch.is_traced(query):
        return _traced_flex(call, spec_key)
    context = current_context()
    assert context is not None
    context.seen.add("attention")
    return _flex_of_shards(call, context.config)


@_torch.constant_in_trace
def _context_key() -> str:
    """The key of the compiled call spec of the open context, "" outside of any; a constant of compiled code."""
    of_module = _torch.traced_scope()
    if of_module is not None:
        check_context_mask(compiled_spec_of(of_module).config().mask)
        return of_module
    context = current_context()
    if context is None:
        return ""
    check_context_mask(context.config.mask)
    refuse_sinks(context.sinks is not None, "FlexAttention")
    if open_local_sdpa(context) is not None:
        raise NotImplementedError(
            "FlexAttention is not supported where attention is left to each rank alone, inside context_parallel: use "
            "F.scaled_dot_product_attention"
        )
    return context.key


def _check_captured() -> None:
    """Refuses FlexAttention of local shards in captured code that is run or traced further inside a context."""
    context = innermost_context()
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
