"""Launches of the Triton attention kernels, their inputs, and textbook attention in float64."""

from __future__ import annotations

import pytest
import torch
from conftest import GPUS

from cp_dtensor.attention.masked import RowMask, attention_backward_reference, attention_forward_reference
from cp_dtensor.attention.triton.dropout import Dropout
from support.dropouts import moved
from support.problems import dense
from support.row_masks import documents, prefix, window
from support.triton_interpreter import replace_functions_once_a_launch

kernel = pytest.importorskip("cp_dtensor.attention.triton.forward")
backward_kernel = pytest.importorskip("cp_dtensor.attention.triton.backward")
configs = pytest.importorskip("cp_dtensor.attention.triton.configs")
BlockConfig, launch = configs.BlockConfig, kernel.launch_attention_forward

Tensors = tuple[torch.Tensor, ...]
INFINITY = float("inf")
SCALE = 0.3
# Relative to the largest element: the error of rounding weights to that dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

NAMES = ("out", "lse", "dq", "dk", "dv")

# Without a GPU the kernels run in Triton's interpreter, which has no bfloat16 dots. Compiling takes a second for each
# kernel and kind of arguments: `test_attention_gpu` has the compiled cases.
if not GPUS:
    replace_functions_once_a_launch()
each_way_to_load = pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
NARROW = {"cpu": torch.float16, "cuda": torch.bfloat16}
EXACT = {"cpu": torch.float32, "cuda": torch.bfloat16}
SMALL = BlockConfig(block_rows=16, block_columns=16, warps=4, stages=2)


