"""DTensors inside of `context_parallel`, without any dispatcher of the user's."""

import pytest
import torch
import torch.nn.functional as F
from support.dtensor_checks import (
    CAUSAL,
    CP,
    DP,
    GROUPED,
    SELF,
    TP,
    Placements,
    check_equals_full_tensors,
    check_refused,
    distributed,
    sdpa,
)
from support.problems import reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from cp_dtensor import HeadTail, SlidingWindow, context_parallel, context_parallel_attention


def _own_ranks(rank: int, shape: tuple[int, ...], placements: Placements) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cp", "tp")[: len(shape)])
    out = check_equals_full_tensors(rank, shape, GROUPED, (placements,) * 3, context=context_parallel(mesh["cp"]))
    assert out == placements


@pytest.mark.parametrize(
    ("shape", "placements"), [((4,), (CP,)), ((4,), (TP,)), ((4,), (DP,)), ((2, 2), (CP, TP))], ids=str
)
def test_dtensors_over_its_own_ranks_or_more_mean_their_full_tensors(
    shape: tuple[int, ...], placements: Placements
) -> None:
    run_ranks(4, _own_ranks, shape, placements)


def _one_rank_with_mask_and_heads_over_others(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("cp", "tp"))
    *whole, _ = CAUSAL.draw(seed=0)
    q, k, v = distributed(tuple(whole), mesh["tp"], ((TP,),) * 3)
    window = SlidingWindow(2, 0)
    with context_parallel(mesh["cp"], mask=window):
        out = sdpa(CAUSAL, q, k, v)
    allowed = torch.ones(CAUSAL.q_len, CAUSAL.kv_len, dtype=torch.bool).tril().triu(-2)
    expected = F.scaled_dot_product_attention(*whole, allowed, scale=CAUSAL.scale)
    assert isinstance(out, DTensor)
    torch.testing.assert_close(out.full_tensor(), expected, rtol=0, atol=1e-10)


def test_in_a_context_of_one_rank_heads_over_other_ranks_have_its_mask() -> None:
    run_ranks(2, _one_rank_with_mask_and_heads_over_others)


def _other_ranks(rank: int, cp_axis: int, placement: Placement) -> None:
    names = ("cp", "tp") if cp_axis == 0 else ("tp", "cp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    cp_rank = mesh["cp"].get_local_rank()
    *qkv, grad_out = GROUPED.draw(seed=0)
    expected = reference(GROUPED, *qkv, grad_out)
    local = [shard(tensor, HeadTail(), cp_rank, 2) for tensor in (*qkv, grad_out, *expected)]
    q, k, v = distributed(tuple(local[:3]), mesh["tp"], ((placement,),) * 3)
    with context_parallel(mesh["cp"]):
        out = sdpa(GROUPED, q, k, v)
    assert out.device_mesh == mesh["tp"]
    assert out.placements == (placement,)
    out.backward(distribute_tensor(local[3], mesh["tp"], (placement,), src_data_rank=None))
    for actual, want in zip((out, q.grad, k.grad, v.grad), local[4:], strict=True):
        assert actual.placements == (placement,)
        torch.testing.assert_close(actual.full_tensor(), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("placement", [TP, DP], ids=str)
@pytest.mark.parametrize("cp_axis", [0, 1])
def test_local_heads_of_dtensors_over_other_ranks_are_shards(cp_axis: int, placement: Placement) -> None:
    run_ranks(4, _other_ranks, cp_axis, placement)


def _in_inference_mode(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp_rank = mesh["cp"].get_local_rank()
    *whole, grad_out = GROUPED.draw(seed=0)
    expected_out, window = reference(GROUPED, *whole, grad_out)[0], SlidingWindow(2, 0)
    with torch.inference_mode():
        local = [shard(tensor, HeadTail(), cp_rank, 2) for tensor in (*whole, expected_out)]
        q, k, v = distributed(tuple(local[:3]), mesh["tp"], ((TP,),) * 3)
        with context_parallel(mesh["cp"]):
            torch.testing.assert_close(sdpa(GROUPED, q, k, v).full_tensor(), local[3], rtol=0, atol=1e-10)
        q, k, v = distributed(tuple(whole), mesh["cp"], ((CP,),) * 3)
        with context_parallel(mesh["cp"], mask=window):
            out = sdpa(GROUPED, q, k, v).full_tensor()
        expected = context_parallel_attention(q, k, v, mask=window, enable_gqa=True)
        assert isinstance(expected, DTensor)
        torch.testing.assert_close(out, expected.full_tensor(), rtol=0, atol=1e-10)
        refused = pytest.raises(NotImplementedError, match="does not take the sinks of its context")
        with context_parallel(mesh["cp"], sinks=torch.zeros(GROUPED.q_heads)), refused:
            sdpa(GROUPED, q, k, v)


def test_inference_mode_has_the_context() -> None:
    run_ranks(4, _in_inference_mode)


def _seq_shards_over_other_ranks(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    q, k, v = distributed(SELF.draw(seed=0)[:3], mesh["tp"], ((CP,),) * 3)
    with context_parallel(mesh["cp"]):
        F.scaled_dot_product_attention(q, k, v)


def test_sequence_shards_over_other_ranks_are_refused() -> None:
    run_ranks(4, check_refused, NotImplementedError, "sharded alike over batch", _seq_shards_over_other_ranks)
