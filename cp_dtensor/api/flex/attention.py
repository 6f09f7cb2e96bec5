"""FlexAttention of sequence shards: this rank's queries, everybody's keys, functions of global positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

from cp_dtensor import _torch
from cp_dtensor.api.flex.block_mask import FULL, PARTIAL, LocalRows, Tables, mask_lengths, remembered_tables
from cp_dtensor.api.flex.custom_ops import check_mask_lengths, finds_layout, traced_tables, world_size
from cp_dtensor.api.flex.gather_kv import GatheredKeys, WholeKeys
from cp_dtensor.api.left_out import refuse_left_out
from cp_dtensor.attention.modifiers import NO_MODIFIERS
from cp_dtensor.engine.compiled_spec import CompiledCallSpec, key_of, made_of, parts_of
from cp_dtensor.engine.config import AttentionConfig, check_batch_size
from cp_dtensor.engine.lengths import global_lengths
from cp_dtensor.engine.validation import Mesh, check_qkv, checked_seq_len, refuse_dtensors, softmax_scale
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Full


def context_parallel_flex_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Mesh,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: Layout | None = None,
    seq_len: int | tuple[int, int] | None = None,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    compiled: bool = False,
    debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention of a sequence that is sharded over the ranks of `mesh`.

    Every rank passes its shard and gets its rows of `flex_attention` of the whole sequence. Keys and values of all
    ranks are gathered; their gradients are summed where they belong. `score_mod` and `block_mask` are those of the
    whole sequence, written for global positions, and tensors that they capture are whole on each rank. Of the gradient
    of a tensor that `score_mod` captures each rank has its share; the sum over ranks is the gradient.

    Works in functions that `torch.compile` compiles, too, also with `fullgraph=True`. `flex_attention` itself does all
    this inside of `context_parallel`.

    Args:
        q: (B, H, S, D), this rank's queries in `layout` order; S may differ between ranks, and be 0.
        k: (B, Hkv, T, D), this rank's keys. T may differ from S (cross-attention).
        v: (B, Hkv, T, Dv), this rank's values.
        mesh: the ranks that share the sequence, as for `context_parallel_attention`.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)` changes a scaled logit; q_idx and kv_idx are global.
        block_mask: `create_block_mask(mask_mod, B, H, global S, global T)`, any block size, where B and H may be None;
            every query sees every key if None. What is derived of it for a rank is remembered as long as it exists.
        scale: factor of the logits, 1 / sqrt(D) if None.
        enable_gqa: allow H to be a multiple of Hkv; query head h reads key head h // (H / Hkv).
        layout: which rank owns which tokens, `HeadTail()` if None.
        seq_len: the global number of tokens, or a pair of those of queries and keys. If None, the ranks exchange their
            local lengths in one small collective (on the host where the groups have a CPU backend).
        return_lse: also return the log-sum-exp.
        kernel_options: as `flex_attention` takes them.
        compiled: call `torch.compile(flex_attention)`, which makes one kernel; uncompiled, FlexAttention holds the
            logits of all local queries and global keys in memory.
        debug: let the ranks exchange and compare everything that must agree; a disagreement names the rank.

    Returns:
        out: (B, H, S, Dv). With `return_lse`, also lse: (B, H, S), natural log of the softmax denominator, -inf for a
        query that sees no key.

    Raises:
        TypeError, ValueError: arguments that do not fit; a block mask of other lengths than the sequence's, on every
            rank alike. (A `seq_len` that is wrong on some ranks only is found there only.)
        NotImplementedError: what `flex_attention` does not support, such as gradients on CPUs.

    Each token sees itself and 4095 before it, of 65536 on all ranks together:

        mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 4096), None, None, 65536, 65536)
        out = context_parallel_flex_attention(q, k, v, mesh=mesh, block_mask=mask, seq_len=65536)

    Source: FlexAttention (arXiv 2412.05496); gathered keys as in the Llama 3 report (arXiv 2407.21783), section 3.3.2.
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
        result = traced_flex(call, _token(mesh, parts_of(layout), debug), lengths)
    else:
        settings = AttentionConfig.of(mesh, "auto", layout, None, debug=debug)
        refuse_left_out("context_parallel_flex_attention", settings.ranks, layout=layout is not None)
        result = flex_of_shards(call, settings, lengths)
    return (result[0], result[1].lse) if return_lse else result


class FlexCall(NamedTuple):
    """The arguments of a `flex_attention` of shards."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    score_mod: ScoreMod | None
    block_mask: BlockMask | None
    scale: float | None
    enable_gqa: bool
    attention: Callable[..., Any]
    """That of whole tensors."""
    options: dict[str, Any]
    """Its other arguments."""

    def check(self) -> None:
        """Refuses what does not fit, as each rank can tell by itself."""
        check_qkv(self.q, self.k, self.v, self.enable_gqa)
        if self.block_mask is None:
            return
        if not isinstance(self.block_mask, BlockMask):
            raise TypeError(f"expected block_mask to be a BlockMask or None, got {type(self.block_mask).__name__}")
        if self.block_mask.kv_indices.device != self.q.device:
            raise ValueError(
                f"expected the block mask on the device of q, {self.q.device}, got one on "
                f"{self.block_mask.kv_indices.device}"
            )

    def attend(
        self, k: torch.Tensor, v: torch.Tensor, score_mod: ScoreMod | None, block_mask: BlockMask | None
    ) -> Any:  # fmt: skip
        """The result, with keys and functions that go with the local queries."""
        if self.q.size(2):
            options = self.options if block_mask is self.block_mask else without_promises(self.options)
            return self.attention(
                self.q, k, v, score_mod=score_mod, block_mask=block_mask, scale=self.scale, enable_gqa=self.enable_gqa,
                **options,
            )  # fmt: skip
        # No kernel takes no queries; but this rank, too, takes part in the backward of the gathering.
        heads = k.size(1)
        out = (self.q.unflatten(1, (heads, -1)).flatten(2, 3) @ k.mT @ v).reshape(*self.q.shape[:3], v.size(3))
        lse = out.new_zeros(out.shape[:3], dtype=torch.promote_types(out.dtype, torch.float32))
        if self.options.get("return_aux") is not None:
            return out, AuxOutput(lse=lse, max_scores=lse)
        return (out, lse) if self.options.get("return_lse") else out


