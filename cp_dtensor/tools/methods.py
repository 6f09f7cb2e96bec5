"""The methods of the benchmark by name: one GPU as the ideal, this library's, and torch's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor import context_parallel, context_parallel_attention, explain
from cp_dtensor.attention.masked import Dropout, RowMask, attention_backward, attention_forward
from cp_dtensor.tools.cases import AllTokens, Attention, ByLayout, Case, Method
from cp_dtensor.tools.errors import seen_keys
from cp_dtensor.tools.flex import flex_methods
from cp_dtensor.tools.parsing import LAYOUTS
from cp_dtensor.tools.report import IDEAL, OURS_PREFIX
from cp_dtensor.tools.torch_methods import (
    allowed_backend,
    mesh_of_ranks,
    sdpa,
    torch_methods,
    varlen_on_one_gpu,
    varlen_refusal,
)


def methods_by_name(
    names: Sequence[str] | None, *, graph: bool = False, compiled: bool = False, replay: bool = False
) -> tuple[Method, ...]:
    """The methods of names such as "ours-auto Balanced"; with None, those that are measured by default.

    With `graph`, `compiled` and `replay`, this library's methods are added as CUDA graphs, under torch.compile and with
    `replay=True`.

    Raises:
        ValueError: no method has one of the names.
    """
    known, splits = {method.name: method for method in _all_methods()}, splits_by_name()
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
        name = method.name.removeprefix(OURS_PREFIX)
        if replay and name in splits:
            result.append(_ours(f"{name} replay", dataclasses.replace(splits[name], replay=True)))
        if compiled:
            attention = partial(_compiled, method.attention)
            result.append(dataclasses.replace(method, name=f"{method.name} compiled", attention=attention))
        if graph:
            result.append(dataclasses.replace(method, name=f"{method.name} graph", captured=True))
    return tuple(result)


def splits_by_name() -> dict[str, Split]:
    """This library's ways by name, in the layout of the case ("auto") and in each other layout ("auto Balanced")."""
    splits = dict(_SPLITS)
    for layout in LAYOUTS:
        splits |= {f"{name} {layout}": dataclasses.replace(split, layout=layout) for name, split in _SPLITS.items()}
    return splits


def _all_methods() -> list[Method]:
    ours = [_ours(name, split) for name, split in splits_by_name().items()]
    one_gpu = [
        Method(
            IDEAL, sdpa, context=allowed_backend, shards=AllTokens(), may_expand_kv=True, has_dropout=True,
            suits=lambda case: case.is_plain,
        ),
        Method(f"{IDEAL}-installed", _by_installed_kernels, context=_backend, shards=AllTokens(), has_dropout=True),
        Method(
            f"{IDEAL}-kernels", _kernels, shards=AllTokens(), has_dropout=True,
            suits=lambda case: not case.is_plain or case.dropout > 0,
        ),
        Method(
            f"{IDEAL}-varlen", varlen_on_one_gpu, varlen_refusal, shards=AllTokens(),
            suits=lambda case: not case.is_plain,
        ),
    ]  # fmt: skip
    return [*one_gpu, *ours, *flex_methods(), *torch_methods()]


def _ours(name: str, split: Split) -> Method:
    return Method(
        OURS_PREFIX + name, split.attention, split.refusal, context=_backend, shards=ByLayout(split.layout),
        by_default=split.layout is None, has_dropout=True, predicted_ms=split.predicted_ms,
    )  # fmt: skip


def _compiled(eager: Callable[[Case, torch.device], Attention], case: Case, device: torch.device) -> Attention:
    # All methods and cases share the code of one closure. Without a reset they meet Dynamo's limit of recompilations.
    # From the second length on they would have dynamic shapes, which a training step of one length does not have.
    torch.compiler.reset()
    return torch.compile(eager(case, device), fullgraph=True, dynamic=False)


# One GPU: the time of the whole sequence, to be divided by the number of ranks


