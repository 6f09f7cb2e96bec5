"""Learned sparse attention on GPUs: kernels of packages and two ranks against float64, two ranks against one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.gpu_checks import one_setting_of_autotuners
from support.processes import Processes

from cp_dtensor import (
    Documents,
    HeadTail,
    SlidingWindow,
    Striped,
    context_parallel_shard,
    context_parallel_unshard,
    indexed_attention,
    select_keys,
)
from cp_dtensor.layers import block_kernels, chosen_kernels, cudnn_indexer
from cp_dtensor.layers.chosen_reference import Chosen
from cp_dtensor.layers.cudnn_indexer import _scores_error, _top_k_error

one_setting_of_autotuners()  # before the package is imported
_SERVED = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
REASON = "needs a Hopper or datacenter Blackwell GPU and the extra: pip install -e '.[sparse]'"
needs_flash_mla = pytest.mark.skipif(not _SERVED or find_spec("flash_mla") is None, reason=REASON)
needs_fla = pytest.mark.skipif(not torch.cuda.is_available() or find_spec("fla") is None, reason=REASON)
needs_cudnn = pytest.mark.skipif(not _SERVED or find_spec("cudnn") is None, reason=REASON)
pytestmark = pytest.mark.gpu
DIRECTIONS = [pytest.param("forward", marks=needs_flash_mla), pytest.param("backward", marks=needs_cudnn)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("heads", "dims", "keys"),
    [(128, (512, 64), 2048), (64, (512, 64), 2048), (16, (512, 64), 2048), (96, (512, 0), 130), (2, (256, 32), 7)],
)
@pytest.mark.parametrize("has_sink", [False, True])
def test_attention_over_chosen_keys(
    direction: str, heads: int, dims: tuple[int, int], keys: int, has_sink: bool
) -> None:
    q = torch.zeros(1, heads, 1, sum(dims), device="cuda", dtype=torch.bfloat16)
    assert chosen_kernels._small_error(direction, q, keys, has_sink, dims[0]) == ""


@needs_cudnn
@pytest.mark.parametrize("heads", cudnn_indexer._HEADS)
def test_scores(heads: int) -> None:
    assert _scores_error(torch.zeros(1, heads, 128, device="cuda", dtype=torch.bfloat16)) == ""


@needs_cudnn
@pytest.mark.parametrize("queries", [40, 300])
@pytest.mark.parametrize(("columns", "topk"), [(5000, 256), (8192, 2048), (70001, 2048)])
def test_best_keys(queries: int, columns: int, topk: int) -> None:
    """Equal scores, queries of few keys and of none."""
    assert _top_k_error(queries, columns, topk, torch.device("cuda")) == ""


@needs_fla
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("heads", "dim", "size", "count"), [(16, 128, 128, 16), (6, 64, 64, 3)])
def test_attention_over_chosen_blocks(
    direction: str, heads: int, dim: int, size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_kernels, "_CHECKED", 2500)
    given = torch.bfloat16, heads, dim, dim, size, count, torch.device("cuda")
    assert block_kernels._small_error(direction, *given) == ""


LENGTH, KEYS, HEADS = 5001, 256, 16  # the last document has too few keys for the package's top-k
MASKS = {
    "causal": None, "documents": Documents([0, 700, 703, 2000, LENGTH]), "window": SlidingWindow(900, 0),
}  # fmt: skip


def _selected(rank: int, kind: str, is_causal: bool) -> list[torch.Tensor]:
    """Indices of all tokens, by two ranks in two layouts, and by one rank; every third key is the same one."""
    random = torch.Generator().manual_seed(0)
    shapes = (2, LENGTH, HEADS, 128), (2, LENGTH, 128), (2, LENGTH, HEADS)
    given = [torch.randn(*shape, generator=random).bfloat16().cuda() for shape in shapes]
    given[1][:, ::3] = given[1][:, :1]
    options: dict[str, Any] = {"topk": KEYS, "mask": MASKS[kind], "is_causal": is_causal, "seq_len": LENGTH}
    group, found = dist.group.WORLD, []
    with mock.patch.object(cudnn_indexer, "_BYTES", 4 << 20):  # several blocks of queries
        for layout in (HeadTail(), Striped(1)):
            shards = context_parallel_shard(group, given, [1] * 3, layout)
            mine = select_keys(*shards, mesh=group, layout=layout, **options)
            found += context_parallel_unshard(group, [mine], [1], layout)
    found.append(select_keys(*given, mesh=_alone(rank), layout=HeadTail(), **options))
    return [x.cpu() for x in found]


def _alone(rank: int) -> Any:
    return [dist.new_group([each]) for each in range(dist.get_world_size())][rank]


@pytest.mark.gpu(2, nccl=True)
@needs_cudnn
@pytest.mark.parametrize(
    ("kind", "is_causal"), [("causal", True), ("documents", True), ("window", True), ("causal", False)]
)
def test_two_ranks_select_the_keys_of_one(two_gpus: Processes, kind: str, is_causal: bool) -> None:
    for found in two_gpus.run(_selected, kind, is_causal):
        *by_two, by_one = found
        assert all(torch.equal(each, by_one) for each in by_two)
        assert int((by_one >= 0).sum()) > LENGTH * KEYS


def _attended(rank: int, heads: int, has_sink: bool) -> list[list[torch.Tensor]]:
    """Out and all gradients: of two ranks, of one, and of one in float64; some queries have few keys or none."""
    random = torch.Generator().manual_seed(heads)
    rows, dims = 1201, (128, 64, 128, 512)
    plain, rotary, values, latents = dims
    shapes = (
        (1, heads, rows, plain + rotary),
        (1, rows, latents),
        (1, rows, rotary),
        (heads * (plain + values), latents),
    )
    whole = [torch.randn(*shape, generator=random).bfloat16().cuda() for shape in shapes]
    whole[3] *= latents**-0.5
    whole += [torch.randn(heads, generator=random).cuda()] * has_sink
    index = torch.rand(1, rows, rows, generator=random).argsort(2)[..., :KEYS].int()
    index[:, 5:300:7, 3:] = -1
    index[:, 6:300:7] = -1
    grad_out, index, results = torch.randn(1, heads, rows, values, generator=random).cuda(), index.cuda(), []
    for group, dtype in ((dist.group.WORLD, None), (_alone(rank), None), (_alone(rank), torch.float64)):
        leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in whole]
        q, latent, k_rope, mine, grad = context_parallel_shard(group, [*leaves[:3], index, grad_out], [2, 1, 1, 1, 2])
        sinks = leaves[4] if has_sink else None
        out = indexed_attention(
            q, latent, k_rope, up=leaves[3], indices=mine, mesh=group, sinks=sinks, seq_len=rows
        )  # fmt: skip
        grads = [*torch.autograd.grad(out, leaves, grad.to(out.dtype))]
        if dtype is None:
            for each in grads:
                dist.all_reduce(each, group=group)
        results.append([*context_parallel_unshard(group, [out.detach()], [2]), *grads])
    return [[x.cpu() for x in each] for each in results]


@pytest.mark.gpu(2, nccl=True)
@needs_flash_mla
@needs_cudnn
@pytest.mark.parametrize(("heads", "has_sink"), [(128, True), (64, False), (16, True)])
def test_two_ranks_attend_as_one(two_gpus: Processes, heads: int, has_sink: bool) -> None:
    names = ["out", "dq", "d_latent", "d_rope", "d_up", "d_sinks"]
    for of_two, of_one, wanted in two_gpus.run(_attended, heads, has_sink):
        for name, two, one, expected in zip(names, of_two, of_one, wanted, strict=False):
            errors = [float((x.double() - expected).norm() / expected.norm()) for x in (two, one)]
            print(heads, name, *(f"{error:.2e}" for error in errors))
            assert errors[1] < 8e-3, (name, errors)
            assert errors[0] < 1.5 * errors[1] + 1e-6, (name, errors)


def _random_rows(rank: int, tokens: int, heads: int, keys: int, checked: int, device: str) -> dict[str, list[float]]:
    """Relative errors of random rows of a long sequence: of ours, and of the packages' kernels on these rows alone.

    Other rows have no gradient, so that the checked ones decide about all gradients of keys and weights.
    """
    group, (plain, rotary, values, latents) = dist.group.WORLD, (128, 64, 128, 512)
    assert group is not None
    random, shared = (torch.Generator(device).manual_seed(each) for each in (1 + rank, 0))

    def normal(*shape: int, scale: float = 1.0, by: torch.Generator = random) -> torch.Tensor:
        return torch.randn(*shape, generator=by, device=device).mul_(scale).bfloat16()

    mine = tokens // dist.get_world_size()
    up = normal(heads * (plain + values), latents, scale=latents**-0.5, by=shared).requires_grad_()
    q = normal(1, mine, heads, plain + rotary).transpose(1, 2).detach().requires_grad_()
    latent, k_rope = (normal(1, mine, dims).requires_grad_() for dims in (latents, rotary))
    index_tensors = normal(1, mine, 64, 128), normal(1, mine, 128), normal(1, mine, 64)
    indices = select_keys(*index_tensors, topk=keys, mesh=group, seq_len=tokens)
    rows = torch.randperm(mine, generator=random, device=device)[:checked]
    grad_out = torch.zeros(1, heads, mine, values, device=device, dtype=torch.bfloat16)
    grad_out[:, :, rows] = normal(1, heads, checked, values)
    leaves = [q, latent, k_rope, up]
    out = indexed_attention(*leaves[:3], up=up, indices=indices, mesh=group, seq_len=tokens)
    dq, *of_tokens, d_up = torch.autograd.grad(out, leaves, grad_out)
    dist.all_reduce(d_up)  # in bfloat16, as both ranks round
    whole = context_parallel_unshard(group, [latent.detach(), k_rope.detach(), *of_tokens], [1] * 4)
    ours = [out.detach()[0, :, rows], dq[0, :, rows], torch.cat(whole[2:], 2)[0], d_up]

    index, grad, query = indices[0, rows], grad_out[0, :, rows].transpose(0, 1), q.detach()[0, :, rows].transpose(0, 1)
    wide = [x.double().requires_grad_() for x in (query, whole[0][0], whole[1][0], up.detach())]
    results = []
    for chosen, each_query, each_grad in zip(index, wide[0], grad, strict=True):
        at = chosen[chosen >= 0].long()
        expanded = torch.einsum("sr,hdr->hsd", wide[1][at], wide[3].unflatten(0, (heads, -1)))
        k = torch.cat((expanded[..., :plain], wide[2][at].expand(heads, -1, -1)), 2)
        weights = (torch.einsum("hd,hsd->hs", each_query, k) * (plain + rotary) ** -0.5).softmax(1)
        results.append(torch.einsum("hs,hsd->hd", weights, expanded[..., plain:]))
        results[-1].backward(each_grad.double(), retain_graph=True)
        results[-1] = results[-1].detach()
    d_query, d_latent, d_rope, expected_up = (x.grad.clone() for x in wide if x.grad is not None)
    d_rows = torch.cat((d_latent, d_rope), 1)
    for each in (d_rows, expected_up):
        dist.all_reduce(each)
    expected = [torch.stack(results, 1), d_query.transpose(0, 1), d_rows, expected_up]

    rows_of_all, of_heads = torch.cat(whole[:2], 2)[0], up.detach().view(heads, -1, latents)
    alone = _packages_alone(query, rows_of_all, of_heads, index, grad, plain)
    names, found = ("out", "dq", "d_rows", "d_up"), dict[str, list[float]]()
    for name, want, *got in zip(names, expected, ours, [*alone, ours[3]], strict=True):
        found[name] = [float((x.double() - want).norm() / want.norm()) for x in got]
    return found


def _packages_alone(
    q: torch.Tensor, rows: torch.Tensor, up: torch.Tensor, index: torch.Tensor, grad: torch.Tensor, plain: int
) -> list[torch.Tensor]:
    """Out (H, T, Dv), dq and gradients of rows of queries (T, H, D), by the packages' functions beside matmuls."""
    from cudnn import deepseek_sparse_attention as cudnn
    from flash_mla import flash_mla_sparse_fwd

    (up_k, up_v), scale = up.split((plain, up.size(1) - plain), 1), q.size(2) ** -0.5
    absorbed = torch.cat((torch.einsum("thd,hdr->thr", q[..., :plain], up_k), q[..., plain:]), 2)
    out, _, lse = flash_mla_sparse_fwd(
        absorbed, rows.unsqueeze(1), index.unsqueeze(1), scale, up.size(2), None, use_legacy=True
    )  # fmt: skip
    d_out = torch.einsum("thd,hdr->thr", grad, up_v)
    no_sink = torch.full((q.size(1),), float("-inf"), device=q.device)
    found = cudnn.sparse_attention_backward_wrapper(
        absorbed, rows, out, d_out.contiguous(), lse, no_sink, index, softmax_scale=scale
    )  # fmt: skip
    d_plain = torch.einsum("thr,hdr->thd", found["dq"][..., : up.size(2)], up_k)
    dq = torch.cat((d_plain, found["dq"][..., up.size(2) :]), 2)
    d_rows = found["dkv"].float()
    dist.all_reduce(d_rows)
    return [torch.einsum("thr,hdr->htd", out, up_v), dq.transpose(0, 1), d_rows.bfloat16()]


@pytest.mark.gpu(2, nccl=True)
@needs_flash_mla
@needs_cudnn
def test_random_rows_of_a_long_sequence(two_gpus: Processes) -> None:
    for errors in two_gpus.run(_random_rows, 65_536, 64, 2048, 64, "cuda"):
        print({name: [f"{each:.2e}" for each in both] for name, both in errors.items()})
        for name, (ours, alone) in errors.items():
            assert ours < 8e-3, (name, errors)
            assert ours <= 1.05 * alone, (name, errors)


@needs_cudnn
def test_deterministic_gradients_are_left_to_torch_operations() -> None:
    q = torch.zeros(1, 16, 1, 576, device="cuda", dtype=torch.bfloat16)
    rows, index = torch.zeros_like(q), torch.zeros(1, 1, 1, 4, device="cuda", dtype=torch.int32)
    torch.use_deterministic_algorithms(True)
    try:
        assert not chosen_kernels.serves("backward", q, Chosen(rows, index, None, 512, 1.0))
    finally:
        torch.use_deterministic_algorithms(False)
