"""Methods of torch: its experimental context parallel of SDPA and FlexAttention, and varlen attention.

The only tool that uses private torch names: torch's own context parallel can only be measured through them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn

from cp_dtensor import Causal, Documents, SlidingWindow
from cp_dtensor.tools.cases import Attention, ByLayout, Case, Method, Select
from cp_dtensor.tools.flex import BLOCK, check_device, mask_mod, whole_mask, with_gradients
from cp_dtensor.tools.report import TORCH_PREFIX


def torch_methods() -> list[Method]:
    """A method for each rotation of torch's rings and each load balancer of FlexAttention, and Llama 3's."""
    # With q, k, v and grad_out as models have them, its backward with cuDNN fails on all ranks but the last: out is
    # contiguous wherever half of it was merged, and halves of differing strides trip an assertion.
    rings = [
        Method(
            TORCH_PREFIX + name, sdpa, ring_refusal, context=partial(_ring, name),
            suits=lambda case: case.is_plain, by_default=name in ("allgather", "alltoall"), contiguous=True,
            may_expand_kv=True,
        )
        for name in TORCH_RINGS
    ]  # fmt: skip
    llama3 = Method(
        "llama3-varlen", _gathered, varlen_refusal, shards=ByLayout("Contiguous"),
        suits=lambda case: case.mask != "full", by_default=False,
    )  # fmt: skip
    flex = [
        Method(
            f"{TORCH_PREFIX}flex {name}", partial(_flex_compiled, name), partial(_flex_refusal, name),
            shards=Rearranged(balancer=name), suits=suits, by_default=False, contiguous=True,
        )
        for name, suits in {
            "HeadTail": lambda case: case.mask != "full",
            "PerDocument": lambda case: isinstance(case.mask_value, Documents),
            "PTRR": lambda case: not case.is_plain,
        }.items()
    ]  # fmt: skip
    return [*rings, llama3, *flex]


# SDPA


def sdpa(case: Case, device: torch.device) -> Attention:
    """Torch's attention under a plain mask."""
    is_causal = case.mask == "causal"
    # The attribute is looked up at each call, since torch's context parallel replaces it.
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, dropout_p=case.dropout, is_causal=is_causal, enable_gqa=q.size(1) != k.size(1)
    )


def allowed_backend(case: Case, device: torch.device) -> AbstractContextManager[None]:
    """Allows the backend of the case only; "auto" is cuDNN on GPUs that have it, since it is the fastest."""
    if case.backend != "auto":
        return sdpa_kernel(SDPBackend.__members__[case.backend])
    half = case.dtype in ("bfloat16", "float16")
    if device.type == "cuda" and half and torch.cuda.get_device_capability(device) >= (8, 0):
        return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    return nullcontext()


