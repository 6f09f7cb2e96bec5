"""torch's causal biases as the `attn_mask` of SDPA inside of a context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.masked_problems import MaskedProblem
from support.problems import shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

from cp_dtensor import Causal, HeadTail, SlidingWindow, context_parallel

RANKS = 3
BIASES: dict[str, tuple[Any, Causal]] = {
    "lower right": (causal_lower_right, Causal("bottom_right")),
    "upper left": (causal_upper_left, Causal()),
}


@pytest.mark.parametrize("lengths", [(9, 14), (2, 9)], ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_biases_are_of_the_whole_sequences(name: str, lengths: tuple[int, int]) -> None:
    bias, mask = BIASES[name]

    def body(rank: int) -> None:
        for in_context in (None, SlidingWindow(4, 4)):
            shown = mask if in_context is None else mask & in_context
            case = MaskedProblem(*lengths, shown, 2, 4, 2)
            whole = case.draw(0)
            q, k, v, grad_out = case.shard(whole, HeadTail(), rank, RANKS)
            leaves = [each.clone().requires_grad_() for each in (q, k, v)]
            for size in (lengths, (q.size(2), k.size(2))):  # of the whole, or of this rank's shards
                with context_parallel(dist.group.WORLD, mask=in_context, seq_len=lengths):
                    out = F.scaled_dot_product_attention(*leaves, attn_mask=bias(*size), enable_gqa=True)
                got = (out, *torch.autograd.grad(out, leaves, grad_out))
                for ours, expected in zip(got, case.reference(*whole), strict=False):
                    expected = shard(expected, HeadTail(), rank, RANKS)
                    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)

    run_ranks(RANKS, body)


def test_torchs_own_is_put_back_and_dtensors_are_refused() -> None:
    original = vars(CausalBias)["_dispatch"]
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    alone = F.scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(3, 5))

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with context_parallel(mesh):
            assert vars(CausalBias)["_dispatch"] is not original
            wrapped = [DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in (q, k, k)]
            with pytest.raises(NotImplementedError, match="takes plain tensors"):
                F.scaled_dot_product_attention(*wrapped, attn_mask=causal_lower_right(6, 10))

    run_ranks(2, body)
    assert vars(CausalBias)["_dispatch"] is original
    assert torch.equal(F.scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(3, 5)), alone)
