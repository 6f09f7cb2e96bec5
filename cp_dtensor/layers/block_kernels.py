"""Causal attention over chosen blocks of keys by the kernels of fla-core (native sparse attention).

They want one query for each key of the sequence, and 16 heads of a group or more. So the queries of each group stand at
their positions in a tensor of the whole sequence, whose other rows choose no block and cost little; heads and numbers
of blocks are padded. Sinks change the outputs and the log-sum-exp of which the kernels compute gradients. The package
tunes its kernels for a block size and head dims at their first use, which takes a minute.

Source: github.com/fla-org/flash-linear-attention, `fla.ops.nsa`; NSA (arXiv 2502.11089).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.api.extension import quiet, wide_dtype, wrong_result
from cp_dtensor.layers.chosen_reference import attend_chosen_reference, chosen_gradients_reference
from cp_dtensor.layers.masked import Queries
from cp_dtensor.layers.package_kernels import PackageKernels

_KERNELS = PackageKernels("fla-core", "fla", "block_attention")
_FEWEST_HEADS, _MOST_DIM, _CHECKED = 16, 256, 8192
"""Fewest heads of a group, largest head dim, and tokens of the problem that the first use computes and tunes for."""


def attend_blocks(
    q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, value_dim: int, scale: float, block_size: int,
    queries: Sequence[Queries],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `attend_chosen_reference` of rows [v | k], with q (B, H, T, D) for the k of them."""
    if not _serves("forward", q, rows, indices, value_dim, block_size, queries):
        seen = [each.on_device for each in queries]
        return attend_chosen_reference(
            F.pad(q, (value_dim, 0)), rows, indices, sink, value_dim, scale, block_size, seen
        )  # fmt: skip
    return _forward(q, rows, indices, sink, value_dim, scale, block_size, queries)


