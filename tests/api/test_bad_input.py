"""Refusals of bad input: early, alike on every rank, with the received and the expected value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import errors_by_rank, kinds, recorded_collectives
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor import Contiguous, Documents, HeadTail, Layout, PrefixLM, Striped, ring_attention
from cp_dtensor.engine.arguments import refuse_unsupported_sdpa

RANKS = 3


def tensor(
    batch: int = 2, heads: int = 4, length: int = 8, dim: int = 16, dtype: torch.dtype = torch.float32, **options: Any
) -> torch.Tensor:
    return torch.ones(batch, heads, length, dim, dtype=dtype, **options)


def call(rank: int, arguments: dict[str, Any]) -> Any:
    return ring_attention(**{"q": tensor(), "k": tensor(), "v": tensor(), "mesh": dist.group.WORLD, **arguments})


Bad = tuple[dict[str, Any], type[Exception], str]
BAD: dict[str, Bad] = {  # besides those of tests/matrix/test_refusals.py
    "another method": ({"method": "ulysses"}, TypeError, "ring_attention takes no method"),
    "an unknown option": ({"causal": True}, TypeError, r"got an unexpected keyword argument 'causal'"),
    "a causal that is a string": ({"is_causal": "yes"}, TypeError, "expected is_causal to be True or False, got 'yes'"),
    "a scale of tensors": ({"scale": torch.tensor(0.1)}, TypeError, r"expected scale to be a number.*shape \(\)"),
    "a softcap that is a bool": ({"softcap": True}, TypeError, "expected softcap to be a number.*True"),
    "v is None": ({"v": None}, TypeError, "expected v to be a torch.Tensor, got NoneType"),
    "fewer value heads": (
        {"v": tensor(heads=2), "enable_gqa": True},
        ValueError,
        r"as many value heads as key heads.*v \(2, 2, 8, 16\)",
    ),
    "fewer key heads without gqa": (
        {"k": tensor(heads=2), "v": tensor(heads=2)},
        ValueError,
        r"or enable_gqa=True; got q \(2, 4, 8, 16\), k \(2, 2, 8, 16\)",
    ),
    "no heads": ({name: tensor(heads=0) for name in "qkv"}, ValueError, "at least one batch row, head and head dim"),
    "mesh is None": ({"mesh": None}, TypeError, "DeviceMesh of one dim or a ProcessGroup, .*; got NoneType"),
    "layout name": ({"layout": "headtail"}, TypeError, "expected layout to be a Layout.*got 'headtail'"),
    "three lengths": ({"seq_len": (8, 8, 8)}, ValueError, r"expected seq_len.*got \(8, 8, 8\)"),
    "a length that is no integer": ({"seq_len": 24.0}, ValueError, "expected seq_len.*got 24.0"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_refused_alike_before_any_collective(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with recorded_collectives() as collectives, pytest.raises(error, match=message) as caught:
        run_ranks(RANKS, call, arguments)  # raises the ranks' own error if all have the same
    assert type(caught.value) is error
    assert not collectives


def test_a_backend_that_nobody_allows_is_refused_alike() -> None:
    def body(rank: int) -> None:
        call(rank, {"v": tensor(dim=8), "seq_len": 24})

    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        recorded_collectives() as collectives,
        pytest.raises(NotImplementedError, match=r"FLASH_ATTENTION: head dims of q and v differ \(16 and 8\)"),
    ):
        run_ranks(RANKS, body)
    assert not collectives


def test_a_mesh_that_the_rank_is_not_part_of_is_refused() -> None:
    def body(rank: int) -> str:
        mesh = DeviceMesh("cpu", [0, 1])
        dist.barrier()
        if rank < 2:
            return ""
        with pytest.raises(ValueError, match="rank 2 is not part of the mesh") as caught:
            ring_attention(tensor(), tensor(), tensor(), mesh=mesh, seq_len=16)
        return str(caught.value)

    assert "DeviceMesh" in run_ranks(RANKS, body)[2]


def test_a_group_that_the_rank_is_not_part_of_is_refused() -> None:
    with pytest.raises(ValueError, match="this rank is not part of the process group"):
        ring_attention(tensor(), tensor(), tensor(), mesh=dist.GroupMember.NON_GROUP_MEMBER, seq_len=16)


# What rank 1 does otherwise than the others: its arguments, and what the message says of it.
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "batch size": ({name: tensor(batch=1) for name in "qkv"}, "batch_size: rank 1 says 1, the others 2"),
    "heads": ({name: tensor(heads=2) for name in "qkv"}, "q_heads: rank 1 says 2, the others 4"),
    "key heads and mask": (
        {"k": tensor(heads=2), "v": tensor(heads=2), "enable_gqa": True, "is_causal": True},
        'kv_heads: rank 1 says 2, the others 4; about mask: rank 1 says "Causal(',
    ),
    "head dim": ({name: tensor(dim=8) for name in "qkv"}, "head_dim: rank 1 says 8, the others 16"),
    "value head dim": ({"v": tensor(dim=8)}, "v_head_dim: rank 1 says 8, the others 16"),
    "mask": ({"mask": PrefixLM(4)}, "mask: rank 1 says 'PrefixLM(length=4)', the others 'Full()'"),
    "dropout": ({"dropout_p": 0.5}, "dropout_p: rank 1 says 0.5, the others 0.0"),
    "softcap": ({"softcap": 0.5}, "softcap: rank 1 says 0.5, the others 0.0"),
    "attn_mask": (
        {"attn_mask": torch.zeros(8, 24)},
        "attn_mask: rank 1 says 'float32 (1, 1, :, 24)', the others 'none'",
    ),
    "layout": ({"layout": Striped(2)}, "layout: rank 1 says 'Striped(block=2)', the others 'HeadTail()'"),
    "rotation": ({"rotate_method": "alltoall"}, "rotate_method: rank 1 says 'alltoall', the others 'auto'"),
    "gradients": ({"q": tensor(requires_grad=True)}, "requires_grad: rank 1 says True, the others False"),
}
MODES = {"first call": {}, "debug": {"seq_len": 24, "debug": True}}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("arguments", "message"), ODD.values(), ids=ODD)
def test_ranks_that_disagree_are_told_alike_who_says_what(
    arguments: dict[str, Any], message: str, mode: dict[str, Any]
) -> None:
    def body(rank: int) -> None:
        call(rank, {**(arguments if rank == 1 else {}), **mode})

    with recorded_collectives(of_first_calls=True) as collectives:
        errors = errors_by_rank(RANKS, body)
    for error in errors:
        assert type(error) is ValueError
        assert f"the ranks of the context-parallel axis disagree about {message}" in str(error)
    # Hashes, then the sizes of readable facts and these; no more.
    assert [kinds(collectives, rank) for rank in range(RANKS)] == [["AllGather"] * 3] * RANKS


def test_long_masks_that_differ_at_the_end_are_told_in_short() -> None:
    def body(rank: int) -> None:
        call(rank, {"mask": Documents([*[0] * 100, 24 - (rank == 1)])})

    for error in errors_by_rank(RANKS, body):
        assert type(error) is ValueError
        assert "disagree about mask: rank 1 says" in str(error)
        assert len(str(error)) < 600


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize(
    ("layout", "lengths"),
    [(HeadTail(), [3, 3, 9]), (HeadTail(), [6, 5, 5]), (Contiguous(), [2, 3, 3]), (Striped(2), [3, 3, 2])],
    ids=repr,
)
def test_unequal_shards_of_no_declared_length_are_refused_on_every_rank(
    layout: Layout, lengths: list[int], of_keys: bool
) -> None:
    def body(rank: int) -> None:
        local, other = tensor(length=lengths[rank]), tensor(length=4)
        q, k = (other, local) if of_keys else (local, other)
        ring_attention(q, k, k, mesh=dist.group.WORLD, layout=layout)

    with recorded_collectives(of_first_calls=True) as collectives:
        errors = errors_by_rank(RANKS, body)
    for error in errors:
        assert type(error) is ValueError
        assert "pass seq_len=" in str(error)
    assert [kinds(collectives, rank) for rank in range(RANKS)] == [["AllGather"] * 3] * RANKS


def test_masks_and_dropout_are_refused_and_not_dropped() -> None:
    with pytest.raises(NotImplementedError, match=r"got a mask of shape \(8, 8\), expected None"):
        refuse_unsupported_sdpa(torch.ones(8, 8), 0.0)
    with pytest.raises(NotImplementedError, match=r"got dropout_p=0.1, expected 0.0"):
        refuse_unsupported_sdpa(None, 0.1)
    assert refuse_unsupported_sdpa(None, 0.0) is None
