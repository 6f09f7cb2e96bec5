"""Checks of the tensors of a call, before it launches anything."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor.engine.base import Tensors
from cp_dtensor.engine.call import Call, softmax_scale
from cp_dtensor.engine.handles import is_handle
from cp_dtensor.spec.layouts import shard_lengths


def check_qkv(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Refuse queries, keys and values whose types, (B, H, S, D) shapes, dtypes, devices or head counts do not fit."""
    given: tuple[object, ...] = (q, k, v)
    if not all(map(torch.is_tensor, given)):
        check_tensors(q=q, k=k, v=v)
    check = _refuse_unfit.__wrapped__ if _torch.is_traced(q) else _refuse_unfit  # sizes in a trace cannot be hashed
    check((q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device), bool(enable_gqa))


def check_tensors(owner: str | None = None, /, **tensors: object) -> None:
    """Refuse anything but tensors, by name; `owner` is the public function, for the message."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            expected = "expected" if owner is None else f"{owner} expects"
            raise TypeError(f"{expected} {name} to be a torch.Tensor, got {type(tensor).__name__}")


def check_devices(owner: str, tensors: Iterable[Tensor | None]) -> None:
    """Refuse tensors on several devices, or on others than CPUs and CUDA devices; "meta" tensors have no values."""
    first = None
    for tensor in tensors:
        if tensor is None:
            continue
        first = tensor.device if first is None else first
        if tensor.device != first or first.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{owner} expects tensors on one device, a CPU or a CUDA device; got tensors on {first}"
                + (f" and {tensor.device}" if tensor.device != first else "")
            )


def refuse_dtensors(**tensors: Tensor | None) -> None:
    """Refuse DTensors where functions take local shards."""
    for name, tensor in tensors.items():
        placements = None if type(tensor) is Tensor else getattr(tensor, "placements", None)
        if placements is not None:
            raise TypeError(
                f"expected {name} to be a plain tensor, this rank's own, got a DTensor placed {placements}: "
                "pass what is local of it (to_local()); "
                "F.scaled_dot_product_attention takes q, k, v and attn_mask as DTensors"
            )


@lru_cache(maxsize=1024)  # arguments that passed are not checked again
def _refuse_unfit(
    shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...], devices: tuple[torch.device, ...], enable_gqa: bool
) -> None:
    q, k, v = shapes
    received = f"got q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
    expect(len(q) == len(k) == len(v) == 4, "q, k and v of four dims (batch, heads, sequence, head_dim)", received)
    expect(len(set(dtypes)) == 1, "one dtype for q, k and v", f"got {', '.join(map(str, dtypes))}")
    expect(dtypes[0].is_floating_point, "a floating dtype", f"got {dtypes[0]}")
    expect(len(set(devices)) == 1, "one device for q, k and v", f"got {', '.join(map(str, devices))}")
    expect(devices[0].type in ("cpu", "cuda"), "q, k and v on a CPU or a CUDA device", f"got {devices[0]}")
    expect(q[0] == k[0] == v[0], "one batch size (dim 0) for q, k and v", received)
    expect(q[3] == k[3], "one head dim (dim 3) for q and k", received)
    expect(k[2] == v[2], "one sequence length (dim 2) for k and v", received)
    expect(k[1] == v[1], "as many value heads as key heads (dim 1)", received)
    expect(0 not in (q[0], q[1], k[1], q[3], v[3]), "at least one batch row, head and head dim", received)
    expect(enable_gqa or k[1] in (q[1], 1), "as many key heads as query heads, one, or enable_gqa=True", received)
    if q[1] % k[1]:
        raise ValueError(f"enable_gqa=True expects query heads to be a multiple of key heads; {received}")


def expect(fits: bool, expected: str, received: str) -> None:
    """Refuse arguments that do not fit, by a ValueError."""
    if not fits:
        raise ValueError(f"expected {expected}; {received}")


def check_batch_size(q: torch.Size, call: Call) -> None:
    """Refuse batches of another size than the context's buffers, if the layout partitions batch rows differently."""
    if call.batch_size not in (None, q[0]):
        raise ValueError(
            f"{call.layout} divides batch rows differently, so attention needs the batch size of the "
            f"buffers, {call.batch_size}; got q of shape {tuple(q)}"
        )


# Masks, dropout, and tensors of query heads
_TO_SHARD = "context_parallel_shard(mesh, [attn_mask], [-2]) makes it of a whole one"


def tensors_of(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
    sinks: Tensor | None = None, up: Tensor | None = None, bias: Tensor | None = None,
) -> Tensors:  # fmt: skip
    """Return the tensors of a call, as far as one rank can check them. `attn_mask` may be a handle of a mask."""
    mask = None
    if attn_mask is not None and is_handle(attn_mask):
        mask = attn_mask
    elif attn_mask is not None:
        expect(bias is None, "attn_mask that names a mask, beside a bias", f"got a tensor {tuple(attn_mask.shape)}")
        bias = attn_mask
    if bias is not None:
        bias = four_dims_of_mask(bias, q)
    of_heads = None if sinks is None else checked_of_heads("sinks", sinks, q)
    return Tensors(q, k, v, bias, of_heads, None, up, mask)


