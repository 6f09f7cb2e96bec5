"""Methods of torch: its experimental context parallel of SDPA and FlexAttention, varlen attention, and TorchTitan's.

The only tool that uses private torch names: torch's own context parallel can only be measured through them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial, wraps
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from cp_dtensor import Causal, Documents, SlidingWindow
from cp_dtensor.tools.cases import BLOCK, Attention, Case, Method, block_mask, mask_mod, require


def torch_methods() -> list[Method]:
    """Return a method for each rotation of torch's rings and each load balancer of FlexAttention, Llama 3's, and those
    of TorchTitan's main.

    Rings have torch's choice of kernels, or FlashAttention-4 in the place of its flash. The balancer PTRR balances
    blocks by the number of keys that they see.
    """

    # With q, k, v and grad_out as models have them, its backward with cuDNN fails on all ranks but the last: out is
    # contiguous wherever half of it was merged, and halves of differing strides trip an assertion.
    own: dict[str, Any] = {"shards": torch_context_parallel, "contiguous": True}
    rings = [
        Method(f"torch-{name}", context=partial(_ring_options, name), by_default="FA4" not in name, **own)
        for name in ("allgather", "allgather FA4", "alltoall", "alltoall FA4")
    ]

    def kv_allgather_flex(case: Case, device: torch.device) -> Attention:
        return _kv_allgather_flex(case, device, dist.get_rank())

    own = {"positions": _balanced_positions, "contiguous": True, "by_default": False}
    return [
        *rings,
        Method("llama3-varlen", partial(varlen, False), "Contiguous", by_default=False),
        Method("torch-kv-allgather-flex", kv_allgather_flex, by_default=False),
        Method("torch-ulysses-flex", _ulysses_flex, "Contiguous", by_default=False),
        Method("torch-ulysses-varlen", _ulysses_varlen, "Contiguous", by_default=False),
        *(Method(f"torch-flex {name}", partial(_flex, name), f"torch {name}", **own) for name in ("HeadTail", "PTRR")),
    ]


@lru_cache
def mesh_of_ranks(device_type: str, inner_size: int | None = None) -> DeviceMesh:
    """Return the mesh of all ranks, of two axes if the size of the inner one is given."""
    sizes = (dist.get_world_size(),) if inner_size is None else (dist.get_world_size() // inner_size, inner_size)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("ring", "ulysses")[: len(sizes)])


# SDPA


def sdpa(case: Case, device: torch.device) -> Attention:
    """Return torch's attention under a plain mask."""
    require(case.is_plain, f"SDPA has no mask such as {case.mask}")
    expanded = case.heads.q // case.heads.kv if case.backend == "EFFICIENT_ATTENTION" else 1  # which has no GQA

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if expanded > 1:
            k, v = k.repeat_interleave(expanded, 1), v.repeat_interleave(expanded, 1)
        # The attribute is looked up at each call, since torch's context parallel replaces it.
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=case.mask == "causal", enable_gqa=q.size(1) != k.size(1)
        )

    return attention


def allowed_backend(case: Case, device: torch.device) -> AbstractContextManager[None]:
    """Allow the backend of the case only; "auto" is cuDNN on GPUs that have it, since it is the fastest."""
    if case.backend != "auto":
        return sdpa_kernel(SDPBackend.__members__[case.backend])
    half = case.dtype in ("bfloat16", "float16")
    if device.type == "cuda" and half and torch.cuda.get_device_capability(device) >= (8, 0):
        return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    return nullcontext()


@contextmanager
def torch_context_parallel(case: Case, device: torch.device, buffers: list[torch.Tensor]) -> Iterator[None]:
    """Open torch's context parallel over all ranks: (B, S) `buffers` become this rank's shards, also after it."""
    from torch.distributed.tensor.experimental import context_parallel  # takes a second

    mesh, dims = mesh_of_ranks(device.type), [1] * len(buffers)
    context = context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers))
    context.__enter__()
    try:
        yield
    finally:
        # With an exception as argument, the context of some versions leaves SDPA patched.
        context.__exit__(None, None, None)


