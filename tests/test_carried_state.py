"""What the tool `carried_state` measures is the same result in different ways."""

import pytest
import torch
from attention_kernels import SMALL, each_device
from staging import BY_HEAD

from cp_dtensor.local_attention.math import MathAttention
from cp_dtensor.rotation.allgather import AllGather
from cp_dtensor.rotation.alltoall import AllToAll
from cp_dtensor.rotation.base import Rotation

tiles_of = pytest.importorskip("cp_dtensor.tools.carried_tiles")

ROTATIONS = {"allgather": AllGather(), "by heads": AllGather(BY_HEAD), "alltoall": AllToAll()}


@each_device
@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize(("rank", "length"), [(0, 64), (1, 67), (2, 64)])
def test_every_way_gives_the_rank_its_attention(device: str, rotation: Rotation, rank: int, length: int) -> None:
    shape = tiles_of.RankShape(length, rank, world_size=3, q_heads=4, kv_heads=2, head_dim=32)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tiles = tiles_of.RankTiles(shape, rotation, torch.device(device), dtype)
    merged = tiles.merged(MathAttention())
    limit = 1e-6 if device == "cpu" else 1e-2
    assert tiles.unmerged(MathAttention()) is None
    for out, lse in (merged, tiles.carried(SMALL), tiles.in_few_launches(SMALL)):
        assert out.dtype == dtype
        assert tiles.error((out, lse)) < limit
        torch.testing.assert_close(lse, merged[1], rtol=0, atol=1e-5 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize("rank", range(4))
def test_each_row_begins_once_and_ends_once(rotation: Rotation, rank: int) -> None:
    shape = tiles_of.RankShape(32, rank, world_size=4, q_heads=2, kv_heads=2, head_dim=16)
    tiles = tiles_of.RankTiles(shape, rotation, torch.device("cpu"), torch.float32)
    begun, ended = torch.zeros(2, 8), torch.zeros(2, 8)
    for launch in tiles.launches:
        place = slice(*launch.heads), slice(*launch.q)
        assert (ended[place] == 0).all()
        assert (begun[place] == launch.has_state).all()
        begun[place] = 1
        ended[place] += launch.is_last
    assert (ended == 1).all()
