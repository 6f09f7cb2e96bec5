"""Calls of the fronts that have other programs' names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import Causal, Contiguous, Documents, Full, HeadTail, Layout, PerDocument, SlidingWindow
from cp_dtensor import context_parallel as context
from cp_dtensor.integrations import diffusers, ring_flash_attn, torch_experimental, torchtitan, unified
from cp_dtensor.integrations.long_context import LongContextAttention, UlyssesCut
from matrix.features import Case, Tensors

Result = Any


def context_options(case: Case) -> dict[str, Any]:
    return {
        "method": case.method, "rotate_method": case.transport, "layout": case.layout, "mask": case.mask,
        "seq_len": case.context_lengths, "deterministic": case.deterministic,
    }  # fmt: skip


# transformers, ParaAttention, torch's experimental context parallel: SDPA in a context


def provider(case: Case, _mesh: DeviceMesh, x: Tensors) -> Result:
    out, _ = x["provider"](
        x["q"], x["k"], x["v"], x.get("bias"), scaling=case.scale, dropout=case.dropout_p,
        is_causal=case.is_causal, softcap=case.softcap or None, s_aux=x.get("sinks"),
    )  # fmt: skip
    return out.transpose(1, 2)


def context_of_provider(case: Case, mesh: DeviceMesh, x: Tensors) -> context:
    """A context, and the function that models of transformers call."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from cp_dtensor.integrations.transformers import register

    x["provider"] = partial(ALL_ATTENTION_FUNCTIONS[register()], nn.Module())
    # The function takes no `is_causal` beside a mask, as in transformers.
    mask = case.whole_mask if case.bias else case.mask
    return context(mesh, **{**context_options(case), "mask": mask})


def unified_mode(case: Case, mesh: DeviceMesh, _x: Tensors) -> AbstractContextManager[Any]:
    of = mesh if mesh.ndim == 2 else mesh.get_group()
    return unified.UnifiedAttnMode(of, layout=case.layout, rotate_method=case.transport, seq_len=case.context_lengths)


def torchs_context(case: Case, mesh: DeviceMesh, _x: Tensors) -> AbstractContextManager[Any]:
    """Buffers give the lengths, as of position ids."""
    buffers = [torch.arange(length) for length in dict.fromkeys(case.lengths)] if case.declared else []
    return torch_experimental.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0] * len(buffers))


def torchs_layout(case: Case, ranks: int) -> Case:
    return replace(case, layout=Contiguous() if case.lengths[0] % (2 * ranks) else HeadTail())


# Functions of (B, S, H, D): ring-flash-attention, yunchang, diffusers


def _window_of(case: Case) -> tuple[int, int]:
    """Returns the window as flash-attn takes it."""
    return (case.mask.left, case.mask.right) if isinstance(case.mask, SlidingWindow) else (-1, -1)  # type: ignore[return-value]


