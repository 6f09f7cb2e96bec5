"""The fronts: every public way to call attention, each built from a case."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from support.flex_checks import dense_flex_attention, traceable
from support.masked_problems import shown
from support.packed_calls import edges_of, packed_attention
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from cp_dtensor import (
    Batched,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    MirroredBatch,
    SlidingWindow,
    Striped,
    _torch,
    context_parallel,
    context_parallel_attention,
    context_parallel_flex_attention,
    context_parallel_mla,
    enable_context_parallel_dispatcher,
    ring_attention,
    ulysses_attention,
    varlen_attention,
)
from matrix import drop_ins
from matrix.drop_ins import context_options
from matrix.features import FEATURES, Case, Tensors, with_features

Result = Any
"""out, or (out, lse) if the case needs it."""


@dataclass(frozen=True)
class Front:
    """A public way to call attention."""

    call: Callable[[Case, DeviceMesh, Tensors], Result]
    """Attention of this rank's tensors, which may be compiled and recomputed."""
    around: Callable[[Case, DeviceMesh, Tensors], AbstractContextManager[Any]] = lambda *_: nullcontext()
    """The context of the call; it may add tensors."""
    settle: Callable[[Case, int], Case] = lambda case, _ranks: case
    """Sets what the front decides, such as its layout, on so many ranks."""
    patch: Callable[[bool], AbstractContextManager[Any]] = lambda _compiles: nullcontext()
    """Holds around all ranks; given True for compiled code."""
    lacks: frozenset[str] = frozenset()
    """Features that its arguments cannot express."""
    refuses: dict[str, str] = field(default_factory=dict)
    """Parts of the messages, by feature."""
    refuses_compiled: dict[str, str] = field(default_factory=dict)
    """As `refuses`, in compiled code."""
    is_live: bool = False
    """True if compiled code serves every mask without a compilation."""
    is_sized: bool = False
    """True if compiled code is for one length only."""
    is_whole_graph: bool = True
    """False if compiled code runs it between graphs."""
    slack: float = 1.5
    """In bfloat16: the largest error as a multiple of that of torch's attention on one device."""
    sums_shares: bool = True
    """False if the gradient of sinks is whole on every rank."""


def _modifiers(case: Case, x: Tensors) -> dict[str, Any]:
    return {
        "attn_mask": x.get("bias"), "sinks": x.get("sinks"), "softcap": case.softcap, "dropout_p": case.dropout_p,
        "scale": case.scale, "deterministic": case.deterministic, "return_lse": case.needs_lse,
        "is_causal": case.is_causal, "mask": case.mask,
    }  # fmt: skip


