"""Block masks of shards under the names of torch's experimental context parallel in torch 2.11 to 2.15."""

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_dtensor.integrations.torch_experimental import (
    _context_parallel_shard,
    _create_cp_block_mask,
    _HeadTailLoadBalancer,
)


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def test_block_masks_by_either_way_of_calling() -> None:
    """The mesh is the sixth argument before torch 2.15, and follows BLOCK_SIZE since; shards keep the block size."""
    size, wide, fine = (1, 1, 512, 512), (128, 128), (64, 32)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        balancer = _HeadTailLoadBalancer(512, 2, "cpu")
        order = balancer._generate_indices()[0]
        assert order is not None
        seen = order[rank * 256 : rank * 256 + 256, None] >= order

        def check(mask: BlockMask, blocks: tuple[int, int]) -> None:
            expected = create_block_mask(lambda b, h, i, j: seen[i, j], *size[:2], 256, 512, "cpu", blocks)
            assert blocks == mask.BLOCK_SIZE
            assert torch.equal(mask.to_dense(), expected.to_dense())
            rows, columns = torch.arange(256)[:, None], torch.arange(512)
            assert torch.equal(mask.mask_mod(torch.tensor(0), torch.tensor(0), rows, columns), seen)

        check(_create_cp_block_mask(causal, *size, mesh, balancer), wide)
        check(_create_cp_block_mask(causal, *size, mesh, load_balancer=balancer), wide)
        check(_create_cp_block_mask(causal, *size, device_mesh=mesh, load_balancer=balancer), wide)
        check(_create_cp_block_mask(causal, *size, fine, mesh, balancer), fine)
        check(_create_cp_block_mask(causal, *size, BLOCK_SIZE=fine, device_mesh=mesh, load_balancer=balancer), fine)
        for blocks, kept in ((fine, fine), ((512, 512), wide)):  # the latter are not whole on any rank
            whole = create_block_mask(causal, *size, "cpu", blocks)
            (mask,) = _context_parallel_shard(mesh, [whole], [2], balancer)
            check(mask, kept)
        with pytest.raises(TypeError, match="DeviceMesh"):
            _create_cp_block_mask(causal, *size, wide)

    run_ranks(2, body)