def without_promises(options: dict[str, Any]) -> dict[str, Any]:
    """FlexAttention's options, but for what the caller promises of the whole mask, of which kernels make use.

    A block of one rank's queries may lie in several of the sequence, where its blocks of keys have gaps, and the first
    of them shows some queries nothing: keys would be left out, or the result NaN.
    """
    kernel_options = options["kernel_options"] or {}
    promises = ("BLOCKS_ARE_CONTIGUOUS", "ROWS_GUARANTEED_SAFE")
    kept = {name: value for name, value in kernel_options.items() if not name.endswith(promises)}
    return {**options, "kernel_options": kept or None}


def flex_of_shards(call: FlexCall, settings: AttentionConfig, lengths: tuple[int, int] | None = None) -> Any:
    """What `call.attention` returns of the whole sequence, this rank's rows.

    Args:
        call: the shards; functions and mask of the whole sequence.
        settings: who shares it, and how.
        lengths: the global ones of queries and keys, if the caller says so.
    """
    call.check()
    check_batch_size(call.q, settings)
    ranks, layout, of_mask = settings.ranks, settings.layout, mask_lengths(call.block_mask)
    if lengths is not None:
        check_mask_lengths(lengths, of_mask)
    elif settings.debug:
        lengths = of_mask  # so that ranks compare them
    lengths = global_lengths(
        call.q, call.k, call.v, settings, Full(), NO_MODIFIERS, softmax_scale(call.q, call.scale), lengths
    )
    check_mask_lengths(lengths, of_mask)
    if ranks.size == 1:
        return call.attend(call.k, call.v, call.score_mod, call.block_mask)
    rows, mask = LocalRows.of(layout, lengths[0], ranks.rank, ranks.size, call.q.size(0)), call.block_mask
    if mask is not None and of_mask is not None:
        rows.check_batch_size(mask.kv_indices.size(0))
    # Before anything else: what the host does next is done while they travel.
    whole = WholeKeys(ranks, layout, lengths[1], lengths[1], settings.transport)
    keys, values = GatheredKeys.apply(call.k, call.v, whole)
    positions = rows.positions(call.q.device)
    if mask is not None and rows.count:
        tables = _tables_of(mask)
        if of_mask is not None:
            tables = remembered_tables(tables, mask.BLOCK_SIZE, lengths[1], rows, mask.q_indices is not None)
        mask = block_mask_of_rows(mask, tables, (rows.count, lengths[1]), positions, None)
    return call.attend(keys, values, local_score_mod(call.score_mod, positions), mask)