def checked_of_heads(name: str, tensor: object, q: Tensor | None = None) -> Tensor:
    """Return logits of query heads, (H,); refuse others, and DTensors where there is no q (B, H, S, D) yet."""
    if not isinstance(tensor, Tensor):
        received = f"got {type(tensor).__name__}"
        raise TypeError(f"expected {name} to be a torch.Tensor of one logit per query head, {received}")
    received = f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
    expect(tensor.is_floating_point(), f"{name} of a floating dtype", received)
    if q is None:
        refuse_dtensors(**{name: tensor})
        expect(tensor.dim() == 1, f"{name} of shape (query heads,)", received)
        return tensor
    one_of_each = f"{name}, one for each of this rank's query heads, ({q.size(1)},)"
    expect(tuple(tensor.shape) == (q.size(1),), one_of_each, f"{received} for q {tuple(q.shape)}")
    expect(tensor.device == q.device, f"{name} on the device of q, {q.device}", received)
    return tensor


def refuse_beside(names: Iterable[str], attention: str, function: str = "context_parallel_attention") -> None:
    """Refuse `attention`, which takes no tensors of its context, the options with these names; `function` does."""
    for name in names:
        raise NotImplementedError(
            f"{attention} does not take the {name} of its context: call {function}(..., {name}=...) instead"
        )


def four_dims_of_mask(attn_mask: Tensor, q: Tensor) -> Tensor:
    """Return `attn_mask` as (B or 1, H or 1, S or 1, key positions or 1), not expanded.

    Raises:
        TypeError, ValueError: other types and devices, and dims that do not broadcast to those of q.
    """
    check_tensors(attn_mask=attn_mask)
    received = f"got {attn_mask.dtype} {tuple(attn_mask.shape)} on {attn_mask.device} for q {tuple(q.shape)}"
    if attn_mask.dtype == torch.int64 and attn_mask.dim() == 4:
        received += (
            ". In a model of transformers, int64 is the dtype of a tensor that names a mask of the whole sequence; a "
            "model that pads or joins it (DeepSeek-V4) cannot be used in context_parallel"
        )
    expect(attn_mask.dtype == torch.bool or attn_mask.is_floating_point(), "a boolean or floating attn_mask", received)
    expect(attn_mask.device == q.device, f"attn_mask on the device of q, {q.device}", received)
    fits = attn_mask.dim() <= 4 and all(
        size in (1, full) for size, full in zip(attn_mask.shape[-2::-1], q.shape[2::-1], strict=False)
    )
    if not fits or attn_mask.dim() < 1:
        of_other_rows = attn_mask.dim() > 1 and attn_mask.size(-2) not in (1, q.size(2))
        hint = f". {_TO_SHARD}" if of_other_rows else ""
        raise ValueError(
            "expected attn_mask to broadcast to (batch, heads, this rank's queries, keys of the whole sequence); "
            f"{received}{hint}"
        )
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def check_bias(q: Tensor, bias: Tensor, pair: tuple[int, int], call: Call | None = None) -> None:
    """Refuse an attn_mask (four dims) without the keys of the whole sequence, or whose rows are not those of q.

    `call` is that of the ranks; None if the layout is known to be the same in every batch row. Where batch rows are
    divided differently and some rank has a single query, whose mask looks alike with and without query rows, the ranks
    compare their numbers of rows.
    """
    q_len, kv_len = pair
    if bias.size(3) not in (1, kv_len):
        hint = _TO_SHARD
        if bias.size(2) == 1 < q.size(2):  # a padding mask, for example: there are no rows to shard
            hint = "One that is the same for all queries is passed whole"
        raise ValueError(
            f"expected attn_mask to have this rank's query rows ({q.size(2)}, in layout order) and the {kv_len} keys "
            f"of the whole sequence, in the order of their positions; got {tuple(bias.shape)}. {hint}"
        )
    if call is None or bias.size(0) > 1 or len(call.layout.batch_groups(q.size(0))) == 1:
        return
    layout, ranks = call.layout, call.ranks
    local = shard_lengths(layout, q_len, ranks.size)
    most_rows = bias.size(2)
    if min(local) <= 1 < q_len:
        # If no rank has more than one query, no rank can tell: refused.
        most_rows = max(ranks.gather_integers([most_rows], q.device))[0] if max(local) > 1 else q_len
    if most_rows > 1:
        raise ValueError(
            f"{layout} gives this rank other queries in some batch rows than in others, so an attn_mask with query "
            f"rows needs all {q.size(0)} batch rows; got {tuple(bias.shape)}. Expand it before it is sharded"
        )


# Scale and seed


def positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Return `(q, scale)` of equal logits with scale > 0: kernels mask before they scale, and -inf times 0 is NaN.

    A scale of None is 1 / sqrt(D); NaN and infinity are refused.
    """
    scale = softmax_scale(q.size(3), scale)
    if scale < 0:
        return q * -1, -scale
    return (q * 0, 1.0) if scale == 0 else (q, scale)


def drawn_seed(device: torch.device) -> Tensor:
    """Draw the seed of dropout from the generator of the device, as torch's kernels do.

    Activation checkpointing restores it, and each replay of a CUDA graph draws another one.
    """
    return torch.randint(1 << 62, (), dtype=torch.int64, device=device)