def block_gradients(
    grad_out: Tensor, q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor,
    scale: float, block_size: int, queries: Sequence[Queries],
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute `chosen_gradients_reference` of rows [v | k], with q (B, H, T, D) for the k of them."""
    value_dim = out.size(3)
    if not _serves("backward", q, rows, indices, value_dim, block_size, queries):
        seen = [each.on_device for each in queries]
        dq, d_rows, d_sink = chosen_gradients_reference(
            grad_out, F.pad(q, (value_dim, 0)), rows, indices, sink, out, lse, scale, block_size, seen
        )  # fmt: skip
        return dq[..., value_dim:], d_rows, d_sink
    return _backward(grad_out, q, rows, indices, sink, out, lse, scale, block_size, queries)


def _forward(
    q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, value_dim: int, scale: float, block_size: int,
    queries: Sequence[Queries],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # In memory (B, T, H, Dv), as the projection after attention reads it.
    out = q.new_empty(q.size(0), q.size(2), q.size(1), value_dim).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    for row, group, heads, place in _groups(q, rows, queries):
        blocks = _blocks(indices[row, :, group], place, rows.size(1))
        v, k = (x.contiguous() for x in rows[row, :, group].split((value_dim, q.size(3)), 1))
        given = _whole(q[row, heads], place, rows.size(1)), k[None, :, None], v[None, :, None], blocks
        found, of_keys = _module().parallel_nsa_fwd(*given, blocks.size(3), block_size, scale)
        count = heads.stop - heads.start
        out[row, heads] = found[0].index_select(0, place)[:, :count].transpose(0, 1)
        lse[row, heads] = of_keys[0].index_select(0, place)[:, :count].T
    if sink is not None:
        out = (out * (lse - _with_sink(lse, sink)).exp().unsqueeze(3)).to(out.dtype)
    return out.masked_fill_((lse == float("-inf")).unsqueeze(3), 0.0), lse  # the kernels divide 0 by 0


def _backward(
    grad_out: Tensor, q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor,
    scale: float, block_size: int, queries: Sequence[Queries],
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    total, value_dim, length = _with_sink(lse, sink), out.size(3), rows.size(1)
    dq, d_rows = torch.empty_like(q), torch.empty_like(rows)
    for row, group, heads, place in _groups(q, rows, queries):
        blocks = _blocks(indices[row, :, group], place, length)
        v, k = (x.contiguous() for x in rows[row, :, group].split((value_dim, q.size(3)), 1))
        whole_q, whole_out, grad = (_whole(x[row, heads], place, length) for x in (q, out, grad_out))
        whole_lse = _whole(total[row, heads].unsqueeze(2), place, length).squeeze(3)
        given = whole_q, k[None, :, None], v[None, :, None], whole_out, whole_lse, grad, blocks
        of_q, dk, dv = _module().parallel_nsa_bwd(*given, blocks.size(3), block_size, scale)
        dq[row, heads] = of_q[0].index_select(0, place)[:, : heads.stop - heads.start].transpose(0, 1)
        d_rows[row, :, group] = torch.cat((dv[0, :, 0], dk[0, :, 0]), 1)
    d_sink = None
    if sink is not None:
        delta = (grad_out.to(total.dtype) * out).sum(3)
        d_sink = -((sink.to(total.dtype).unsqueeze(1) - total).exp() * delta).sum((0, 2)).to(sink.dtype)
    return dq, d_rows, d_sink


def _with_sink(lse: Tensor, sink: Tensor | None) -> Tensor:
    """Return the log-sum-exp with the sink; 0 instead of -inf, so that differences to it are none of infinities."""
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype).unsqueeze(1))
    return total.masked_fill(total == float("-inf"), 0.0)


def _groups(q: Tensor, rows: Tensor, queries: Sequence[Queries]) -> Iterator[tuple[int, int, slice, Tensor]]:
    """Yield batch row, group, its heads, and the positions of the queries."""
    count = q.size(1) // rows.size(2)
    for row, group in product(range(q.size(0)), range(rows.size(2))):
        yield row, group, slice(group * count, (group + 1) * count), queries[row].on_device[0, 1] - 1


def _whole(x: Tensor, place: Tensor, length: int) -> Tensor:
    """Return x (heads, T, D) at its positions, (1, length, 16 heads or more, D)."""
    heads = max(_FEWEST_HEADS, _power(x.size(0)))
    made = x.new_zeros(length, heads, x.size(2))
    made[:, : x.size(0)].index_copy_(0, place, x.transpose(0, 1))
    return made.unsqueeze(0)


def _blocks(numbers: Tensor, place: Tensor, length: int) -> Tensor:
    """Return numbers of blocks (T, N) of queries at their positions, (1, length, 1, N or more), -1 for none."""
    made = numbers.new_full((length, _power(numbers.size(1))), -1, dtype=torch.int32)
    made[:, : numbers.size(1)].index_copy_(0, place, numbers.int())
    return made[None, :, None]


def _power(count: int) -> int:
    """Return the first power of 2 from `count` on."""
    return 1 << (count - 1).bit_length()


def _module() -> Any:
    return importlib.import_module("fla.ops.nsa.parallel")


def _serves(
    direction: str, q: Tensor, rows: Tensor, indices: Tensor, value_dim: int, block_size: int,
    queries: Sequence[Queries],
) -> bool:  # fmt: skip
    """Return whether the kernels compute a direction; at first use a small problem is compared."""
    group, refusal = max(_FEWEST_HEADS, _power(q.size(1) // rows.size(2))), None
    if q.dtype not in (torch.bfloat16, torch.float16) or max(q.size(3), value_dim) > _MOST_DIM:
        refusal = f"they need bfloat16 or float16 and head dims up to {_MOST_DIM}"
    elif block_size < 16 or block_size != _power(block_size):
        refusal = f"they need blocks of 16, 32, 64, ... keys, got {block_size}"
    elif not all(torch.equal(each.seen, _causal(each.positions)) for each in queries):
        refusal = "they know no other mask than the causal one"
    kernel = direction, q.dtype, group, q.size(3), value_dim, block_size, _power(indices.size(3))
    check = partial(_small_error, *kernel, q.device)
    return _KERNELS.serve(q, refusal, kernel, check, adds_in_any_order=direction == "backward")


def _causal(positions: Tensor) -> Tensor:
    """Return `Queries.seen` of a causal mask."""
    return torch.stack((torch.zeros_like(positions), positions + 1)).unsqueeze(0)


@quiet()  # the package is imported and compiles
def _small_error(
    direction: str, dtype: torch.dtype, heads: int, dim: int, value_dim: int, block_size: int, count: int,
    device: torch.device,
) -> str:  # fmt: skip
    """Compare a problem of one group with float64; "" if it is right. Some queries have few blocks, some none."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator, device=device).to(dtype)

    places = torch.arange(1, _CHECKED, 3)  # of queries; other ranks have the others
    seen = _causal(places)
    queries = [Queries(places, seen, seen.to(device))]
    q, rows, sink = normal(heads, len(places), dim), normal(_CHECKED, 1, value_dim + dim), normal(heads)[0]
    grad_out, own = normal(heads, len(places), value_dim), places.to(device)[None, :, None, None] // block_size
    steps = torch.randint(1, 9, (1, len(places), 1, count), generator=generator, device=device).cumsum(3)
    index = (own + steps[..., :1] - steps).int()  # the own block and earlier ones; before the first one are none
    index = torch.where(index < 0, -1, index)
    index[:, 5:90:7] = -1
    options = dim**-0.5, block_size
    wide = F.pad(q, (value_dim, 0)).double(), rows.double(), index, sink.double()
    out, lse = attend_chosen_reference(*wide, value_dim, *options, [queries[0].on_device])
    if direction == "forward":
        return wrong_result(("out", "lse"), _forward(q, rows, index, sink, value_dim, *options, queries), (out, lse))
    dq, *others = chosen_gradients_reference(grad_out.double(), *wide, out, lse, *options, [queries[0].on_device])
    got = _backward(grad_out, q, rows, index, sink, out.to(dtype), lse.float(), *options, queries)
    return wrong_result(("dq", "d_rows", "d_sink"), got, (dq[..., value_dim:], *others))  # type: ignore[arg-type]