@contextmanager
def _ring_options(ring: str, case: Case, device: torch.device) -> Iterator[None]:
    """Set torch's rotation, load balance and kernels for a ring such as "allgather" or "alltoall FA4"."""
    require(case.is_plain, f"torch's context parallel of SDPA has no mask such as {case.mask}")
    pieces = 2 * dist.get_world_size()
    require(case.seq_len % pieces == 0, f"the length is not a multiple of {pieces}")
    from torch.distributed.tensor.experimental import _attention

    rotate_method, _, flash4 = ring.partition(" ")
    options = _attention._cp_options
    before = options.rotate_method, options.enable_load_balance
    with _flash_attention_4(case, device) if flash4 else allowed_backend(case, device):
        _attention.set_rotate_method(rotate_method)
        options.enable_load_balance = case.mask == "causal"
        try:
            yield
        finally:
            options.rotate_method, options.enable_load_balance = before


@contextmanager
def _flash_attention_4(case: Case, device: torch.device) -> Iterator[None]:
    """Make FlashAttention-4 torch's flash, and allow nothing else."""
    with ExitStack() as stack:
        stack.callback(lambda: current_flash_attention_impl() is not None and restore_flash_attention_impl())
        stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        try:
            stack.enter_context(_with_fewer_results())
            activate_flash_attention_impl("FA4")
            options: Any = {"dtype": getattr(torch, case.dtype), "device": device, "requires_grad": True}
            q, v = (torch.zeros(1, 1, 128, dim, **options) for dim in case.heads.dims)
            out = F.scaled_dot_product_attention(q, q, v)
            out.backward(out.detach())
        except Exception as error:  # any: the private functions of the package change
            raise NotImplementedError(
                f"torch {torch.__version__} cannot run the installed flash-attn-4 with head dims "
                f'{case.heads.dims} by activate_flash_attention_impl("FA4"), {type(error).__name__}: {error}'
            ) from error
        yield


def _with_fewer_results() -> AbstractContextManager[Any]:
    """While open, functions of flash-attn-4 give as many results as torch unpacks; they give more from 4.0.0b17 on."""
    module = importlib.import_module("flash_attn.cute.interface")

    def first_results(function: Callable[..., Any], count: int) -> Any:
        # With its attributes: its cache of compiled functions.
        return wraps(function)(lambda *args, **options: function(*args, **options)[:count])

    counts = {"_flash_attn_fwd": 2, "_flash_attn_bwd": 3}
    return mock.patch.multiple(module, **{name: first_results(getattr(module, name), n) for name, n in counts.items()})


# FlexAttention

_NO_BACKWARD = "FlexAttention has no backward on CPUs"


def compiled_flex(attention: Attention, device: torch.device) -> Attention:
    """Return FlexAttention of which all inputs have gradients: without, forward would compile once more.

    Raises:
        NotImplementedError: on CPUs.
    """
    require(device.type != "cpu", _NO_BACKWARD)
    torch.compiler.reset()  # methods would share Dynamo's limit of compilations

    def wrapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            return attention(q, k, v)

    return wrapped


def _balanced_positions(case: Case, layout: str, device: torch.device) -> torch.Tensor:
    """Return the positions of this rank's part of the sequence as one of torch's load balancers rearranges it."""
    require(device.type != "cpu", _NO_BACKWARD)
    require(case.batch == 1 and case.mask != "full", "the method is for masks of one batch row")
    aligned = case.seq_len % (BLOCK * dist.get_world_size()) == 0
    require(aligned, f"the length is not a multiple of {BLOCK} for each rank")
    indices = _balancer(layout.removeprefix("torch "), case, device)._generate_indices(restore=False)
    positions = indices[0].tensor_split(dist.get_world_size())[dist.get_rank()]
    return positions.long().expand(case.batch, -1)


@lru_cache
def _balancer(name: str, case: Case, device: torch.device) -> Any:
    from torch.distributed.tensor.experimental import _attention

    ranks = dist.get_world_size()
    if name == "HeadTail":
        return _attention._HeadTailLoadBalancer(case.seq_len, ranks, device)
    return _attention._PTRRLoadBalancer(block_mask(case, device), ranks)