@lru_cache
def mesh_of_ranks(device_type: str, inner_size: int | None = None) -> DeviceMesh:
    """The mesh of all ranks, of two axes if the size of the inner one is given."""
    world_size = dist.get_world_size()
    if inner_size is None:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("cp",))
    return init_device_mesh(device_type, (world_size // inner_size, inner_size), mesh_dim_names=("ring", "ulysses"))


TORCH_RINGS = ("allgather", "alltoall", "allgather FA4", "alltoall FA4")
"""Rotations of torch's rings, with torch's choice of kernels and with FlashAttention-4 in the place of its flash."""


@contextmanager
def _ring(ring: str, case: Case, device: torch.device) -> Iterator[None]:
    # The context refuses to work without a buffer; the buffer's length tells whether the load can be balanced.
    buffer = torch.zeros(1, case.seq_len, device=device)
    with ring_settings(ring, case, device), torch_context_parallel(device, [buffer]):
        yield


@contextmanager
def torch_context_parallel(device: torch.device, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    """Torch's context parallel over all ranks: (B, S) `buffers` become this rank's shards, also after it."""
    from torch.distributed.tensor.experimental import context_parallel  # takes a second

    dims = [1] * len(buffers)
    mesh = mesh_of_ranks(device.type)
    context = context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=dims, no_restore_buffers=set(buffers))
    context.__enter__()
    try:
        yield
    finally:
        # With an exception as argument, the context of some versions leaves SDPA patched.
        context.__exit__(None, None, None)


_FLASH4_RESULTS = {"_flash_attn_fwd": 2, "_flash_attn_bwd": 3}
"""The number of results that torch unpacks of private functions of flash-attn-4, which give more from 4.0.0b17 on."""


def _with_fewer_results() -> AbstractContextManager[Any]:
    """While open, the functions of flash-attn-4 give as many results as torch unpacks."""
    module = importlib.import_module("flash_attn.cute.interface")

    def first_results(function: Callable[..., Any], count: int) -> Callable[..., Any]:
        @wraps(function)  # with its attributes: its cache of compiled functions
        def call(*args: Any, **options: Any) -> Any:
            return function(*args, **options)[:count]

        return call

    calls: dict[str, Any] = {name: first_results(getattr(module, name), n) for name, n in _FLASH4_RESULTS.items()}
    return mock.patch.multiple(module, **calls)


@contextmanager
def _flash_attention_4(case: Case, device: torch.device) -> Iterator[None]:
    """Torch's flash is FlashAttention-4, and nothing else is allowed."""
    try:
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
            try:
                stack.enter_context(_with_fewer_results())
                activate_flash_attention_impl("FA4")
                options: Any = {"dtype": getattr(torch, case.dtype), "device": device, "requires_grad": True}
                q, v = (torch.zeros(1, 1, 128, dim, **options) for dim in case.dims)
                out = F.scaled_dot_product_attention(q, q, v)
                out.backward(out.detach())
            except Exception as error:  # any: the private functions of the package change
                raise NotImplementedError(
                    f"torch {torch.__version__} cannot run the installed flash-attn-4 with head dims {case.dims} by "
                    f'activate_flash_attention_impl("FA4"), {type(error).__name__}: {error}'
                ) from error
            yield
    finally:
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()


@contextmanager
def ring_settings(ring: str, case: Case, device: torch.device) -> Iterator[None]:
    """Torch's rotation, load balance and kernels are those of one of `TORCH_RINGS`.

    Raises:
        NotImplementedError: torch cannot run FlashAttention-4 here.
    """
    from torch.distributed.tensor.experimental import _attention

    rotate_method, _, flash4 = ring.partition(" ")
    options = _attention._cp_options
    before = options.rotate_method, options.enable_load_balance
    with _flash_attention_4(case, device) if flash4 else allowed_backend(case, device):
        _attention.set_rotate_method(rotate_method)
        options.enable_load_balance = case.mask == "causal" and case.layout == "HeadTail"
        try:
            yield
        finally:
            options.rotate_method, options.enable_load_balance = before


def ring_refusal(case: Case, world_size: int) -> str | None:
    """The reason why torch's rings cannot compute a case on so many ranks; None if they can."""
    if not case.is_plain:
        return f"torch's context parallel of SDPA has no mask such as {case.mask}"
    if case.mask == "causal" and case.layout not in ("HeadTail", "Contiguous"):
        return f"torch has no layout like {case.layout}"
    pieces = 2 * world_size if case.layout == "HeadTail" else world_size
    if case.seq_len % pieces:
        return f"the length is not a multiple of {pieces}"
    return None


# FlexAttention


@dataclass(frozen=True)
class Rearranged(ByLayout):
    """Contiguous parts of the sequence as one of torch's load balancers rearranges it."""

    balancer: str = ""

    def select(self, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
        indices = _balancer(self.balancer, case, world_size, device)._generate_indices(restore=False)[0]
        mine = indices.tensor_split(world_size)[rank]
        return lambda tokens: tokens.index_select(1, mine)


@lru_cache
def _balancer(name: str, case: Case, world_size: int, device: torch.device) -> Any:
    """A load balancer: "HeadTail", "PerDocument" or "PTRR" (blocks by the number of keys that they see)."""
    from torch.distributed.tensor.experimental import _attention

    check_device(device)
    if name == "HeadTail":
        return _attention._HeadTailLoadBalancer(case.seq_len, world_size, device)
    if name == "PerDocument":
        return _attention._PerDocumentHeadTailLoadBalancer([list(_lengths(case))], world_size, device)
    return _attention._PTRRLoadBalancer(whole_mask(case, device), world_size)


def _flex_refusal(name: str, case: Case, world_size: int) -> str | None:
    if case.batch != 1:
        return "the method is for one batch row"
    if case.seq_len % (BLOCK * world_size):
        return f"the length is not a multiple of {BLOCK} for each rank"
    if name == "PerDocument" and any(length % (2 * world_size) for length in _lengths(case)):
        return f"not all lengths of documents are multiples of {2 * world_size}"
    return None


def _lengths(case: Case) -> tuple[int, ...]:
    mask = case.mask_value
    assert isinstance(mask, Documents)
    return mask.lengths


@lru_cache(maxsize=1)  # compiled once for both passes
def _flex_compiled(name: str, case: Case, device: torch.device) -> Attention:
    from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

    torch.compiler.reset()
    mesh = mesh_of_ranks(device.type)
    group = mesh.get_group().group_name
    takes_block_size = "BLOCK_SIZE" in inspect.signature(_create_cp_block_mask).parameters  # from 2.15 on
    blocks = _create_cp_block_mask(
        mask_mod(case, device), 1, 1, case.seq_len, case.seq_len, device_mesh=mesh,
        load_balancer=_balancer(name, case, mesh.size(), device),
        **({"BLOCK_SIZE": (BLOCK, BLOCK)} if takes_block_size else {}),
    )  # fmt: skip
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = flex_cp_allgather(k, v, 2, group)
        out = compiled(q, k, v, block_mask=blocks, enable_gqa=case.enable_gqa)
        assert isinstance(out, torch.Tensor)
        return out

    return with_gradients(attention)


# FlashAttention-2 over packed documents: on one GPU, and on ranks that gather all K/V (Llama 3)

_STAGES = 4
"""Groups of K/V heads that are gathered one after the other, if there are as many heads."""
Span = tuple[int, int]
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class VarlenArguments:
    """Arguments of varlen attention for contiguous queries."""

    keys: Span
    """Range of the keys that are passed."""
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]

    @classmethod
    def of(cls, documents: Sequence[Span], queries: Span) -> VarlenArguments:
        """Pairs each document's queries with its keys up to the last query: the kernel aligns them at their ends.

        >>> VarlenArguments.of([(0, 4), (4, 9)], (2, 6))
        VarlenArguments(keys=(0, 6), cu_seqlens_q=(0, 2, 4), cu_seqlens_k=(0, 4, 6))
        """
        first, last = queries
        mine = [span for span in documents if max(span[0], first) < min(span[1], last)]
        q = [min(stop, last) - max(start, first) for start, stop in mine]
        k = [min(stop, last) - start for start, stop in mine]
        return cls((mine[0][0], last), tuple(accumulate(q, initial=0)), tuple(accumulate(k, initial=0)))


def _documents(case: Case) -> tuple[list[Span], Span]:
    """The documents of a mask, and the window in each: keys before and after a query, -1 for all."""
    match case.mask_value:
        case Documents(cu_seqlens, _, Causal()):
            return list(pairwise(cu_seqlens)), (-1, 0)
        case SlidingWindow(left, 0) if left is not None:
            return [(0, case.seq_len)], (left, 0)
        case Causal():
            return [(0, case.seq_len)], (-1, 0)
    raise NotImplementedError(f"no varlen attention for {case.mask}")


def varlen_refusal(case: Case, world_size: int) -> str | None:
    """The reason why varlen attention of a case is not measured; None if it is."""
    if case.batch != 1:
        return "the method is for one batch row"
    return f"the length is not a multiple of {world_size}" if case.seq_len % world_size else None


def varlen_on_one_gpu(case: Case, device: torch.device) -> Attention:
    """Attention of a case with a batch of one, of documents or a window."""
    documents, window = _documents(case)
    attend = _varlen(VarlenArguments.of(documents, (0, case.seq_len)), window, device)
    return lambda q, k, v: _tokens_last(attend(*map(_tokens_first, (q, k, v))))


def _gathered(case: Case, device: torch.device) -> Attention:
    documents, window = _documents(case)
    group = dist.group.WORLD
    assert group is not None
    length = case.seq_len // group.size()
    arguments = VarlenArguments.of(documents, (group.rank() * length, (group.rank() + 1) * length))
    attend = _varlen(arguments, window, device)
    keys = slice(*arguments.keys)
    stages = min(_STAGES, case.heads.kv)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        by_stage = [torch.tensor_split(_tokens_first(x), stages, 1) for x in (q, k, v)]
        works: list[Any] = []
        started = [[_Gathered.apply(x, group, works) for x in stage] for stage in zip(*by_stage[1:], strict=True)]
        outs = []
        for stage, (q, (k, v)) in enumerate(zip(by_stage[0], started, strict=True)):
            for work in works[2 * stage : 2 * stage + 2]:  # of the stage's K and V
                work.wait()
            outs.append(attend(q, k[keys], v[keys]))
        return _tokens_last(torch.cat(outs, 1))

    return attention


def _varlen(arguments: VarlenArguments, window: Span, device: torch.device) -> Callable[..., torch.Tensor]:
    """Attention of (S, H, D) queries to (T, Hkv, D) keys and values."""
    edges = arguments.cu_seqlens_q, arguments.cu_seqlens_k
    cu_seqlens = [torch.tensor(each, dtype=torch.int32, device=device) for each in edges]
    longest = [max(stop - start for start, stop in pairwise(each)) for each in edges]
    attend: Any = varlen_attn  # which returns out alone
    return lambda q, k, v: attend(q, k, v, *cu_seqlens, *longest, window_size=window, **_GQA)


class _Gathered(torch.autograd.Function):
    """All-gather of (S, heads, D), complete when the work is; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, works: list[Any]) -> torch.Tensor:
        ctx.group = group
        whole = x.new_empty((x.size(0) * group.size(), *x.shape[1:]))
        works.append(dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=True))
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        mine = grad.new_empty((grad.size(0) // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None, None


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """(1, H, S, D) as (S, H, D)."""
    return x[0].transpose(0, 1)


def _tokens_last(x: torch.Tensor) -> torch.Tensor:
    """(S, H, D) as (1, H, S, D)."""
    return x.transpose(0, 1).unsqueeze(0)
