"""One call of 131,072 tokens for each GPU: some rows of out and dq, some keys of dk and dv, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.gpu_checks import with_nccl
from support.problems import shard
from support.processes import Processes

from cp_dtensor import HeadTail, context_parallel_attention

pytestmark = with_nccl  # keys and values are gathered by a collective
HEADS, KV_HEADS, DIM = 32, 8, 128
GROUP = HEADS // KV_HEADS
TOKENS = 131_072
"""Of a rank."""


def _whole(of_rank: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(heads, all tokens, D) in the order of positions, of (1, heads, a rank's tokens, D)."""
    gathered = [torch.empty_like(of_rank) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, of_rank)
    found = torch.cat(gathered, 2)[0]
    return torch.empty_like(found).index_copy_(1, positions, found)


def _errors(rank: int, method: str, tokens: int, device: str) -> dict[str, float]:
    """The largest error of each result among the checked rows, relative to the row's norm (of lse to 1)."""
    ranks, layout = dist.get_world_size(), HeadTail()
    generator = torch.Generator(device).manual_seed(rank)
    draw = [
        torch.randn(1, tokens, heads, DIM, generator=generator, device=device).bfloat16().transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    q, k, v = (x.detach().requires_grad_() for x in draw[:3])
    grad_out = draw[3]
    out, lse = context_parallel_attention(
        q, k, v, mesh=dist.group.WORLD, method=method, is_causal=True, enable_gqa=True, layout=layout,
        seq_len=tokens * ranks, return_lse=True,
    )  # fmt: skip
    out.backward(grad_out)
    mine = [
        shard(torch.arange(tokens * ranks, device=device).view(1, 1, -1, 1), layout, each, ranks).flatten()
        for each in range(ranks)
    ]
    here, scale = mine[rank], DIM**-0.5
    keys, values = (_whole(x.detach().contiguous(), torch.cat(mine)) for x in (k, v))
    worst = dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 0.0)

    def compare(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        size = 1.0 if name == "lse" else want.norm(dim=-1)
        errors = ((got.double() - want).norm(dim=-1) / size).nan_to_num(float("inf"))
        worst[name] = max(worst[name], errors.max().item())

    # Not the first rows of all, which have few keys, so that their dq is near 0.
    rows = torch.tensor([tokens // 4, tokens // 4 + 1, tokens // 2 - 1, tokens // 2, tokens - 1], device=device)
    for kv_head in (0, KV_HEADS - 1):
        of_group = slice(kv_head * GROUP, (kv_head + 1) * GROUP)
        key, value = keys[kv_head].double(), values[kv_head].double()
        query, grad = (x[0, of_group][:, rows].detach().double() for x in (q, grad_out))
        hidden = torch.arange(key.size(0), device=device) > here[rows, None]
        scores = (query @ key.mT * scale).masked_fill_(hidden, float("-inf"))
        weights = scores.softmax(-1)
        expected = weights @ value
        compare("out", out[0, of_group][:, rows].detach(), expected)
        compare("lse", lse[0, of_group][:, rows, None].detach(), scores.logsumexp(-1, keepdim=True))
        of_scores = weights * (grad @ value.mT - (grad * expected).sum(-1, keepdim=True))
        assert q.grad is not None
        compare("dq", q.grad[0, of_group][:, rows], of_scores @ key * scale)
        del scores, weights, of_scores, hidden

        # Each rank has the share of its own queries in the gradients of a key.
        checked = torch.tensor([0, 1, tokens * ranks // 2, tokens * ranks - 1], device=device)
        query, grad, result = (x[0, of_group].detach().double() for x in (q, grad_out, out))
        hidden = checked > here[:, None]
        weights = (query @ key[checked].mT * scale - lse[0, of_group].detach().double()[..., None]).exp()
        weights.masked_fill_(hidden, 0.0)
        of_scores = weights * (grad @ value[checked].mT - (grad * result).sum(-1, keepdim=True))
        shares = torch.stack([(of_scores.mT @ query).sum(0) * scale, (weights.mT @ grad).sum(0)])
        dist.all_reduce(shares)
        for name, leaf, share in zip(("dk", "dv"), (k, v), shares, strict=True):
            assert leaf.grad is not None
            for position, want in zip(checked, share, strict=True):
                if (row := (here == position).nonzero()).numel():
                    compare(name, leaf.grad[0, kv_head, row[0]], want[None])
    return worst


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_rows_of_a_long_sequence(slow_gpus: Processes, method: str) -> None:
    for errors in slow_gpus.run(_errors, method, TOKENS, "cuda"):
        assert all(each < 0.02 for each in errors.values()), errors