@lru_cache(maxsize=1)  # compiled once for both passes, and for this length alone
def _flex(name: str, case: Case, device: torch.device) -> Attention:
    from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

    mesh = mesh_of_ranks(device.type)
    group = mesh.get_group().group_name
    takes_block_size = "BLOCK_SIZE" in inspect.signature(_create_cp_block_mask).parameters  # from 2.15 on
    blocks = _create_cp_block_mask(
        mask_mod(case, device), 1, 1, case.seq_len, case.seq_len, device_mesh=mesh,
        load_balancer=_balancer(name, case, device), **({"BLOCK_SIZE": (BLOCK, BLOCK)} if takes_block_size else {}),
    )  # fmt: skip
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = flex_cp_allgather(k, v, 2, group)
        out: torch.Tensor = compiled(q, k, v, block_mask=blocks, enable_gqa=True)
        return out

    return compiled_flex(attention, device)


# FlashAttention-2 over packed documents: on one GPU, and on ranks that gather all K/V (Llama 3)

_STAGES = 4
"""Groups of K/V heads that are gathered one after the other, if there are as many heads."""
Span = tuple[int, int]
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen(is_alone: bool, case: Case, device: torch.device) -> Attention:
    """Return attention of documents or a window: of one GPU, or over K/V that are gathered from all ranks (Llama 3)."""
    rank, size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
    length, stages = case.seq_len // size, 1 if is_alone else min(_STAGES, case.heads.kv)
    attend, keys = _varlen(case, (rank * length, (rank + 1) * length), device)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        qs, *kv = (torch.tensor_split(x[0].transpose(0, 1), stages, 1) for x in (q, k, v))  # (S, H, D)
        # All are started first; the attention of a stage waits for its own. Backward reduces and scatters gradients.
        ks, vs = ([x if is_alone else _gathered(x) for x in each] for each in kv)
        outs = [attend(q, k[slice(*keys)], v[slice(*keys)]) for q, k, v in zip(qs, ks, vs, strict=True)]
        return (outs[0] if stages == 1 else torch.cat(outs, 1)).transpose(0, 1).unsqueeze(0)

    return attention


def _gathered(x: torch.Tensor) -> Any:
    """Return all ranks' (T, H, D) tokens, rank after rank. Backward adds gradients in their dtype."""
    # The first since torch 2.13, which deprecates the second.
    gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    whole = gather(x.contiguous(), 0, dist.group.WORLD)
    if whole.requires_grad:
        whole.register_hook(torch.Tensor.contiguous)  # the reduce-scatter of its backward takes no other gradient
    return whole


def _varlen(case: Case, queries: Span, device: torch.device) -> tuple[Callable[..., torch.Tensor], Span]:
    """Return attention of (S, H, D) queries to (T, Hkv, D) keys and values, and the range of these keys."""
    _require_one_row(case)
    ranks = dist.get_world_size()
    require(case.seq_len % ranks == 0, f"the length is not a multiple of {ranks}")
    documents, window = [(0, case.seq_len)], (-1, 0)  # keys before and after a query, -1 for all
    match case.mask_value:
        case Documents(cu_seqlens, _, Causal()):
            documents = [span for span in pairwise(cu_seqlens) if span[0] < span[1]]
        case SlidingWindow(left, 0) if left is not None:
            window = (left, 0)
        case other if other != Causal():
            raise NotImplementedError(f"no varlen attention for {case.mask}")
    # Each document's queries, with its keys up to the last query: the kernel aligns them at their ends.
    first, last = queries
    mine = [(start, min(stop, last)) for start, stop in documents if start < last and stop > first]
    lengths = [[stop - max(start, first) for start, stop in mine], [stop - start for start, stop in mine]]
    numbers = [torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in lengths]
    attend: Any = partial(varlen_attn, window_size=window, **_GQA)  # which returns out alone
    return lambda q, k, v: attend(q, k, v, *numbers, *map(max, lengths)), (mine[0][0], last)


