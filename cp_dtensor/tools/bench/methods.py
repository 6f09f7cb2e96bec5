"""The methods of the benchmark by name: one GPU as the ideal, this library's, and torch's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor import context_parallel_attention, explain
from cp_dtensor.attention.masked import Dropout, RowMask, attention_backward, attention_forward
from cp_dtensor.comm.symm_mem_workspace import allocated_bytes
from cp_dtensor.tools.bench.cases import AllTokens, Attention, ByLayout, Case, Method
from cp_dtensor.tools.bench.errors import seen_keys
from cp_dtensor.tools.bench.flex import flex_methods
from cp_dtensor.tools.bench.report import IDEAL, OURS_PREFIX
from cp_dtensor.tools.bench.torch_methods import torch_methods, varlen_methods
from cp_dtensor.tools.parsing import LAYOUTS

GRAPH_SUFFIX = " graph"
COMPILED_SUFFIX = " compiled"


def methods_by_name(names: Sequence[str] | None, *, graph: bool = False, compiled: bool = False) -> tuple[Method, ...]:
    """Returns the methods of names such as "ours-auto Balanced"; with None, those that are measured by default.

    With `graph` and `compiled`, this library's methods are added as CUDA graphs and under torch.compile.

    Raises:
        ValueError: no method has one of the names.
    """
    known = {method.name: method for method in _all_methods()}
    if unknown := [name for name in names or () if name not in known]:
        listed = [name for name, each in known.items() if each.by_default or not name.startswith(OURS_PREFIX)]
        with_layout = f"ours also with a layout, such as '{OURS_PREFIX}auto Balanced'"
        raise ValueError(f"unknown method {unknown[0]!r}: expected some of {', '.join(listed)}; {with_layout}")
    chosen = [each for name, each in known.items() if (each.by_default if names is None else name in names)]
    result = []
    for method in chosen:
        result.append(method)
        if not method.name.startswith(OURS_PREFIX):
            continue
        if compiled:
            attention = partial(_compiled, method.attention)
            result.append(dataclasses.replace(method, name=method.name + COMPILED_SUFFIX, attention=attention))
        if graph:
            result.append(dataclasses.replace(method, name=method.name + GRAPH_SUFFIX, captured=True))
    return tuple(result)


def _all_methods() -> list[Method]:
    splits = list(_SPLITS.items())
    for layout in LAYOUTS:
        splits += [(f"{name} {layout}", dataclasses.replace(split, layout=layout)) for name, split in _SPLITS.items()]
    ours = [
        Method(
            OURS_PREFIX + name, partial(_ours, split), partial(_our_refusal, split), partial(_our_workspace, split),
            shards=ByLayout(split.layout), by_default=split.layout is None, predicted_ms=partial(_predicted_ms, split),
        )
        for name, split in splits
    ]  # fmt: skip
    one_gpu = [
        Method(IDEAL, _one_gpu, shards=AllTokens(), may_expand_kv=True, suits=lambda case: case.is_plain),
        Method(f"{IDEAL}-kernels", _kernels, shards=AllTokens(), suits=lambda case: not case.is_plain),
    ]
    one_gpu_varlen, gathered_varlen = varlen_methods()
    torch_sdpa, torch_flex = torch_methods(allowed_backend, sdpa)
    return [*one_gpu, one_gpu_varlen, *ours, *torch_sdpa, gathered_varlen, *flex_methods(), *torch_flex]


@contextmanager
def _compiled(
    eager: Callable[[Case, torch.device], AbstractContextManager[Attention]], case: Case, device: torch.device
) -> Iterator[Attention]:
    with eager(case, device) as attention:
        yield torch.compile(attention, fullgraph=True)


# One GPU: the time of the whole sequence, to be divided by the number of ranks


@contextmanager
def _one_gpu(case: Case, device: torch.device) -> Iterator[Attention]:
    with allowed_backend(case, device):
        yield partial(sdpa, case)


def sdpa(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes torch's attention under a plain mask."""
    # The attribute is looked up at each call, since torch's context parallel replaces it.
    is_causal = case.mask == "causal"
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.size(1) != k.size(1))