def _sharding(case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    return {"mesh": mesh, "layout": case.layout, "seq_len": case.seq_len}


def _function(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    return context_parallel_attention(
        x["q"], x["k"], x["v"], method=case.method, rotate_method=case.transport, enable_gqa=case.enable_gqa,
        **_sharding(case, mesh), **_modifiers(case, x),
    )  # fmt: skip


def _ring(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    return ring_attention(
        x["q"], x["k"], x["v"], rotate_method=case.transport, enable_gqa=case.enable_gqa, **_sharding(case, mesh),
        **_modifiers(case, x),
    )  # fmt: skip


def _ulysses(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    return ulysses_attention(
        x["q"], x["k"], x["v"], enable_gqa=case.enable_gqa, **_sharding(case, mesh), **_modifiers(case, x)
    )


def _sdpa(case: Case, _mesh: DeviceMesh, x: Tensors) -> Result:
    """SDPA, as models call it."""
    return F.scaled_dot_product_attention(
        x["q"], x["k"], x["v"], attn_mask=x.get("bias"), dropout_p=case.dropout_p, is_causal=case.is_causal,
        scale=case.scale, enable_gqa=case.enable_gqa,
    )  # fmt: skip


def _context(case: Case, mesh: DeviceMesh, x: Tensors) -> context_parallel:
    return context_parallel(mesh, sinks=x.get("sinks"), **context_options(case))


def _context_of_buffers(case: Case, mesh: DeviceMesh, x: Tensors) -> context_parallel:
    """Shards whole q, k and v in place; the leaves of the case get the gradients."""
    whole = {f"whole {name}": tensor for name, tensor in case.draw().items() if name in "qkv"}
    x.update(whole)
    options = {**context_options(case), "seq_len": None}
    return context_parallel(
        mesh, buffers=[*whole.values()], buffer_seq_dims=[2] * 3, sinks=x.get("sinks"), **options
    )  # fmt: skip


def _sdpa_of_buffers(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    shards = {name: x[f"whole {name}"] + (x[name] - x[name].detach()) for name in "qkv"}
    return _sdpa(case, mesh, {**x, **shards})


class _Attention(nn.Module):
    def forward(self, case: Case, mesh: DeviceMesh, x: Tensors) -> torch.Tensor:
        out: torch.Tensor = _sdpa(case, mesh, x)
        return out


def _with_module(case: Case, mesh: DeviceMesh, x: Tensors) -> AbstractContextManager[Any]:
    style = ContextParallel(sinks=x.get("sinks"), **context_options(case))
    x["module"] = parallelize_module(_Attention(), mesh, style)
    return nullcontext()


def _module(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    return x["module"](case, mesh, x)


def _with_dtensors(case: Case, mesh: DeviceMesh, x: Tensors) -> AbstractContextManager[Any]:
    """DTensors of the shards, which may be uneven."""

    def placed(name: str, *shape: int) -> DTensor:
        placement: Placement = Shard(2) if len(shape) == 4 else Replicate()
        stride = torch.empty(shape, device="meta").stride()
        local = x[name] if torch.is_grad_enabled() else x[name].detach()  # torch warns of leaves then
        size = torch.Size(shape)
        return DTensor.from_local(local, mesh, [placement] * mesh.ndim, shape=size, stride=stride, run_check=False)

    (q_len, kv_len), (q_heads, kv_heads) = case.lengths, case.heads
    shapes: dict[str, tuple[int, ...]] = {
        "q": (case.batch, q_heads, q_len, case.head_dim),
        "bias": (case.batch, q_heads, q_len, kv_len),
    }
    shapes |= dict.fromkeys("kv", (case.batch, kv_heads, kv_len, case.head_dim))
    shapes |= {"sinks": (q_heads,)}
    x.update({f"placed {name}": placed(name, *shape) for name, shape in shapes.items() if name in x})
    return nullcontext()


def _placed(x: Tensors) -> Tensors:
    return {name: x[f"placed {name}"] for name in ("q", "k", "v", "bias", "sinks") if f"placed {name}" in x}


def _with_dispatcher(case: Case, mesh: DeviceMesh, x: Tensors) -> AbstractContextManager[Any]:
    _with_dtensors(case, mesh, x)
    return enable_context_parallel_dispatcher()


def _local(result: Any) -> Result:
    return tuple(each.to_local() for each in result) if isinstance(result, tuple) else result.to_local()


def _dtensor(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    placed = _placed(x)
    result = context_parallel_attention(
        placed["q"], placed["k"], placed["v"], method=case.method, rotate_method=case.transport,
        enable_gqa=case.enable_gqa, **_modifiers(case, placed),
    )  # fmt: skip
    return _local(result)


def _dtensor_sdpa(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    return _local(_sdpa(case, mesh, _placed(x)))


def _documents_of(case: Case) -> Mask:
    """The mask as documents; of one document where it is another one."""
    within: Mask = case.mask if not case.is_causal else case.mask & Causal()
    if isinstance(case.mask, (Documents, Batched)):
        return case.mask
    return Documents([0, case.lengths[0]], [0, case.lengths[1]], within=within)


def _varlen(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    mask: Any = _documents_of(case)
    modifiers = {name: value for name, value in _modifiers(case, x).items() if name not in ("attn_mask", "mask")}
    modifiers["is_causal"] = case.is_causal and mask is case.mask  # otherwise it is within the document
    q, k, v = (x[name][0].transpose(0, 1) for name in "qkv")
    result: Any = varlen_attention(
        q, k, v, cu_seqlens=mask.cu_seqlens, cu_seqlens_k=mask.cu_seqlens_k, within=mask.within, method=case.method,
        rotate_method=case.transport, **_sharding(case, mesh), **modifiers,
    )  # fmt: skip
    out, lse = result if case.needs_lse else (result, None)
    out = out.transpose(0, 1)[None]
    return out if lse is None else (out, lse[None])


def _context_without_mask(case: Case, mesh: DeviceMesh, x: Tensors) -> context_parallel:
    return context_parallel(mesh, sinks=x.get("sinks"), **{**context_options(case), "mask": None})


def _varlen_edges(case: Case, mesh: DeviceMesh, x: Tensors) -> context_parallel:
    edges = edges_of(_documents_of(case), case.batch, case.lengths)
    x["edges q"], x["edges k"] = (each.to(case.device) for each in edges)
    return _context_without_mask(case, mesh, x)


def _varlen_attn(case: Case, _mesh: DeviceMesh, x: Tensors) -> Result:
    within = next(iter(getattr(case.mask, "masks", (case.mask,))))
    within = within.within if isinstance(within, Documents) else within
    window: Any = (within.left, within.right) if isinstance(within, SlidingWindow) else (-1, -1)
    if case.is_causal or isinstance(within, Causal):
        window = window[0], 0
    out, lse = packed_attention(x["q"], x["k"], x["v"], x["edges q"], x["edges k"], window, case.scale)
    return (out, lse) if case.needs_lse else out


def _mla(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    return context_parallel_mla(
        x["q"], x["latent"], x["k_rope"], up=x["up"], method=case.method, rotate_method=case.transport,
        **_sharding(case, mesh), **_modifiers(case, x),
    )  # fmt: skip


def _with_block_mask(case: Case, _mesh: DeviceMesh, x: Tensors) -> AbstractContextManager[Any]:
    x["block mask"] = None if case.whole_mask == Full() else _block_mask(case)
    return nullcontext()


def _context_and_block_mask(case: Case, mesh: DeviceMesh, x: Tensors) -> context_parallel:
    _with_block_mask(case, mesh, x)
    return _context_without_mask(case, mesh, x)


def _block_mask(case: Case) -> BlockMask:
    seen = shown(case.whole_mask, *case.lengths, case.batch).to(case.device)

    def mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return seen[b, h * 0, q, kv]

    return create_block_mask(mod, case.batch, None, *case.lengths, device=case.device, BLOCK_SIZE=8)


def _scale(case: Case) -> float:
    return case.head_dim**-0.5 if case.scale is None else case.scale


def _score_mod(case: Case) -> Any:
    return (lambda score, *_: case.softcap * torch.tanh(score / case.softcap)) if case.softcap else None


def _flex(case: Case, mesh: DeviceMesh, x: Tensors) -> Result:
    result: Any = context_parallel_flex_attention(
        x["q"], x["k"], x["v"], block_mask=x["block mask"], score_mod=_score_mod(case), scale=_scale(case),
        enable_gqa=case.enable_gqa, rotate_method=case.transport, return_lse=case.needs_lse, **_sharding(case, mesh),
    )  # fmt: skip
    return result


def _flex_in_context(case: Case, _mesh: DeviceMesh, x: Tensors) -> Result:
    result: Any = flex_attention(
        x["q"], x["k"], x["v"], block_mask=x["block mask"], score_mod=_score_mod(case), scale=_scale(case),
        enable_gqa=case.enable_gqa, return_aux=AuxRequest(lse=True) if case.needs_lse else None,
    )  # fmt: skip
    return (result[0], result[1].lse) if case.needs_lse else result


def _stand_in(compiles: bool) -> AbstractContextManager[Any]:
    """Torch's own FlexAttention has no gradients on CPUs."""
    return mock.patch.object(_torch, "original_flex_attention", traceable if compiles else dense_flex_attention)


def _as_dtensors(case: Case, _ranks: int) -> Case:
    return replace(case, layout=Contiguous(), placed=True)


MASKS = frozenset({"window", "documents", "padding", "batched", "union"})
BIASES = frozenset({"bool_bias", "float_bias"})
SDPA_LACKS = frozenset({"softcap", "lse"})
# DTensor.to_local of torch 2.11 drops second derivatives without an error, before the library sees them.
DTENSOR_LACKS = frozenset({"undeclared", *(["second_derivative"] if torch.__version__ < "2.12" else [])})
TWICE = {"second_derivative": "differentiate twice"}
FLASH_LACKS = BIASES | {"documents", "padding", "batched", "union", "sinks"}
PACKED_LACKS = BIASES | {"batched", "union", "sinks", "cross", "undeclared"}
DIVIDED_LACKS = PACKED_LACKS | {"uneven", "short"}
COMPILED_SINKS = {"sinks": "in compiled code does not take the sinks of its context"}

VARLEN_SCALE = "scale must be greater than 0"
"""Error of torch's own `varlen_attn`, from torch 2.15 on."""

FRONTS: dict[str, Front] = {
    "function": Front(_function, refuses=TWICE),
    "ring": Front(_ring, refuses=TWICE),
    "ulysses": Front(_ulysses, refuses={**TWICE, "2 axes": "expects a mesh of one dim, got axes"}),
    "context": Front(
        _sdpa, _context, lacks=SDPA_LACKS, refuses=TWICE, is_live=True, refuses_compiled=COMPILED_SINKS
    ),
    "buffers": Front(
        _sdpa_of_buffers, _context_of_buffers, lacks=SDPA_LACKS | {"undeclared"}, refuses=TWICE, is_live=True,
        refuses_compiled=COMPILED_SINKS,
    ),
    "module": Front(
        _module, _with_module, lacks=SDPA_LACKS, refuses=TWICE,
        refuses_compiled={"sinks": "a compiled module with ContextParallel does not take the sinks of its context"},
    ),
    "dtensor": Front(
        _dtensor, _with_dtensors, settle=_as_dtensors, lacks=DTENSOR_LACKS, refuses=TWICE,
        sums_shares=False,
        refuses_compiled=dict.fromkeys(FEATURES, "in compiled code, context_parallel_attention takes no DTensors"),
    ),
    "dtensor_sdpa": Front(
        _dtensor_sdpa, _with_dispatcher, _as_dtensors, refuses=TWICE,
        lacks=SDPA_LACKS | MASKS | DTENSOR_LACKS | {"sinks", "deterministic"},
    ),
    "varlen": Front(
        _varlen, settle=lambda case, _: replace(case, batch=1), lacks=BIASES | {"batched"}, refuses=TWICE
    ),
    "varlen_attn": Front(
        _varlen_attn, _varlen_edges, settle=lambda case, _: replace(case, alignment="bottom_right"),
        lacks=BIASES | {"softcap", "dropout", "union", "padding"}, is_live=True,
        refuses={
            **TWICE, "sinks": "varlen_attn does not take the sinks of its context",
            **({"scale<0": VARLEN_SCALE, "scale=0": VARLEN_SCALE} if hasattr(varlen, "_validate_scale") else {}),
            "undeclared": "needs to know how long the whole sequence of a batch row is",
        },
    ),
    "mla": Front(
        _mla, settle=lambda case, _: replace(case, latent=True), lacks=frozenset({"gqa", "mqa"}), refuses=TWICE,
        slack=2.0,  # latents are expanded first, and K/V rounded once more
    ),
    "flex": Front(
        _flex, _with_block_mask, patch=_stand_in, lacks=BIASES | {"dropout", "deterministic", "sinks"}, refuses=TWICE,
        slack=4.0,
    ),
    "flex_context": Front(
        _flex_in_context, _context_and_block_mask, is_sized=True, patch=_stand_in, is_live=True,
        lacks=BIASES | {"dropout", "deterministic"},
        refuses={**TWICE, "sinks": "FlexAttention does not take the sinks of its context"}, slack=4.0,
    ),
    "provider": Front(
        drop_ins.provider, drop_ins.context_of_provider, lacks=frozenset({"lse"}), refuses=TWICE, is_live=True,
    ),
    "unified": Front(
        _sdpa, drop_ins.unified_mode, lambda case, _: replace(case, layout=Contiguous()), refuses=TWICE, is_live=True,
        lacks=SDPA_LACKS | MASKS | {"sinks", "deterministic"},
    ),
    "torch_experimental": Front(
        _sdpa, drop_ins.torchs_context, drop_ins.torchs_layout,
        refuses={**TWICE, "2 axes": "expected a mesh of one dim"}, is_live=True,
        lacks=SDPA_LACKS | MASKS | {"sinks", "deterministic"},
    ),
    "zigzag": Front(
        drop_ins.zigzag, settle=lambda case, _: replace(case, alignment="bottom_right", layout=HeadTail()),
        refuses=TWICE, lacks=FLASH_LACKS,
    ),
    "usp": Front(
        drop_ins.usp, drop_ins.with_usp_layer, drop_ins.usp_layout, refuses=TWICE, lacks=FLASH_LACKS | {"lse"}
    ),
    "diffusers": Front(
        drop_ins.backend_of_diffusers, drop_ins.with_config_of_diffusers,
        lambda case, _: replace(case, layout=Contiguous()), refuses=TWICE,
        lacks=MASKS | {"softcap", "sinks", "deterministic", "undeclared"},
    ),
    "ring_documents": Front(
        partial(drop_ins.documents_of_ring, "ring"), settle=drop_ins.ring_documents, refuses=TWICE,
        lacks=DIVIDED_LACKS,
    ),
    "zigzag_documents": Front(
        partial(drop_ins.documents_of_ring, "zigzag_ring"), settle=drop_ins.zigzag_documents, refuses=TWICE,
        lacks=DIVIDED_LACKS,
    ),
    "llama3": Front(
        drop_ins.documents_of_llama3, drop_ins.with_llama3, drop_ins.cut, refuses=TWICE,
        lacks=PACKED_LACKS | {"padding"}, is_whole_graph=False,
    ),
    "torchtitan": Front(
        drop_ins.documents_of_titan, drop_ins.with_titan, drop_ins.cut_evenly, refuses=TWICE,
        lacks=PACKED_LACKS | {"padding", "uneven", "short", "softcap", "dropout", "deterministic", "lse"},
        is_whole_graph=False,
    ),
}  # fmt: skip


def layouts_of(case: Case) -> tuple[Layout, ...]:
    """Layouts that fit a case."""
    return HeadTail(), Contiguous(), Striped(1), Striped(3), *([MirroredBatch()] if case.batch > 1 else [])


def case_of(name: str, features: tuple[str, ...], ranks: int, base: Case | None = None) -> Case | None:
    """Returns the case of a front with features; None where it cannot express them, or they contradict each other."""
    front = FRONTS[name]
    if front.lacks & set(features):
        return None
    case = with_features(front.settle(base or Case(), ranks), features)
    return None if case is None else front.settle(case, ranks)


METHODS = {1: ("auto", "ring", "ulysses"), 2: ("auto", "ring", "hybrid"), 3: ("auto", "ring", "hybrid")}
"""Methods by the number of axes."""
CELLS = [(name, feature) for name in FRONTS for feature in FEATURES if feature not in FRONTS[name].lacks]
"""All pairs that can be expressed."""


def refusals_of(name: str, features: tuple[str, ...], axes: int = 1, compiles: bool = False) -> list[str]:
    """Returns parts of the messages of a front for features together: of one, of a pair "a+b", and of "2 axes"."""
    features = (*features, f"{axes} axes")
    front = FRONTS[name]
    refuses = {**front.refuses, **front.refuses_compiled} if compiles else front.refuses
    pairs = ["+".join(pair) for pair in combinations(features, 2)]
    return [refuses[each] for each in (*features, *pairs) if each in refuses]
