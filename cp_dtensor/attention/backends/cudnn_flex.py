"""Backend on cuDNN's FlexAttention, of the package nvidia-cudnn-frontend: interval-masked tiles.

A tile's intervals become a mask plan: tables of the blocks that are full or masked in part, in the order in which the
kernels read them. A plan belongs to a mask and a geometry. Making one takes 2 to 4 ms of the host, so the latest ones
are kept. Source: docs.nvidia.com/deeplearning/cudnn, FlexAttention.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor._torch.cache import Shared, capturing
from cp_dtensor._torch.tensors import aligned, empty_in_order_of, unit_stride
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.interval import IntervalAttention, tile_rows
from cp_dtensor.attention.backends.launches import Call, Launches, noting
from cp_dtensor.attention.backends.packages import SHORTEST, Package, check_parameters, quiet
from cp_dtensor.attention.triton.row_mask import RowMask
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import IntervalMask, KeyRun, TileMask
from cp_dtensor.spec.cache import LRUCache
from cp_dtensor.spec.intervals import IntervalBand
from cp_dtensor.spec.layouts import Segment

PACKAGE = Package("nvidia-cudnn-frontend", "cuDNN's FlexAttention")
MOST_BYTES = 512 << 20
"""Of the mask plan of one tile; our kernels compute tiles whose plans would be larger."""
KEPT_BYTES, _KEPT_PLANS = 128 << 20, 4
"""Bytes of the latest plans, which are kept, and how many are kept however large they are. Documents of 65,536 tokens
have plans of 1 to 3 MiB. Two masks in turns need four plans: of own and of other keys."""
_KEPT_LAUNCHES = 16
"""Of a plan: forward and backward, other scales and other memory orders of the tensors."""
_BLOCK = 128
"""Rows and columns of a block of a mask plan."""
_BYTES_OF_PARTIAL_BLOCK = 3 * _BLOCK * _BLOCK // 8
"""One bit for each pair, in the orders of forward, dQ and dK/dV."""
_INTERVALS = _REFERENCE = IntervalAttention()


@dataclass(frozen=True)
class CudnnFlexAttention(AttentionBackend):
    """cuDNN's FlexAttention: bfloat16 and float16, GQA natively, head dims up to 128, 192/128 and 256/256.

    The kernels of this package compute tiles shorter than `SHORTEST`, tiles whose plans would be too large, tiles
    without a plan under CUDA graph capture, and all tiles if the first results of cuDNN's kernels were wrong.
    """

    has_gradients: bool = True
    """False for gradients by the kernels of this package, which are the same bits in every run. cuDNN's backward of
    that kind takes 24 times as long under a window (docs/decisions.md#cudnns-deterministic-backward-is-not-used)."""

    name = "CUDNN_FLEX_ATTENTION"

    @property
    def joins_intervals(self) -> bool:
        return self.has_gradients

    def refusal(self, spec: CallSpec) -> str | None:
        dims = spec.head_dim, spec.v_head_dim
        if refusal := PACKAGE.refusal(spec):
            return refusal
        if dims not in ((192, 128), (256, 256)) and any(dim % 8 or dim > 128 for dim in dims):
            return f"it needs head dims of multiples of 8 up to 128, 192 and 128, or 256, got {dims[0]} and {dims[1]}"
        assert spec.capability is not None
        if spec.q_heads != spec.kv_heads and dims[0] != dims[1] and spec.capability[0] == 9:
            return f"its gradients of grouped heads need equal head dims on Hopper, got {dims[0]} and {dims[1]}"
        return _functions().obstacle

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
        result = None
        if self._serves("forward", q, k, v, mask):
            result = _forward(q, k, v, mask, scale)
        return result or _INTERVALS.forward(q, k, v, mask, scale)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        result = None
        if self.has_gradients and self._serves("backward", q, k, v, mask):
            result = _backward(grad_out, q, k, v, out, lse, mask, scale)
        return result or _INTERVALS.backward(grad_out, q, k, v, out, lse, mask, scale)

    def _serves(self, direction: str, q: Tensor, k: Tensor, v: Tensor, mask: TileMask) -> bool:
        """Return whether these kernels may compute a tile. Their first use compiles them and ours, for a small tile."""
        assert isinstance(mask, IntervalMask)
        if min(q.size(2), k.size(2)) < SHORTEST:
            return False

        def compute(*arguments: Any) -> Any:
            # Compiles our kernels too: otherwise the first small tile of a later mask would, in the middle of a run.
            getattr(_REFERENCE, direction)(*arguments)
            kernel: Any = _forward if direction == "forward" else _backward
            return kernel(*arguments, is_check=True)

        has_several, group = len(mask.sets) > 1, q.size(1) // k.size(1)
        kind, small = ("several intervals",) * has_several, _small_mask(has_several)
        return PACKAGE.passes_check(direction, kind, q, v, group, 4 * _BLOCK, small, _REFERENCE, compute)


@lru_cache(maxsize=2)  # one object of each kind: forward and backward share its plan
def _small_mask(has_several: bool) -> IntervalMask:
    """Return a window of 4 x 4 blocks, of which some are full, some partial and some empty.

    The first and the last block of rows see nothing, and no row sees the last block of columns, as often in a ring.
    With `has_several` the window is shorter, and rows see two more intervals in front of it: a full block, and some
    columns behind that.
    """
    rows, positions = (0, 4 * _BLOCK), Segment.contiguous(0, 4 * _BLOCK)
    first, last, end = _BLOCK + 12, 3 * _BLOCK, 3 * _BLOCK
    bands = [IntervalBand(first, last, lo=0, hi=end, left=2 * _BLOCK + 40, right=10)]
    if has_several:
        window = IntervalBand(first, last, lo=_BLOCK + 30, hi=end, left=_BLOCK + 22, right=10)
        few = IntervalBand(first + 5, last - 7, lo=_BLOCK + 3, hi=_BLOCK + 20)
        bands = [window, IntervalBand(first, last, lo=0, hi=_BLOCK), few]
    return IntervalMask(tuple(((band,),) for band in bands), (positions,), rows, KeyRun((positions,)), rows)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float, is_check: bool = False
) -> tuple[Tensor, Tensor] | None:
    """Return the partial result; None for a tile without a plan. `is_check`: what the kernel does not write is NaN."""
    planned = planned_tile(mask, Geometry.of(q, k, v), is_check)
    if planned is None:
        return None
    k, v = tile_rows(mask, q.device).without_hidden(k, v)
    out, lse = results = empty_in_order_of(q, v.size(3)), q.new_empty(q.shape[:3], dtype=torch.float32)
    for result in results if is_check else ():
        result.fill_(float("nan"))
    inputs = tuple(aligned(x, 16).transpose(1, 2) for x in (q, k, v))
    return results if _launch(planned, "forward", (*inputs, out.transpose(1, 2), lse), scale) else None


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float,
    is_check: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Return the gradients; None for a tile without a plan. `is_check` as in `_forward`."""
    planned = planned_tile(mask, Geometry.of(q, k, v), is_check)
    if planned is None:
        return None
    k, v = tile_rows(mask, q.device).without_hidden(k, v)
    width = 128 if q.size(3) == v.size(3) == 256 else 16
    inputs = *(aligned(x, width).transpose(1, 2) for x in (q, k, v, out, grad_out)), unit_stride(lse)
    dq, dk, dv = results = tuple(empty_in_order_of(x, x.size(3)) for x in (q, k, v))
    for result in results if is_check else ():
        result.fill_(float("nan"))
    grads = tuple(grad.transpose(1, 2) for grad in results)
    return (dq, dk, dv) if _launch(planned, "backward", (*inputs, *grads), scale) else None


def _launch(planned: PlannedTile, direction: str, tensors: tuple[Tensor, ...], scale: float) -> bool:
    """Launch the kernel for q, k, v, out and lse, or for q, k, v, out, grad_out, lse, dq, dk and dv, (B, S, H, D).

    False under CUDA graph capture, if no kernel was made for tensors of these strides before it.
    """
    strides = tuple([tensor.stride() for tensor in tensors])
    launches = planned.launches.get((direction, scale, strides))
    if launches is not None:
        launches.launch(tensors)
        return True
    kernel = planned.kernel(direction, tensors, strides)
    if kernel is None:
        return False
    size, calls = kernel.workspace_size, list[Call]()
    workspace = torch.empty(size, dtype=torch.uint8, device=tensors[0].device) if size else None
    arguments = planned.arguments(direction, tensors)
    _recording(kernel, calls).execute(*arguments, workspace=workspace, softmax_scale=scale)
    launches = Launches.of(calls, tensors, planned.tensors)
    if launches is not None:
        planned.launches.add((direction, scale, strides), launches)
    return True


def _recording(kernel: Any, calls: list[Call]) -> Any:
    """Return a copy of a kernel that appends the compiled functions that it calls to `calls`, with their arguments."""
    copied = copy.copy(kernel)
    compiled: Any = getattr(kernel, "_compiled_kernel", None)  # private
    if is_dataclass(type(compiled)):  # of backward: the functions before and after the main one, too
        functions = {each.name: getattr(compiled, each.name) for each in fields(compiled)}
        noted = {name: noting(function, calls) for name, function in functions.items() if callable(function)}
        copied._compiled_kernel = replace(compiled, **noted)
    elif callable(compiled):
        copied._compiled_kernel = noting(compiled, calls)
    return copied


# Mask plans


class Geometry(NamedTuple):
    """Shapes, dtype and device of a tile: with the mask, they determine the mask plan."""

    batch: int
    rows: int
    columns: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor) -> Geometry:
        """Return the geometry of a tile, (B, H, S, D)."""
        batch, heads, rows, head_dim = q.shape
        return Geometry(batch, rows, k.size(2), heads, k.size(1), head_dim, v.size(3), q.dtype, q.device)

    def samples(self) -> list[Tensor]:
        """Return q, k and v (B, S, H, D) of this geometry without memory of their own, for functions that read none."""
        dims = (self.rows, self.heads, self.head_dim), (self.columns, self.kv_heads, self.head_dim)
        shapes = ((self.batch, *dim) for dim in (*dims, (self.columns, self.kv_heads, self.v_head_dim)))
        return [torch.empty_strided(shape, (0, 0, 0, 1), dtype=self.dtype, device=self.device) for shape in shapes]


@dataclass(eq=False)
class PlannedTile:
    """The mask plan of a tile, and how its kernels are launched."""

    plan: Any
    """None for a tile whose plan would be too large."""
    tensors: tuple[Tensor, ...] = ()
    """Those of the plan."""
    launches: LRUCache[Launches] = field(default_factory=partial(LRUCache, 0, least=_KEPT_LAUNCHES))
    """By direction, scale and the strides of the tensors."""
    _kernels: dict[Any, Any] = field(default_factory=dict)

    def kernel(self, direction: str, tensors: tuple[Tensor, ...], strides: tuple[Any, ...]) -> Any | None:
        """Return the package's kernel for tensors of these strides; None if new under CUDA graph capture."""
        kernel = self._kernels.get((direction, strides))
        if kernel is None and not capturing():
            with quiet():
                kernel = getattr(_functions(), direction)(*self.arguments(direction, tensors))
                kernel.check_support()
                kernel.compile()
            self._kernels[direction, strides] = kernel
        return kernel

    def arguments(self, direction: str, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Return the tensors and the plan in the order of the package's kernels."""
        place = 4 if direction == "forward" else 9
        return *tensors[:place], self.plan, *tensors[place:]


_planned = LRUCache[Shared[PlannedTile]](KEPT_BYTES, least=_KEPT_PLANS, pins=capturing)
"""Keys: mask (compared by identity) and geometry."""


def planned_tile(mask: TileMask, geometry: Geometry, is_check: bool = False) -> PlannedTile | None:
    """Return the plan of a tile, made if it is new. None if it would be too large, or new under CUDA graph capture.

    None as well where there is no memory for it now; a check raises then.
    """
    planned = _planned.get((mask, geometry))
    if planned is None and capturing():
        return None
    try:
        if planned is None:
            rows = tile_rows(mask, geometry.device).masks
            shared = Shared(geometry.device, lambda: _plan_tile(rows, geometry), lambda tile: tile.tensors)
            planned = _planned.add((mask, geometry), shared)
        tile = planned.read()
    except torch.OutOfMemoryError:
        if is_check:
            raise
        return None
    return None if tile.plan is None else tile


def _plan_tile(masks: Sequence[RowMask], geometry: Geometry) -> PlannedTile:
    with quiet():
        if sum(plan_bytes(mask, geometry) for mask in masks) > MOST_BYTES:
            return PlannedTile(None)
        plan = _functions().create_mask_plan(end_points(masks, geometry), *geometry.samples(), build_backward=True)
    return PlannedTile(plan, tuple(_functions().plan_tensors(plan)))


def end_points(masks: Sequence[RowMask], geometry: Geometry) -> Tensor:
    """Return (1, 1 + 2 masks, B * S), int32: ascending ends F of [0, F0), [F1, F2), ... that each row sees; F0 is 0.

    >>> mask = RowMask(lo=torch.tensor([-3, 2, 9]).int(), hi=torch.tensor([2, 1, 11]).int())
    >>> geometry = Geometry(1, 3, 10, 1, 1, 8, 8, torch.bfloat16, torch.device("cpu"))
    >>> end_points([mask], geometry).tolist()
    [[[0, 0, 0], [0, 2, 9], [2, 2, 10]]]
    """
    ends = [end for mask in masks for end in _clamped(mask, geometry)]
    if len(masks) > 1:  # intervals of a row do not overlap, so their ends in order are begin, end, begin, end
        ends = list(torch.stack(ends).sort(0).values)
    return torch.stack([torch.zeros_like(ends[0]), *ends]).flatten(1).unsqueeze(0)


def plan_bytes(mask: RowMask, geometry: Geometry) -> int:
    """Return an estimate of a plan's bytes, without making it. Waits for the device.

    A block of rows and columns takes memory if it is masked in part.
    """
    lo, hi = _clamped(mask, geometry)
    empty, columns = lo == hi, geometry.columns
    lo, hi = lo.masked_fill(empty, columns), hi.masked_fill(empty, 0)

    def by_block(ends: Tensor, fill: int) -> Tensor:
        return F.pad(ends, (0, -geometry.rows % _BLOCK), value=fill).unflatten(1, (-1, _BLOCK))

    seen_by_any = (by_block(hi, 0).amax(2) - by_block(lo, columns).amin(2)).clamp(min=0)
    seen_by_all = (by_block(hi, columns).amin(2) - by_block(lo, 0).amax(2)).clamp(min=0)
    partial = (seen_by_any - seen_by_all) // _BLOCK + 2 * (seen_by_any > 0)
    return int(partial.sum()) * _BYTES_OF_PARTIAL_BLOCK


def _clamped(mask: RowMask, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return (B, S) each: the first column that each row sees and the end of its columns, not before the first."""
    assert mask.intervals is not None
    lo, hi = (x.expand(geometry.batch, -1).clamp(0, geometry.columns) for x in mask.intervals)
    return lo, torch.maximum(lo, hi)


class _Functions(NamedTuple):
    obstacle: str | None
    forward: Any = None
    backward: Any = None
    create_mask_plan: Any = None
    plan_tensors: Any = None


@lru_cache(maxsize=1)
def _functions() -> _Functions:
    """Import the package, which takes seconds, and check that its functions take what this file passes."""
    try:
        with quiet():
            module = importlib.import_module("cudnn.flex_attention")
            plan_tensors = importlib.import_module("cudnn.flex_attention.execution")._plan_tensors
        forward, backward, create = module.FlexAttentionFwd, module.FlexAttentionBwd, module.create_mask_plan
        check_parameters(create, "mask_func", "q", "k", "v", "build_backward")
        check_parameters(plan_tensors, "mask_plan")
        options = "mask_plan", "workspace", "softmax_scale"
        names: tuple[str, ...] = ("q", "k", "v", "o", "lse")
        check_parameters(forward, *(f"sample_{name}" for name in (*names, "mask_plan")))
        check_parameters(forward.execute, *(f"{name}_tensor" for name in names), *options)
        names = (*names, "do", "dq", "dk", "dv")
        check_parameters(backward, *(f"sample_{name}" for name in (*names, "mask_plan")))
        check_parameters(backward.execute, *(f"{name}_tensor" for name in names), *options)
    except Exception as error:  # of any package that it imports
        return _Functions(PACKAGE.unusable(error))
    return _Functions(None, forward, backward, create, plan_tensors)