def allowed_backend(case: Case, device: torch.device) -> AbstractContextManager[None]:
    """Allows the backend of the case only; "auto" is cuDNN on GPUs that have it, since it is the fastest."""
    if case.backend != "auto":
        return sdpa_kernel(SDPBackend.__members__[case.backend])
    half = case.dtype in ("bfloat16", "float16")
    if device.type == "cuda" and half and torch.cuda.get_device_capability(device) >= (8, 0):
        return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    return nullcontext()


@contextmanager
def _kernels(case: Case, device: torch.device) -> Iterator[Attention]:
    lo, hi = seen_keys(case.mask_value, case.seq_len).to(device, torch.int32)
    yield kernel_attention(RowMask(lo=lo, hi=hi))


def kernel_attention(mask: RowMask, dropout: Dropout | None = None) -> Attention:
    """Returns attention by the library's masked kernels on one device."""
    return lambda q, k, v: _Kernels.apply(q, k, v, mask, dropout)


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: RowMask, dropout: Dropout | None
    ) -> torch.Tensor:
        out, lse = attention_forward(q, k, v, mask, q.size(3) ** -0.5, dropout=dropout)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.dropout = mask, dropout
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        scale = q.size(3) ** -0.5
        dq, dk, dv = attention_backward(grad_out, q, k, v, out, lse, ctx.mask, scale, dropout=ctx.dropout)
        return dq, dk, dv, None, None


# This library


@dataclass(frozen=True)
class Split:
    """One way in which this library splits attention over the ranks."""

    method: str
    rotate_method: str = "auto"
    inner_size: int | None = None
    """Ranks of the inner mesh axis; None for one axis."""
    layout: str | None = None
    """Name of the layout; None for that of the case."""


_SPLITS = {
    **{name: Split("ring", name) for name in ("allgather", "alltoall", "symm_mem")},
    "ulysses": Split("ulysses"),
    "hybrid-2": Split("hybrid", inner_size=2),
    "hybrid-4": Split("hybrid", inner_size=4),
    "two-level-2": Split("ring", inner_size=2),
    "two-level-4": Split("ring", inner_size=4),
    "auto": Split("auto"),
}


@contextmanager
def _ours(split: Split, case: Case, device: torch.device) -> Iterator[Attention]:
    mesh = _mesh(split.inner_size, device.type)
    mask, layout = case.mask_value, case.layout_value(split.layout)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = context_parallel_attention(
            q, k, v, mesh=mesh, method=split.method, mask=mask, enable_gqa=case.enable_gqa, layout=layout,
            rotate_method=split.rotate_method, seq_len=case.seq_len,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    # With "auto", the library chooses the backend.
    with nullcontext() if case.backend == "auto" else allowed_backend(case, device):
        yield attention


@cache
def _mesh(inner_size: int | None, device_type: str) -> DeviceMesh:
    world_size = dist.get_world_size()
    if inner_size is None:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("cp",))
    return init_device_mesh(device_type, (world_size // inner_size, inner_size), mesh_dim_names=("ring", "ulysses"))


def _our_refusal(split: Split, case: Case, world_size: int) -> str | None:
    size = split.inner_size
    if size is not None and (world_size % size or size >= world_size):
        return f"{world_size} ranks are no mesh of several times {size}"
    try:
        case.layout_value(split.layout)
    except ValueError as error:
        return str(error)
    return None


def _our_workspace(split: Split, device: torch.device) -> int:
    """Returns the bytes of symmetric memory, which torch's allocator does not count; all calls share it."""
    never_uses_it = split.method == "ring" and split.rotate_method in ("allgather", "alltoall")
    return 0 if never_uses_it else allocated_bytes(device)


def _predicted_ms(split: Split, case: Case, pass_name: str, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    with redirect_stdout(StringIO()):  # `explain` prints its table
        explanation = explain(
            _mesh(split.inner_size, device.type), seq_len=case.seq_len, q_heads=case.heads.q, kv_heads=case.heads.kv,
            head_dim=case.head_dim, batch_size=case.batch, dtype=getattr(torch, case.dtype), mask=case.mask_value,
            layout=case.layout_value(split.layout), rotate_method=split.rotate_method,
        )  # fmt: skip
    estimate = explanation.methods[explanation.chosen if split.method == "auto" else split.method]
    return 1e3 * (estimate.seconds if pass_name == "fwdbwd" else estimate.forward)
