"""Causal attention over chosen blocks of keys by the kernels of fla-core (native sparse attention).

They want one query for each key of the sequence, and 16 heads of a group or more. So the queries of each group stand at
their positions in a tensor of the whole sequence, whose other rows choose no block and cost little; heads and numbers
of blocks are padded. Sinks change the outputs and the log-sum-exp of which the kernels compute gradients. The package
tunes its kernels for a block size and head dims at their first use, which takes a minute.

Source: github.com/fla-org/flash-linear-attention, `fla.ops.nsa`; NSA (arXiv 2502.11089).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from cp_dtensor.api.extension import quiet, wide_dtype
from cp_dtensor.layers.chosen_reference import Chosen, Gradients, error_of_kernels, sink_gradient, with_sink
from cp_dtensor.layers.masked import Queries
from cp_dtensor.layers.package_kernels import PackageKernels

_KERNELS = PackageKernels("fla-core", "fla.ops.nsa.parallel", "block_attention")
_FEWEST_HEADS, _MOST_DIM, _CHECKED = 16, 256, 8192
"""Fewest heads of a group, largest head dim, and tokens of the problem that the first use computes and tunes for."""


def forward(q: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor]:
    """Compute `attend_chosen_reference` of rows [v | k]."""
    # In memory (B, T, H, Dv), as the projection after attention reads it.
    out = q.new_empty(q.size(0), q.size(2), q.size(1), chosen.value_dim).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    for row, _, heads, place, k, v, blocks in _groups(q, chosen):
        given = _whole(q[row, heads], place, k.size(1)), k, v, blocks
        found, of_keys = _KERNELS.load().parallel_nsa_fwd(*given, blocks.size(3), chosen.block_size, chosen.scale)
        count = heads.stop - heads.start
        out[row, heads] = found[0].index_select(0, place)[:, :count].transpose(0, 1)
        lse[row, heads] = of_keys[0].index_select(0, place)[:, :count].T
    if chosen.sink is not None:
        out = (out * (lse - with_sink(lse, chosen.sink)).exp().unsqueeze(3)).to(out.dtype)
    return out.masked_fill_((lse == float("-inf")).unsqueeze(3), 0.0), lse  # the kernels divide 0 by 0


def backward(grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, chosen: Chosen) -> Gradients:
    """Compute `chosen_gradients_reference` of rows [v | k]."""
    total, dq, d_rows = with_sink(lse, chosen.sink), torch.empty_like(q), torch.empty_like(chosen.rows)
    for row, group, heads, place, k, v, blocks in _groups(q, chosen):
        whole_q, whole_out, grad = (_whole(x[row, heads], place, k.size(1)) for x in (q, out, grad_out))
        whole_lse = _whole(total[row, heads].unsqueeze(2), place, k.size(1)).squeeze(3)
        given = whole_q, k, v, whole_out, whole_lse, grad, blocks
        of_q, dk, dv = _KERNELS.load().parallel_nsa_bwd(*given, blocks.size(3), chosen.block_size, chosen.scale)
        dq[row, heads] = of_q[0].index_select(0, place)[:, : heads.stop - heads.start].transpose(0, 1)
        d_rows[row, :, group] = torch.cat((dv[0, :, 0], dk[0, :, 0]), 1)
    return dq, d_rows, sink_gradient(chosen.sink, total, grad_out, out)


def _groups(q: Tensor, chosen: Chosen) -> Iterator[tuple[int, int, slice, Tensor, Tensor, Tensor, Tensor]]:
    """Yield batch row, group, its heads, positions of queries, and k, v and blocks (1, S, 1, ...) as kernels take them.

    Numbers of blocks are padded; the queries of other ranks have none.
    """
    rows, count = chosen.rows, q.size(1) // chosen.rows.size(2)
    for row, group in product(range(q.size(0)), range(rows.size(2))):
        assert chosen.queries is not None
        place, numbers = chosen.queries[row].on_device[0, 1] - 1, chosen.indices[row, :, group]
        blocks = numbers.new_full((rows.size(1), _power(numbers.size(1))), -1, dtype=torch.int32)
        blocks[:, : numbers.size(1)].index_copy_(0, place, numbers.int())
        v, k = rows[row, :, group].split((chosen.value_dim, q.size(3)), 1)
        k, v, blocks = (x.contiguous()[None, :, None] for x in (k, v, blocks))
        yield row, group, slice(group * count, (group + 1) * count), place, k, v, blocks


def _whole(x: Tensor, place: Tensor, length: int) -> Tensor:
    """Return x (heads, T, D) at its positions, (1, length, 16 heads or more, D)."""
    heads = max(_FEWEST_HEADS, _power(x.size(0)))
    made = x.new_zeros(length, heads, x.size(2))
    made[:, : x.size(0)].index_copy_(0, place, x.transpose(0, 1))
    return made.unsqueeze(0)


def _power(count: int) -> int:
    """Return the first power of 2 from `count` on."""
    return 1 << (count - 1).bit_length()


def serves(direction: str, q: Tensor, chosen: Chosen) -> bool:
    """Return whether the kernels compute a direction; at first use a small problem is compared."""
    group, refusal = max(_FEWEST_HEADS, _power(q.size(1) // chosen.rows.size(2))), None
    if q.dtype not in (torch.bfloat16, torch.float16) or max(q.size(3), chosen.value_dim) > _MOST_DIM:
        refusal = f"they need bfloat16 or float16 and head dims up to {_MOST_DIM}"
    elif chosen.block_size < 16 or chosen.block_size != _power(chosen.block_size):
        refusal = f"they need blocks of 16, 32, 64, ... keys, got {chosen.block_size}"
    elif not all(torch.equal(each.seen, _causal(each.positions)) for each in chosen.queries or ()):
        refusal = "they know no other mask than the causal one"
    numbers = chosen.value_dim, chosen.block_size, _power(chosen.indices.size(3))
    kernel = direction, q.dtype, group, q.size(3), *numbers
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
    chosen = Chosen(rows, index, sink, value_dim, dim**-0.5, block_size, queries)
    return error_of_kernels(direction, forward, backward, q, grad_out, chosen)
