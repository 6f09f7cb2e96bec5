"""Rings of two GPUs with the optional kernels, against float64: full and causal tiles, two head dims, masks."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.gpu_checks import WORLD_SIZE
from support.package_kernels import Unwanted, relative
from support.processes import Processes

from cp_dtensor import (
    Balanced,
    Causal,
    Contiguous,
    Full,
    HeadTail,
    Layout,
    Mask,
    SlidingWindow,
    context_parallel_attention,
)
from cp_dtensor.attention.backends import cudnn_flex, select
from cp_dtensor.attention.backends.packages import has_package_kernels
from cp_dtensor.engine import planner
from cp_dtensor.spec.masks import interval_sets_of
from cp_dtensor.spec.model_masks import Keys
from cp_dtensor.tools.parsing import lognormal_documents

pytestmark = [
    pytest.mark.gpu(WORLD_SIZE),
    pytest.mark.skipif(
        not (torch.cuda.is_available() and has_package_kernels(torch.cuda.get_device_capability()))
        or not all(package.version for package in select.PACKAGES),
        reason="needs the packages of cp_dtensor[kernels] and Hopper or datacenter Blackwell GPUs",
    ),
]
LENGTH = 2125
DOCUMENTS = lognormal_documents(LENGTH, median=300, sigma=1.0)


class Kind(NamedTuple):
    """A call, and the name of the backend that must compute it."""

    mask: Mask
    layout: Layout
    heads: tuple[int, int]
    dims: tuple[int, int]
    backend: str
    deterministic: bool = False


KINDS = {
    "causal": Kind(Causal(), HeadTail(), (8, 2), (128, 128), "FLASH_ATTENTION_4"),
    "deterministic": Kind(Causal(), HeadTail(), (8, 2), (128, 128), "FLASH_ATTENTION_4", deterministic=True),
    "two head dims": Kind(Full(), Contiguous(), (4, 4), (192, 128), "FLASH_ATTENTION_4"),
    "head dim 512": Kind(Causal(), HeadTail(), (8, 2), (512, 512), "EFFICIENT_ATTENTION"),
    "documents": Kind(DOCUMENTS, HeadTail(), (8, 2), (128, 128), "CUDNN_FLEX_ATTENTION"),
    "balanced": Kind(DOCUMENTS, Balanced(DOCUMENTS, LENGTH), (8, 2), (128, 128), "CUDNN_FLEX_ATTENTION"),
    "window": Kind(SlidingWindow(300, 20), Contiguous(), (8, 2), (128, 128), "CUDNN_FLEX_ATTENTION"),
    "several intervals": Kind(
        Causal() & (SlidingWindow(300, 0) | Keys(((0, 64),))), HeadTail(), (8, 2), (128, 128), "CUDNN_FLEX_ATTENTION"
    ),
}


def _seen(mask: Mask) -> torch.Tensor:
    """Returns the pairs that a mask allows, (S, S)."""
    seen = torch.zeros(LENGTH, LENGTH, dtype=torch.bool, device="cuda")
    keys = torch.arange(LENGTH, device="cuda")
    for band in (band for bands in interval_sets_of(mask, LENGTH, LENGTH, 1)[0] for band in bands):
        queries = keys[band.first : band.last]
        start = (queries - min(band.left, LENGTH)).clamp(min=band.lo)
        stop = (queries + min(band.right, LENGTH) + 1).clamp(max=min(band.hi, LENGTH))
        seen[queries] |= (keys >= start[:, None]) & (keys < stop[:, None])
    return seen


def _errors(rank: int, name: str) -> tuple[list[float], set[str]]:
    """Relative errors of out, dq, dk and dv on a rank, and the names of the backends that were chosen."""
    kind = KINDS[name]
    generator = torch.Generator().manual_seed(len(name))
    shapes = zip((*kind.heads, *kind.heads[::-1]), (*kind.dims[:1] * 2, *kind.dims[1:] * 2), strict=True)
    whole = [
        torch.randn(1, LENGTH, heads, dim, generator=generator).to("cuda", torch.bfloat16).transpose(1, 2)
        for heads, dim in shapes
    ]
    rows = torch.tensor(
        [p for segment in kind.layout.segments(LENGTH, rank, WORLD_SIZE, 0) for p in segment.positions()]
    )
    *qkv, grad_out = (x[:, :, rows.cuda()] for x in whole)
    leaves = [x.requires_grad_() for x in qkv]
    chosen: set[str] = set()

    def noted(*arguments: Any) -> Any:
        backend = select.choose_backend(*arguments)
        chosen.add(backend.name)
        return backend

    with (
        mock.patch.object(planner, "choose_backend", noted),
        mock.patch.object(cudnn_flex, "SHORTEST", 1),
        mock.patch.object(cudnn_flex, "_INTERVALS", Unwanted()),
    ):
        out = context_parallel_attention(
            *leaves, mesh=dist.group.WORLD, mask=kind.mask, enable_gqa=True, layout=kind.layout,
            seq_len=(LENGTH, LENGTH), method="ring", deterministic=kind.deterministic,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        out.backward(grad_out)
    q, k, v = (x.double().requires_grad_() for x in whole[:3])
    group = kind.heads[0] // kind.heads[1]
    logits = q @ k.repeat_interleave(group, 1).mT * kind.dims[0] ** -0.5
    weights = logits.masked_fill(~_seen(kind.mask), float("-inf")).softmax(-1)
    expected = weights @ v.repeat_interleave(group, 1)
    expected.backward(whole[3].double())
    wanted = (expected.detach(), q.grad, k.grad, v.grad)
    got = (out.detach(), *(leaf.grad for leaf in leaves))
    return [relative(x, y[:, :, rows.cuda()]) for x, y in zip(got, wanted, strict=True)], chosen  # type: ignore[arg-type, index]


@pytest.mark.parametrize("name", KINDS)
def test_rings(gpus: Processes, name: str) -> None:
    for errors, chosen in gpus.run(_errors, name):
        assert chosen == {KINDS[name].backend}
        assert all(each < 4e-3 for each in errors), errors