def _by_installed_kernels(case: Case, device: torch.device) -> Attention:
    alone, mask = _group_of_this_rank(), case.mask_value

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = context_parallel_attention(
            q, k, v, mesh=alone, mask=mask, dropout_p=case.dropout, enable_gqa=case.enable_gqa, seq_len=q.size(2)
        )
        assert isinstance(out, torch.Tensor)
        return out

    return attention


@cache
def _group_of_this_rank() -> dist.ProcessGroup:
    # NCCL would split the default group, for which every rank has to call.
    group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _kernels(case: Case, device: torch.device) -> Attention:
    """Attention by the library's masked kernels on one device; positions are in runs, for which dropout is fastest."""
    lo, hi = seen_keys(case.mask_value, case.seq_len).to(device, torch.int32)
    mask, dropout = RowMask(lo=lo, hi=hi), None
    if case.dropout:
        position = torch.arange(case.seq_len, device=device, dtype=torch.int32)
        dropout = Dropout(case.dropout, torch.tensor(7, device=device), position, position, in_runs=True)
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
    replay: bool = False

    def attention(self, case: Case, device: torch.device) -> Attention:
        mesh = mesh_of_ranks(device.type, self.inner_size)
        mask, layout = case.mask_value, case.layout_value(self.layout)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = context_parallel_attention(
                q, k, v, mesh=mesh, method=self.method, mask=mask, dropout_p=case.dropout, enable_gqa=case.enable_gqa,
                layout=layout, rotate_method=self.rotate_method, seq_len=case.seq_len, replay=self.replay,
            )  # fmt: skip
            assert isinstance(out, torch.Tensor)
            return out

        return attention

    def context(self, case: Case, device: torch.device, buffers: Sequence[torch.Tensor]) -> context_parallel:
        """The context in which (B, S) `buffers` are this rank's shards, also after it, and models attend to all tokens.

        `is_causal` of the calls is the mask of the case "causal".
        """
        return context_parallel(
            mesh_of_ranks(device.type, self.inner_size), buffers=buffers, buffer_seq_dims=[1] * len(buffers),
            no_restore_buffers=buffers, method=self.method, mask=None if case.is_plain else case.mask_value,
            layout=case.layout_value(self.layout), rotate_method=self.rotate_method,
        )  # fmt: skip

    def refusal(self, case: Case, world_size: int) -> str | None:
        size = self.inner_size
        if size is not None and (world_size % size or size >= world_size):
            return f"it needs several times {size} ranks"
        if self.rotate_method == "symm_mem" and dist.is_initialized() and dist.get_backend() == "gloo":
            return "ranks on CPUs share no memory"
        if self.replay and (case.dropout or "documents" in case.mask):
            return "replay=True takes no dropout and no packed documents"
        return case.layout_refusal(self.layout)

    def predicted_ms(self, case: Case, pass_name: str, device: torch.device) -> float | None:
        if device.type != "cuda" or case.dropout:
            return None
        explanation = explain(
            mesh_of_ranks(device.type, self.inner_size), seq_len=case.seq_len, q_heads=case.heads.q,
            kv_heads=case.heads.kv, head_dim=case.dims[0], v_head_dim=case.dims[1], batch_size=case.batch,
            dtype=getattr(torch, case.dtype), mask=case.mask_value,
            layout=case.layout_value(self.layout), rotate_method=self.rotate_method, quiet=True,
        )  # fmt: skip
        estimate = explanation.methods[explanation.chosen if self.method == "auto" else self.method]
        return 1e3 * (estimate.seconds if pass_name == "fwdbwd" else estimate.forward)


_SPLITS = {
    **{name: Split("ring", name) for name in ("allgather", "alltoall", "symm_mem")},
    "ulysses": Split("ulysses"),
    "hybrid-2": Split("hybrid", inner_size=2),
    "hybrid-4": Split("hybrid", inner_size=4),
    "nested-2": Split("ring", inner_size=2),
    "nested-4": Split("ring", inner_size=4),
    "auto": Split("auto"),
}


def _backend(case: Case, device: torch.device) -> AbstractContextManager[object]:
    """Allows the backend of the case only; with "auto", the library chooses."""
    return nullcontext() if case.backend == "auto" else allowed_backend(case, device)