def draw(
    device: str,
    rows: int,
    columns: int,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype | None = None,
    batch: int = 1,
) -> Tensors:
    """Draws q (B, H, rows, D), k (B, Hkv, columns, D) and v (B, Hkv, columns, Dv)."""
    generator = torch.Generator().manual_seed(rows + columns)
    shapes = [(heads[0], rows, dims[0]), (heads[1], columns, dims[0]), (heads[1], columns, dims[1])]
    drawn = [torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return tuple(tensor.to(device, dtype or EXACT[device]) for tensor in drawn)


def seen_by(rows: int, columns: int, offset: int | None) -> torch.Tensor:
    """Returns a boolean (rows, columns) tensor: True if row i sees column j."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    return torch.ones(rows, columns, dtype=torch.bool) if offset is None else column <= row + offset


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float = SCALE) -> Tensors:
    """Returns `(out, lse)` of textbook attention in float64; (0, -inf) for rows without keys."""
    q, k, v = (tensor.cpu().double() for tensor in (q, k, v))
    return dense(q, k, v, seen, scale)


def empty_result(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype = torch.float32) -> Tensors:
    """Returns uninitialised `(out, lse)`, which is NaN in tests."""
    return q.new_empty((*q.shape[:3], v.size(3)), dtype=dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


def computed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offset: int | None,
    *,
    scale: float = SCALE,
    dtype: torch.dtype = torch.float32,
    config: BlockConfig | None = SMALL,
) -> Tensors:
    """Returns the kernel's `(out, lse)` in new tensors."""
    result = empty_result(q, v, dtype)
    launch(*result, q, k, v, RowMask(causal_offset=offset), scale, config=config)
    return result


def masks_of(rows: int, columns: int) -> dict[str, RowMask]:
    """Returns masks of each kind, some with rows without keys."""
    position = torch.arange(rows)
    generator = torch.Generator().manual_seed(rows)
    lo = torch.randint(-5, columns, (2, rows), generator=generator, dtype=torch.int32)
    hi = lo + torch.randint(-5, columns, (2, rows), generator=generator, dtype=torch.int32)
    edges = torch.tensor([5, 5, 12, rows - 4, rows - 2])
    return {
        "full": RowMask(),
        "causal": RowMask(causal_offset=columns - rows),
        "causal, from below": RowMask(causal_offset=-7),
        "window": window(position, 9, 4),
        "causal window": window(position + columns - rows, 20, 0),
        "prefix": prefix(position, 11),
        "prefixes": prefix(position, torch.tensor([[11], [0]])),
        "documents": documents(position + 3, edges),
        "causal documents": documents(position + 3, edges, is_causal=True),
        "any intervals": RowMask(lo=lo, hi=hi),
    }


def to(mask: RowMask, device: str) -> RowMask:
    """Returns the mask on a device."""
    if mask.lo is None or mask.hi is None:
        return mask
    return RowMask(lo=mask.lo.to(device), hi=mask.hi.to(device))


def biases_of(heads: int, rows: int, columns: int) -> dict[str, torch.Tensor | None]:
    """Returns biases of each kind for a batch of 2, with different shapes and strides."""
    generator = torch.Generator().manual_seed(columns)
    return {
        "none": None,
        "additive": torch.randn(2, heads, rows, columns, generator=generator),
        "of keys": torch.randn(heads, 1, columns, generator=generator),
        "narrow, transposed": torch.randn(2, 1, columns, rows, generator=generator).half().mT,
        "boolean": torch.rand(2, 1, rows, columns, generator=generator) > 0.4,
        "boolean, of keys": torch.rand(2, 1, 1, columns, generator=generator) > 0.4,
        "hides": torch.zeros(rows, columns).masked_fill_(
            torch.rand(rows, columns, generator=generator) > 0.5, -INFINITY
        ),
    }


def through_kernels(
    tensors: Tensors,
    grad_out: torch.Tensor,
    mask: RowMask,
    bias: torch.Tensor | None,
    config: BlockConfig | None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
) -> Tensors:
    """Returns `(out, lse, dq, dk, dv)` by the kernels; backward uses the out and lse of forward."""
    q, k, v = tensors
    out = q.new_empty((*q.shape[:3], v.size(3)), dtype=torch.float32)
    lse, delta = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    options = {"bias": bias, "dropout": dropout, "softcap": softcap}
    launch(out, lse, q, k, v, mask, SCALE, config=config, **options)
    backward_kernel.launch_attention_delta(delta, grad_out, out)
    gradients = tuple(torch.empty_like(x, dtype=torch.float32) for x in tensors)
    both = None if config is None else configs.BackwardConfig(dq=config, dkv=config)
    backward_kernel.launch_attention_backward(
        *gradients, grad_out, q, k, v, lse, delta, mask, SCALE, config=both, **options
    )
    return out, lse, *gradients


def through_reference(
    tensors: Tensors,
    grad_out: torch.Tensor,
    mask: RowMask,
    bias: torch.Tensor | None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
) -> Tensors:
    """Returns `(out, lse, dq, dk, dv)` by the reference implementation, in float64 on the CPU."""
    q, k, v, grad_out = (x.cpu().double() for x in (*tensors, grad_out))
    out, lse = q.new_empty((*q.shape[:3], v.size(3))), q.new_empty(q.shape[:3])
    mask, bias = to(mask, "cpu"), None if bias is None else bias.cpu()
    dropout = None if dropout is None else moved(dropout, "cpu")
    attention_forward_reference(out, lse, q, k, v, mask, SCALE, bias=bias, dropout=dropout, softcap=softcap)
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    delta = (grad_out * out).sum(-1)
    attention_backward_reference(
        *gradients, grad_out, q, k, v, lse, delta, mask, SCALE, bias=bias, dropout=dropout, softcap=softcap
    )
    return out, lse, *gradients


def check(
    tensors: Tensors,
    mask: RowMask,
    bias: torch.Tensor | None = None,
    config: BlockConfig | None = SMALL,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
) -> None:
    """Compares kernels with their reference implementation."""
    q, _, v = tensors
    device = q.device
    dropout = None if dropout is None else moved(dropout, str(device))
    mask = to(mask, str(device))
    bias = None if bias is None else bias.to(device)
    shape = (*q.shape[:3], v.size(3))
    grad_out = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device, q.dtype)
    results = through_kernels(tensors, grad_out, mask, bias, config, dropout, softcap)
    expected = through_reference(tensors, grad_out, mask, bias, dropout, softcap)
    for name, got, wanted in zip(NAMES, results, expected, strict=True):
        got = got.cpu().double()
        unseen = wanted == -float("inf")
        assert torch.equal(got == -float("inf"), unseen), name
        if wanted.numel():
            error = (got - wanted)[~unseen].abs().max().nan_to_num(nan=9e9) if not unseen.all() else torch.zeros(())
            relative = error / wanted[~unseen].abs().max().clamp(min=1) if not unseen.all() else error
            assert relative <= 2 * TOLERANCE[q.dtype], f"{name}: error {relative:.2e}"
    assert (results[2].cpu()[expected[1] == -float("inf")] == 0).all()


def patterns(dropout: Dropout, rows: int, columns: int, config: BlockConfig | None, device: str) -> Tensors:
    """Returns the dropout patterns of the three kernels, boolean (2, 2, rows, columns), True for weights not dropped.

    With the identity matrix for v, out = P v is the pattern; with the identity for dO, dV = P^T dO is its transpose. If
    all elements of dO V^T are equal, delta is less than that element times 1 / (1 - p), so dS is positive where weights
    are not dropped: dQ = dS K with the identity for K, and dK = dS^T Q with the identity for Q.
    """
    dim = max(rows, columns)
    options = {"device": device, "dtype": NARROW[device]}
    one, ones = (x.expand(2, 2, dim, dim) for x in (torch.eye(dim, **options), torch.ones(dim, dim, **options)))
    device_dropout = moved(dropout, device)

    def run(v: torch.Tensor, grad_out: torch.Tensor) -> Tensors:
        q, k, v, grad_out = (
            x[:, :, :length].contiguous() for x, length in ((one, rows), (one, columns), (v, columns), (grad_out, rows))
        )
        return through_kernels((q, k, v), grad_out, RowMask(), None, config, device_dropout)

    out, _, _, _, dv = run(one, one)
    _, _, dq, dk, _ = run(ones, ones)
    return tuple(
        x.cpu() > 0 for x in (out[..., :columns], dv.mT[..., :rows, :], dq[..., :columns], dk.mT[..., :rows, :])
    )
