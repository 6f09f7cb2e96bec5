"""Checkpointed SDPA of DTensors: recomputed under the dispatcher, also after it is off."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cp_dtensor import enable_context_parallel_dispatcher
from cp_dtensor.api.dtensor_dispatcher import dispatcher_installation

WORLD = 2


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after it is off"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_recompute(use_reentrant: bool, inside: bool) -> None:
    whole, grad = torch.randn(2, 2, 3, 8, 4, dtype=torch.float64)
    alone = whole.clone().requires_grad_()
    expected = F.scaled_dot_product_attention(alone, alone, alone, is_causal=True)
    expected.backward(grad)

    def body(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (WORLD,))
        x = distribute_tensor(whole, mesh, [Shard(2)]).requires_grad_()
        grad_out = distribute_tensor(grad, mesh, [Shard(2)])

        def attend(y: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(y, y, y, is_causal=True)

        with enable_context_parallel_dispatcher():
            out = torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=use_reentrant)
            if inside:
                out.backward(grad_out)
        if not inside:
            out.backward(grad_out)
        whole_of = [each.redistribute(mesh, [Replicate()]).to_local() for each in (out.detach(), x.grad)]
        return whole_of

    for out, grad_x in run_ranks(WORLD, body):
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grad_x, alone.grad, rtol=1e-10, atol=1e-10)
    assert not dispatcher_installation._holders