# TorchTitan's main of November 2026 (torchtitan/models/common/attention/cp_attention.py): all K/V are gathered before
# compiled FlexAttention, or heads are exchanged around FlexAttention or varlen attention. Nothing overlaps. Its
# default adds gradients of gathered K/V in float32, which takes longer than this.

_TITAN: dict[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True, "triton.cudagraphs": False}
"""Options of Inductor with which TorchTitan compiles FlexAttention."""


@lru_cache(maxsize=1)  # compiled once for both passes, and for this length alone
def _kv_allgather_flex(case: Case, device: torch.device, rank: int) -> Attention:
    """Return FlexAttention of this rank's queries to the gathered keys of all, which stay in the ranks' order."""
    _require_one_row(case)
    require(case.mask != "full", "the method is for masks")
    ranks, layout = dist.get_world_size(), case.layout("HeadTail")
    local = case.seq_len // ranks
    require(case.seq_len % (BLOCK * ranks) == 0, f"the length is not a multiple of {BLOCK} for each rank")
    order = torch.tensor(
        [p for r in range(ranks) for s in layout.segments(case.seq_len, r, ranks) for p in s.positions()]
    )
    order, allowed = order.to(device), mask_mod(case, device)
    blocks = create_block_mask(
        lambda b, h, q, kv: allowed(b, h, order[q + rank * local], order[kv]), None, None, local, case.seq_len,
        device=device, BLOCK_SIZE=BLOCK, _compile=device.type == "cuda",
    )  # fmt: skip
    flex = _titan_flex(blocks)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Contiguous, so that it waits: the compiler cannot trace FlexAttention of tensors that are still on their way.
        k, v = (_gathered(x[0].transpose(0, 1)).transpose(0, 1).unsqueeze(0).contiguous() for x in (k, v))
        return flex(q, k, v)

    return compiled_flex(attention, device)


def _titan_flex(blocks: Any) -> Attention:
    compiled: Any = torch.compile(flex_attention, dynamic=False, options=_TITAN)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=True)


def _require_one_row(case: Case) -> None:
    require(case.batch == 1, "the method is for one batch row")


def _exchanged(x: torch.Tensor, to_heads: bool) -> torch.Tensor:
    """Return all tokens of some heads from (T, H, D) of this rank's tokens and all heads, or the reverse."""
    ranks, split, join = dist.get_world_size(), int(to_heads), int(not to_heads)
    parts = torch.stack(x.tensor_split(ranks, split)).flatten(0, 1)
    group: Any = dist.group.WORLD
    sent = collectives.all_to_all_single_autograd(parts, None, None, group)
    return torch.cat(sent.chunk(ranks), join)


def _ulysses(case: Case, attend: Attention) -> Attention:
    """Return Ulysses around attention of (1, H, S, D)."""
    _require_one_row(case)
    ranks = dist.get_world_size()
    fits = case.heads.kv % ranks == 0 and case.seq_len % ranks == 0
    require(fits, f"kv heads or tokens are not a multiple of {ranks}")

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        whole = (_exchanged(x[0].transpose(0, 1), True).transpose(0, 1).unsqueeze(0) for x in qkv)
        return _exchanged(attend(*whole)[0].transpose(0, 1), False).transpose(0, 1).unsqueeze(0)

    return attention


@lru_cache(maxsize=1)
def _ulysses_flex(case: Case, device: torch.device) -> Attention:
    require(
        case.mask != "full" and case.seq_len % BLOCK == 0, f"the method is for masks of multiples of {BLOCK} tokens"
    )
    return compiled_flex(_ulysses(case, _titan_flex(block_mask(case, device))), device)


def _ulysses_varlen(case: Case, device: torch.device) -> Attention:
    attend, _ = _varlen(case, (0, case.seq_len), device)

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(*(x[0].transpose(0, 1) for x in (q, k, v))).transpose(0, 1).unsqueeze(0)

    return _ulysses(case, packed)
