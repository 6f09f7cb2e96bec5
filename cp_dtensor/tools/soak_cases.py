"""Random attention calls of the soak command, by every way in, and dense attention in float64 to compare them with."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Balanced,
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
    PerDocument,
    PrefixLM,
    SlidingWindow,
    Striped,
    context_parallel,
    context_parallel_attention,
    context_parallel_flex_attention,
    context_parallel_mla,
    context_parallel_shard,
    enable_context_parallel_dispatcher,
    varlen_attention,
)
from cp_dtensor.spec.masks import Intersection, Union

Tensors = dict[str, torch.Tensor]
LIMITS = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2e-2}
"""Largest errors by dtype: Frobenius norm of the difference over that of the whole expected tensor."""
ENTRIES = ("function", "context", "buffers", "module", "dtensor", "varlen", "flex", "mla")
"""Ways in; "context" takes shards and "buffers" whole tensors that the context shards."""
SURROUNDINGS = ("nested context", "plain", "checkpoint", "reentrant checkpoint", "backward after exit")
_LATENT_DIM, _ROPE_DIM, _VALUE_DIM = 6, 4, 5


@dataclass(frozen=True)
class Case:
    """One call, forward and backward, and where it is made. Its `repr` makes it again."""

    seed: int
    """Of the tensors."""
    entry: str
    """One of `ENTRIES`."""
    around: str
    """One of `SURROUNDINGS`."""
    mesh: tuple[int, ...]
    """Ranks along the axes "ring" and "ulysses", or the ranks of one axis."""
    method: str
    rotate_method: str
    layout: Layout
    mask: Mask
    is_causal: bool
    lengths: tuple[int, int]
    """Tokens of queries and of keys."""
    batch: int
    heads: tuple[int, int]
    """Query heads and key heads."""
    head_dim: int
    scale: float | None
    bias: str
    """"none", "boolean" or "float"."""
    sinks: bool
    dtype: str


# Drawing


def draw_case(number: int, seed: int, world_size: int, *, use_gpu: bool = False) -> Case:
    """Draws a case, the same on every rank."""
    r = random.Random(seed * 1_000_003 + number)
    entry = r.choice(ENTRIES)
    longest = r.choice((20, 80, 300) if not use_gpu else (80, 600, 2500))
    q_len = r.randint(1, longest)
    may_cross = entry in ("function", "context", "module") and r.random() < 0.3
    kv_len = r.randint(1, longest) if may_cross else q_len
    batch = 1 if entry == "varlen" else r.randint(1, 3)
    mask = _draw_documents(r, q_len, kv_len) if entry == "varlen" else _draw_mask(r, q_len, kv_len, batch)
    mesh = r.choice([(world_size,), *((n, world_size // n) for n in range(1, world_size + 1) if world_size % n == 0)])
    layout = Contiguous() if entry == "dtensor" else _draw_layout(r, mask, q_len, batch, self_attention=q_len == kv_len)
    kv_heads = r.randint(1, 4)
    is_flex, is_mla, has_gradients = entry == "flex", entry == "mla", entry != "flex" or use_gpu
    of_rows = not (is_flex or entry in ("varlen", "dtensor", "buffers") or isinstance(layout, MirroredBatch))
    return Case(
        seed=r.randrange(1 << 30),
        entry=entry,
        # DTensors and FlexAttention would take over the outer context's mask.
        around=r.choice(SURROUNDINGS[entry in ("dtensor", "flex") :]) if has_gradients else "plain",
        mesh=mesh,
        method="auto" if is_flex else r.choice(("auto", "ring", "ulysses" if len(mesh) == 1 else "hybrid")),
        rotate_method=r.choice(("auto", "allgather", "alltoall", *["symm_mem"] * use_gpu)),
        layout=layout,
        mask=mask,
        is_causal=not is_flex and r.random() < 0.4,
        lengths=(q_len, kv_len),
        batch=batch,
        heads=(kv_heads * r.randint(1, 3), kv_heads),
        head_dim=r.choice((8, 16) if not use_gpu else (16, 64, 128)),
        scale=r.choice((None, 0.3, -0.3, 0.0)) if entry != "varlen" else None,
        bias=r.choice(("none", "none", "boolean", "float")) if of_rows else "none",
        sinks=entry not in ("flex", "dtensor") and not (is_mla and use_gpu) and r.random() < 0.25,
        dtype=r.choice(("float64", "float64", "bfloat16") if not use_gpu else ("bfloat16", "bfloat16", "float32")),
    )


def _draw_mask(r: random.Random, q_len: int, kv_len: int, batch: int) -> Mask:
    kind = r.random()
    if kind < 0.15:
        return _draw_mask(r, q_len, kv_len, 1) & _draw_simple_mask(r, q_len)
    if kind < 0.3:
        return _draw_mask(r, q_len, kv_len, 1) | _draw_simple_mask(r, q_len)
    if kind < 0.4 and batch > 1:
        return Batched([_draw_mask(r, q_len, kv_len, 1) for _ in range(batch)])
    return _draw_documents(r, q_len, kv_len) if kind < 0.6 else _draw_simple_mask(r, q_len)


def _draw_simple_mask(r: random.Random, length: int) -> Mask:
    alignment: Any = r.choice(("top_left", "bottom_right"))
    left, right = (r.choice((None, r.randint(0, length))) for _ in range(2))
    return r.choice((Full(), Causal(alignment), SlidingWindow(left, right, alignment), PrefixLM(r.randint(0, length))))


def _draw_documents(r: random.Random, q_len: int, kv_len: int) -> Documents:
    count = r.randint(0, 5)
    edges = [[0, *sorted(r.randint(0, n) for _ in range(count)), n] for n in (q_len, kv_len)]
    within = r.choice((Full(), Causal(), SlidingWindow(r.randint(0, 9), 0)))
    return Documents(edges[0], None if q_len == kv_len else edges[1], within=within)


def _draw_layout(r: random.Random, mask: Mask, length: int, batch: int, *, self_attention: bool) -> Layout:
    found: list[Layout] = [HeadTail(), HeadTail(), Contiguous(), Striped(r.choice((1, 2, 16)))]
    if batch > 1:
        found.append(MirroredBatch())
    if self_attention and not isinstance(mask, Batched):
        found.append(Balanced(mask, length))
    if self_attention and isinstance(mask, Documents):
        found.append(PerDocument(mask.cu_seqlens, seq_len=length))
    return r.choice(found)


# Dense attention


def pairs(mask: Mask, q_len: int, kv_len: int) -> torch.Tensor:
    """Pairs that a mask of one batch row allows, boolean (queries, keys), by its definition."""
    q, k = torch.arange(q_len, device="cpu")[:, None], torch.arange(kv_len, device="cpu")[None]
    at = q + (kv_len - q_len if getattr(mask, "alignment", None) == "bottom_right" else 0)
    match mask:
        case Causal():
            return k <= at
        case SlidingWindow(left, right):
            return (k >= at - (kv_len + q_len if left is None else left)) & (
                k <= at + (kv_len + q_len if right is None else right)
            )
        case PrefixLM(length):
            return (k <= q) | (k < length)
        case Documents():
            seen = torch.zeros(q_len, kv_len, dtype=torch.bool, device="cpu")
            for d in range(len(mask.cu_seqlens) - 1):
                (q0, q1), (k0, k1) = mask.cu_seqlens[d : d + 2], mask.cu_seqlens_k[d : d + 2]
                seen[q0:q1, k0:k1] = pairs(mask.within, q1 - q0, k1 - k0)
            return seen
        case Intersection(masks):
            return torch.stack([pairs(each, q_len, kv_len) for each in masks]).all(0)
        case Union(masks):
            return torch.stack([pairs(each, q_len, kv_len) for each in masks]).any(0)
    return torch.ones(q_len, kv_len, dtype=torch.bool, device="cpu")  # Full()


def _seen(case: Case) -> torch.Tensor:
    """(B, 1, queries, keys)."""
    rows = [pairs(case.mask.of_batch_row(row), *case.lengths) for row in range(case.batch)]
    seen = torch.stack(rows)[:, None]
    return seen & pairs(Causal(), *case.lengths) if case.is_causal else seen


def _dense(case: Case, tensors: Tensors) -> torch.Tensor:
    if case.entry == "mla":
        expanded = torch.einsum("btr,hdr->bhtd", tensors["latent"], tensors["up"].unflatten(0, (case.heads[0], -1)))
        rope = tensors["k_rope"].unsqueeze(1).expand(-1, case.heads[0], -1, -1)
        q, k, v = tensors["q"], torch.cat([expanded[..., :-_VALUE_DIM], rope], -1), expanded[..., -_VALUE_DIM:]
    else:
        q, k, v = (tensors[name] for name in "qkv")
    group = q.size(1) // k.size(1)
    logits = q @ k.repeat_interleave(group, 1).mT * (q.size(-1) ** -0.5 if case.scale is None else case.scale)
    logits = logits.masked_fill(~_seen(case).to(logits.device), float("-inf"))
    if "bias" in tensors:
        bias = tensors["bias"]
        logits = logits + bias if case.bias == "float" else logits.masked_fill(bias == 0, float("-inf"))
    if "sinks" in tensors:
        sinks = tensors["sinks"][None, :, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], -1)
    nothing = (logits == float("-inf")).all(-1, keepdim=True)
    weights = logits.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return weights[..., : k.size(2)] @ v.repeat_interleave(group, 1)


# Calls


def _leaves(case: Case, device: torch.device) -> tuple[Tensors, torch.Tensor]:
    """The whole tensors, and the gradient of the output."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return drawn.to(device, getattr(torch, case.dtype))

    (q_len, kv_len), (q_heads, kv_heads) = case.lengths, case.heads
    if case.entry == "mla":
        leaves = {
            "q": normal(case.batch, q_heads, q_len, case.head_dim + _ROPE_DIM),
            "latent": normal(case.batch, kv_len, _LATENT_DIM),
            "k_rope": normal(case.batch, kv_len, _ROPE_DIM),
            "up": normal(q_heads * (case.head_dim + _VALUE_DIM), _LATENT_DIM),
        }
    else:
        leaves = {
            name: normal(case.batch, heads, length, case.head_dim)
            for name, heads, length in (("q", q_heads, q_len), ("k", kv_heads, kv_len), ("v", kv_heads, kv_len))
        }
    if case.bias != "none":
        bias = normal(case.batch, q_heads, q_len, kv_len)
        leaves["bias"] = bias if case.bias == "float" else bias > -0.7
    if case.sinks:
        leaves["sinks"] = normal(q_heads)
    return leaves, normal(case.batch, q_heads, q_len, _VALUE_DIM if case.entry == "mla" else case.head_dim)