def _flash_options(case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    is_causal = case.is_causal or getattr(case.mask, "within", Full()) == Causal()
    return {
        "dropout_p": case.dropout_p, "softmax_scale": case.scale, "causal": is_causal, "softcap": case.softcap,
        "window_size": _window_of(case), "deterministic": case.deterministic, "return_attn_probs": case.needs_lse,
        "group": mesh,
    }  # fmt: skip


def zigzag(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    result: Any = ring_flash_attn.zigzag_ring_flash_attn_func(
        q, k, v, **_flash_options(case, mesh), seq_len=case.seq_len
    )
    return (result[0].transpose(1, 2), result[1]) if case.needs_lse else result.transpose(1, 2)


def with_usp_layer(case: Case, mesh: DeviceMesh, x: Tensors) -> AbstractContextManager[Any]:
    if mesh.ndim == 1:
        ulysses = _ulysses_degree(mesh.size())
        shape = mesh.size() // ulysses, ulysses
        mesh = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("ring", "ulysses"))
    x["layer"] = LongContextAttention(ring_impl_type="zigzag", mesh=mesh)
    return nullcontext()


def _ulysses_degree(ranks: int) -> int:
    return 2 if ranks == 4 else 1


def usp_layout(case: Case, ranks: int) -> Case:
    return replace(case, alignment="bottom_right", layout=UlyssesCut(HeadTail(), _ulysses_degree(ranks)))


def usp(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    options = _flash_options(case, mesh)
    del options["group"]
    return x["layer"](q, k, v, seq_len=case.seq_len, **options).transpose(1, 2)


def with_config_of_diffusers(case: Case, mesh: DeviceMesh, x: Tensors) -> AbstractContextManager[Any]:
    ring, ulysses = mesh.shape if mesh.ndim == 2 else (mesh.size(), 1)
    is_uneven = any(length % mesh.size() for length in case.lengths)
    config = SimpleNamespace(
        ring_degree=ring, ulysses_degree=ulysses, ring_anything=is_uneven, ulysses_anything=False, _mesh=mesh,
        _ring_mesh=mesh,
    )  # fmt: skip
    x["config"] = SimpleNamespace(context_parallel_config=config)
    return nullcontext()


def backend_of_diffusers(case: Case, _mesh: DeviceMesh, x: Tensors) -> Result:
    result: Any = diffusers.attention(
        *(x[name].transpose(1, 2) for name in "qkv"), x.get("bias"), case.dropout_p, case.is_causal, case.scale,
        case.enable_gqa, case.needs_lse, x["config"],
    )  # fmt: skip
    return tuple(each.transpose(1, 2) for each in result) if case.needs_lse else result.transpose(1, 2)


# Functions of packed documents (tokens, H, D): ring-flash-attention, TorchTitan


def edges_of(case: Case) -> tuple[int, ...]:
    """Returns where documents begin and end; those of one document without any."""
    return case.mask.cu_seqlens if isinstance(case.mask, Documents) else (0, case.lengths[0])


def divided(layout: Callable[..., Layout]) -> Callable[[Case, int], Case]:
    """Returns what a front settles whose ranks divide each document evenly, in up to two chunks."""

    def settle(case: Case, ranks: int) -> Case:
        length = 24 * ranks
        placed = layout(edges_of(replace(case, lengths=(length, length))), seq_len=length)
        return replace(case, batch=1, lengths=(length, length), alignment="bottom_right", layout=placed)

    return settle


ring_documents, zigzag_documents = divided(ring_flash_attn.ContiguousPerDocument), divided(PerDocument)


def cut(case: Case, _ranks: int) -> Case:
    return replace(case, batch=1, alignment="bottom_right", layout=Contiguous())


def cut_evenly(case: Case, ranks: int) -> Case:
    length = -(-case.lengths[0] // ranks) * ranks
    return replace(cut(case, ranks), lengths=(length, length))


def packed(x: Tensors) -> list[torch.Tensor]:
    return [x[name][0].transpose(0, 1) for name in "qkv"]


def _packed_result(case: Case, result: Any) -> Result:
    out, lse = result[:2] if case.needs_lse else (result, None)
    out = out.transpose(0, 1)[None]
    return out if lse is None else (out, lse[None])


def documents_of_ring(kind: str, case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    edges = [edge // mesh.size() for edge in edges_of(case)]
    function: Any = getattr(ring_flash_attn, f"{kind}_flash_attn_varlen_func")
    return _packed_result(case, function(*packed(x), edges, max(edges), **_flash_options(case, mesh)))


def with_llama3(case: Case, mesh: DeviceMesh, x: Tensors) -> AbstractContextManager[Any]:
    edges, is_causal = torch.tensor(edges_of(case), dtype=torch.int32), _flash_options(case, mesh)["causal"]
    *told, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(edges, is_causal, dist.get_rank(), mesh.size())
    x["told"] = (*told, 1, keys)
    return nullcontext()


def documents_of_llama3(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    function: Any = ring_flash_attn.llama3_flash_attn_varlen_func
    return _packed_result(case, function(*packed(x), *x["told"], **_flash_options(case, mesh)))


def with_titan(case: Case, mesh: DeviceMesh, x: Tensors) -> AbstractContextManager[Any]:
    edges = torch.tensor(edges_of(case))
    given = SimpleNamespace(cu_seq_q=edges, cu_seq_k=edges)
    x["metadata"] = torchtitan.prepare_metadata(given, permutation=None, world_size=mesh.size())
    return nullcontext()


def documents_of_titan(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    options = _flash_options(case, mesh)
    left, right = options["window_size"]
    window = left, 0 if options["causal"] else right
    out = torchtitan.attention(*packed(x), mesh=mesh, metadata=x["metadata"], window_size=window, scale=case.scale)
    return _packed_result(case, out)