def traced_flex(call: FlexCall, token: str, lengths: tuple[int, int] | None = None) -> Any:
    """`flex_of_shards` in a program that is being captured; `token` stands for the settings.

    Sizes become constants of the program, which is compiled for each. Where neither the caller nor a mask says the
    global lengths, they are known only at run time: there is room for as many keys as there can be, and keys behind
    the last are masked.
    """
    call.check()
    mask, of_mask = call.block_mask, mask_lengths(call.block_mask)
    if lengths is not None:
        check_mask_lengths(lengths, of_mask)
    if _world_size(token) == 1:
        return call.attend(call.k, call.v, call.score_mod, mask)
    told = lengths is not None
    lengths = lengths or of_mask or (-1, -1)
    lengths = index(lengths[0]), index(lengths[1])
    if lengths[1] < 0 and _finds_layout(token):
        raise NotImplementedError(
            "in a compiled function, FlexAttention in a layout that is made for one length, such as PerDocument and "
            "Balanced, needs a block mask of the whole sequence, which says how long it is: got none"
        )
    batch_size, q_local, _ = index(call.q.size(0)), index(call.q.size(2)), index(call.k.size(2))
    keys, values, positions, total, found = torch.ops.cp_dtensor.flex_keys(
        call.q, call.k, call.v, token, *lengths, told, softmax_scale(call.q, call.scale), torch.is_grad_enabled()
    )
    kv_total = total if lengths[1] < 0 else None
    if mask is None and kv_total is not None:
        mask = _one_block(call.q)
    if mask is not None and q_local:
        tables = _tables_of(mask)
        if of_mask is not None:
            block_size = index(mask.BLOCK_SIZE[0]), index(mask.BLOCK_SIZE[1])
            with_q = mask.q_indices is not None
            tables = traced_tables(tables, found, token, lengths, batch_size, q_local, block_size, with_q)
        elif kv_total is not None and mask.full_kv_num_blocks is not None:
            raise NotImplementedError(
                "in a compiled function, a block mask of one block that is full needs seq_len, since keys behind the "
                "last cannot be masked: pass seq_len, or a mask that create_block_mask made"
            )
        mask = block_mask_of_rows(mask, tables, (q_local, keys.size(2)), positions, kv_total)
    return call.attend(keys, values, local_score_mod(call.score_mod, positions, kv_total), mask)


def _tables_of(mask: BlockMask) -> Tables:
    return Tables(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices,
    )  # fmt: skip


def _one_block(q: torch.Tensor) -> BlockMask:
    """A mask of one block, whatever the lengths."""
    return BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32, device=q.device),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=q.device),
        BLOCK_SIZE=_torch.WHOLE_BLOCK,
        seq_lengths=(1, 1),
    )


def block_mask_of_rows(
    whole: BlockMask,
    tables: Tables,
    lengths: tuple[int, int],
    positions: torch.Tensor,
    kv_total: torch.Tensor | None,
) -> BlockMask:
    """The mask of one rank's queries; `tables` are theirs, `kv_total` is as for `local_mask_mod`."""
    mod = local_mask_mod(whole.mask_mod, positions, tables, whole.BLOCK_SIZE[1], kv_total)
    mask = BlockMask(lengths, *tables[:8], whole.BLOCK_SIZE, mod)  # type: ignore[arg-type]
    return _torch.with_write_order_like(mask, whole)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(_torch.original_flex_attention)


@_torch.constant_in_trace
def _token(mesh: Mesh, layout: Any, debug: bool) -> str:
    """Of the recipe, for compiled code."""
    settings = AttentionConfig.of(mesh, "auto", made_of(layout), None, debug=debug)
    refuse_left_out("context_parallel_flex_attention", settings.ranks, layout=layout is not None)
    return key_of(CompiledCallSpec.of(settings))


@_torch.constant_in_trace
def _world_size(token: str) -> int:
    return world_size(token)


@_torch.constant_in_trace
def _finds_layout(token: str) -> bool:
    return finds_layout(token)


# Functions of FlexAttention that are written for positions in the whole sequence, as functions of local rows.

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def local_mask_mod(
    mod: MaskMod, positions: torch.Tensor, tables: Tables, kv_block: int, kv_total: torch.Tensor | None = None
) -> MaskMod:
    """`mod`, of global positions, as a function of local rows.

    Args:
        mod: as `BlockMask` has it.
        positions: those of the rows, (rows,) or (batch, rows).
        tables: of the rows.
        kv_block: how many keys a block has.
        kv_total: (1,), the number of keys where there may be more than belong to the sequence.
    """
    kinds, kinds_row = tables.kinds, tables.kinds_row
    if mod is noop_mask and kinds is None and kv_total is None:
        return mod

    def of_positions(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        seen = mod(b, h, positions[b, q] if positions.dim() > 1 else positions[q], _existing(kv, kv_total))
        if kinds is not None and kinds_row is not None:
            block = kinds_row[b, q] if kinds_row.dim() > 1 else kinds_row[q]
            mask_b, mask_h = b if kinds.size(0) > 1 else b * 0, h if kinds.size(1) > 1 else h * 0
            kind = kinds[mask_b, mask_h, block, kv // kv_block]
            seen = (kind == FULL) | ((kind == PARTIAL) & seen)
        return seen if kv_total is None else seen & (kv < kv_total[0])

    return of_positions


def local_score_mod(
    mod: ScoreMod | None, positions: torch.Tensor, kv_total: torch.Tensor | None = None
) -> ScoreMod | None:
    """`mod`, of global positions, as a function of local rows; arguments as those of `local_mask_mod`."""
    if mod is None:
        return None

    def of_positions(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        position = positions[b, q] if positions.dim() > 1 else positions[q]
        return mod(score, b, h, position, _existing(kv, kv_total))

    return of_positions


def _existing(kv: torch.Tensor, kv_total: torch.Tensor | None) -> torch.Tensor:
    """A key of the sequence, any for those behind the last, since functions look things up by it."""
    return kv if kv_total is None else torch.where(kv < kv_total[0], kv, 0)