_SEQ_DIMS = {"q": 2, "k": 2, "v": 2, "bias": 2, "latent": 1, "k_rope": 1}
"""Other tensors are whole on every rank, and their gradients are sums over the ranks."""


class _Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)


def _call_of(case: Case, mesh: DeviceMesh) -> Callable[[Tensors], torch.Tensor]:
    """Attention of local tensors by the entry of the case."""
    lengths = case.lengths
    gqa: dict[str, Any] = {"enable_gqa": case.heads[0] != case.heads[1]}
    call: dict[str, Any] = {"is_causal": case.is_causal, "scale": case.scale}
    options: dict[str, Any] = {
        "mesh": mesh, "method": case.method, "rotate_method": case.rotate_method, "layout": case.layout,
        "seq_len": lengths,
    }  # fmt: skip

    def function(x: Tensors) -> torch.Tensor:
        return context_parallel_attention(  # type: ignore[return-value]
            x["q"], x["k"], x["v"], mask=case.mask, attn_mask=x.get("bias"), sinks=x.get("sinks"), **call, **gqa,
            **options,
        )  # fmt: skip

    def sdpa(x: Tensors) -> torch.Tensor:
        return F.scaled_dot_product_attention(x["q"], x["k"], x["v"], attn_mask=x.get("bias"), **call, **gqa)

    def module(x: Tensors) -> torch.Tensor:
        style = ContextParallel(
            method=case.method, rotate_method=case.rotate_method, layout=case.layout, mask=case.mask, seq_len=lengths,
            sinks=x.get("sinks"),
        )  # fmt: skip
        out: torch.Tensor = parallelize_module(_Attention(), mesh, style)(
            x["q"], x["k"], x["v"], attn_mask=x.get("bias"), **call, **gqa
        )
        return out

    def dtensor(x: Tensors) -> torch.Tensor:
        q, k, v = (DTensor.from_local(x[name], mesh, [Shard(2)] * mesh.ndim, **_stated(case, name)) for name in "qkv")
        if isinstance(case.mask, Full):
            with enable_context_parallel_dispatcher():
                out = F.scaled_dot_product_attention(q, k, v, **call, **gqa)
        else:
            out = context_parallel_attention(q, k, v, mask=case.mask, **call, **gqa)  # type: ignore[assignment]
        return out.to_local()  # type: ignore[attr-defined]

    def varlen(x: Tensors) -> torch.Tensor:
        assert isinstance(case.mask, Documents)
        q, k, v = (x[name][0].transpose(0, 1) for name in "qkv")
        documents: dict[str, Any] = {
            "cu_seqlens": case.mask.cu_seqlens,
            "within": case.mask.within,
            "is_causal": case.is_causal,
        }
        out = varlen_attention(q, k, v, sinks=x.get("sinks"), **documents, **options)
        return out.transpose(0, 1)[None]  # type: ignore[union-attr]

    def flex(x: Tensors) -> torch.Tensor:
        seen = _seen(case).to(x["q"].device)

        def allowed(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return seen[b, h * 0, q, kv]

        mask = create_block_mask(allowed, case.batch, None, *case.lengths, device=x["q"].device.type, BLOCK_SIZE=16)
        chosen = {name: options[name] for name in ("mesh", "rotate_method", "layout", "seq_len")}
        return context_parallel_flex_attention(  # type: ignore[return-value]
            x["q"], x["k"], x["v"], block_mask=mask, scale=case.scale, **gqa, **chosen
        )

    def mla(x: Tensors) -> torch.Tensor:
        tensors: dict[str, Any] = {name: x[name] for name in ("latent", "k_rope", "up")}
        extras: dict[str, Any] = {"mask": case.mask, "attn_mask": x.get("bias"), "sinks": x.get("sinks")}
        return context_parallel_mla(x["q"], **tensors, **extras, **call, **options)  # type: ignore[return-value]

    calls = {
        "function": function, "context": sdpa, "buffers": sdpa, "module": module, "dtensor": dtensor, "varlen": varlen,
        "flex": flex, "mla": mla,
    }  # fmt: skip
    return calls[case.entry]


def _stated(case: Case, name: str) -> dict[str, Any]:
    """Global shape and strides of a DTensor, whose shards may be uneven."""
    is_q = name == "q"
    shape = torch.Size((case.batch, case.heads[not is_q], case.lengths[not is_q], case.head_dim))
    return {"shape": shape, "stride": torch.empty(shape, device="meta").stride(), "run_check": False}


def errors_of(case: Case, mesh: DeviceMesh) -> dict[str, float]:
    """Makes the call, and returns the errors of out and gradients on this rank, as multiples of what is allowed."""
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    leaves, grad_out = _leaves(case, device)
    exact = {name: x.to(torch.float64, copy=True).requires_grad_(x.is_floating_point()) for name, x in leaves.items()}
    has_gradients = case.entry != "flex" or device.type == "cuda"
    expected = {"out": _dense(case, exact)}
    if has_gradients:
        expected["out"].backward(grad_out.double())
        expected |= {name: x.grad for name, x in exact.items() if x.grad is not None}

    def sharded(tensors: Tensors) -> Tensors:
        named = {name: _SEQ_DIMS.get(name, 2 if name == "out" else None) for name in tensors}
        dims = {name: dim for name, dim in named.items() if dim is not None}
        if case.entry == "dtensor":  # torch's division, which may be uneven
            shards = [_torchs_shard(tensors[name].detach(), mesh) for name in dims]
        else:
            shards = context_parallel_shard(
                mesh, [tensors[name].detach() for name in dims], [*dims.values()], case.layout
            )
        return {**{name: tensors[name].detach() for name in tensors}, **dict(zip(dims, shards, strict=True))}

    attend, got = _call_of(case, mesh), {}
    whole = {name: leaves[name].clone() for name in "qkv" if name in leaves and case.entry == "buffers"}
    local = {name: x.clone() for name, x in sharded(leaves).items()}
    for x in local.values():
        x.requires_grad_(x.is_floating_point() and has_gradients)
    local_grad = sharded({"out": grad_out})["out"]
    with ExitStack() as stack:
        if case.around == "nested context":
            outer = context_parallel(mesh, layout=Striped(3), mask=SlidingWindow(2, 2), seq_len=3)
            stack.enter_context(outer)
        if case.entry in ("context", "buffers"):
            options: dict[str, Any] = {
                name: getattr(case, name) for name in ("method", "mask", "layout", "rotate_method")
            }
            lengths = tuple({*case.lengths})
            context = context_parallel(
                mesh, buffers=[*whole.values()], buffer_seq_dims=[2] * len(whole), sinks=local.get("sinks"),
                seq_len=lengths, **options,
            )  # fmt: skip
            stack.enter_context(context)
            # Aliases of the shards, whose gradients outlive the context.
            local |= {name: x.detach().requires_grad_(has_gradients) for name, x in whole.items()}
        if "checkpoint" in case.around:
            names = [*local]
            out = checkpoint(
                lambda *tensors: attend(dict(zip(names, tensors, strict=True))), *local.values(),
                use_reentrant=case.around.startswith("reentrant"),
            )  # fmt: skip
        else:
            out = attend(local)
        if has_gradients and case.around != "backward after exit":
            out.backward(local_grad)
    if has_gradients and case.around == "backward after exit":
        out.backward(local_grad)
    got = {"out": out, **{name: x.grad for name, x in local.items() if x.grad is not None}}
    for name in ("sinks", "up"):
        if name in expected:
            total = got[name].double() if name in got else torch.zeros_like(expected[name])
            dist.all_reduce(total)
            got[name] = total
    wanted = sharded(expected)
    # Latents are expanded first, and K/V rounded once more.
    limit = LIMITS[case.dtype] * (2 if case.entry == "mla" else 1)

    def size(name: str) -> float:
        # Gradients of sinks are sums over all rows, of both signs: rounding errors of rows stay where the sum cancels.
        of_rows = expected["out"].norm().item() / case.heads[0] ** 0.5 if name == "sinks" else 1.0
        # Gradients of q and k are 0 where each query sees one key, a difference of two numbers that are not.
        of_elements = 0.03 * expected[name].numel() ** 0.5
        return max(expected[name].norm().item(), of_rows, of_elements, 1.0)

    return {name: _distance(got.get(name), wanted[name]) / (limit * size(name)) for name in expected}


def _torchs_shard(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(x, mesh, [Shard(2)] * mesh.ndim, src_data_rank=None).to_local()


def _distance(got: torch.Tensor | None, wanted: torch.Tensor) -> float:
    """Norm of the difference; infinite for NaN."""
    difference = (wanted if got is None else got.detach().double() - wanted).norm().item()
    return difference if difference == difference else float("inf")
