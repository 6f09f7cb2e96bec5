"""Refusals of bad input, besides those of tests/matrix/test_refusals.py, and hints on torch's errors in contexts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import errors_by_rank, kinds, recorded_collectives
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor import Documents, PrefixLM, Striped, context_parallel, ring_attention

RANKS = 3


def tensor(batch: int = 2, heads: int = 4, length: int = 8, dim: int = 16, **options: Any) -> torch.Tensor:
    return torch.ones(batch, heads, length, dim, **options)


def call(**arguments: Any) -> Any:
    return ring_attention(**{"q": tensor(), "k": tensor(), "v": tensor(), "mesh": dist.group.WORLD, **arguments})


FEWER = {"k": tensor(heads=2), "v": tensor(heads=2)}
SHAPES = r"or enable_gqa=True; got q \(2, 4, 8, 16\), k \(2, 2, 8, 16\)"
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"method": "ulysses"}, TypeError, "ring_attention takes no method"),
    ({"causal": True}, TypeError, r"got an unexpected keyword argument 'causal'"),
    ({"is_causal": "yes"}, TypeError, "expected is_causal to be True or False, got 'yes'"),
    ({"scale": torch.tensor(0.1)}, TypeError, r"expected scale to be a number.*shape \(\)"),
    ({"softcap": True}, TypeError, "expected softcap to be a number.*True"),
    ({"v": None}, TypeError, "expected v to be a torch.Tensor, got NoneType"),
    ({"v": tensor(heads=2), "enable_gqa": True}, ValueError, r"as many value heads as key heads.*v \(2, 2, 8, 16\)"),
    (FEWER, ValueError, SHAPES),
    ({name: tensor(heads=0) for name in "qkv"}, ValueError, "at least one batch row, head and head dim"),
    ({"mesh": None}, TypeError, "DeviceMesh of one dim or a ProcessGroup, .*; got NoneType"),
    ({"mesh": dist.GroupMember.NON_GROUP_MEMBER}, ValueError, "this rank is not part of the process group"),
    ({"layout": "headtail"}, TypeError, "expected layout to be a Layout.*got 'headtail'"),
    ({"seq_len": (8, 8, 8)}, ValueError, r"expected seq_len.*got \(8, 8, 8\)"),
    ({"seq_len": 24.0}, ValueError, "expected seq_len.*got 24.0"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=lambda each: str(each)[:30])
def test_bad_arguments_are_refused_alike_before_any_collective(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with recorded_collectives() as collectives, pytest.raises(error, match=message) as caught:
        run_ranks(RANKS, lambda _: call(**arguments))  # raises the ranks' own error if all have the same
    assert type(caught.value) is error
    assert not collectives


def test_a_backend_that_nobody_allows_is_refused_alike() -> None:
    message = r"FLASH_ATTENTION: head dims of q and v differ \(16 and 8\)"
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION), recorded_collectives() as collectives,
        pytest.raises(NotImplementedError, match=message),
    ):  # fmt: skip
        run_ranks(RANKS, lambda _: call(v=tensor(dim=8), seq_len=24))
    assert not collectives


def test_a_mesh_that_the_rank_is_not_part_of_is_refused() -> None:
    def body(rank: int) -> None:
        mesh = DeviceMesh("cpu", [0, 1])
        dist.barrier()
        if rank == 2:
            with pytest.raises(ValueError, match=r"rank 2 is not part of the mesh.*DeviceMesh"):
                call(mesh=mesh, seq_len=16)

    run_ranks(RANKS, body)


# What rank 1 does otherwise than the others: its arguments, and what the message says of it.
ODD: list[tuple[dict[str, Any], str]] = [
    ({name: tensor(batch=1) for name in "qkv"}, "batch_size: rank 1 says 1, the others 2"),
    ({name: tensor(heads=2) for name in "qkv"}, "q_heads: rank 1 says 2, the others 4"),
    (
        {**FEWER, "enable_gqa": True, "is_causal": True},
        'kv_heads: rank 1 says 2, the others 4; about mask: rank 1 says "Causal(',
    ),
    ({name: tensor(dim=8) for name in "qkv"}, "head_dim: rank 1 says 8, the others 16"),
    ({"v": tensor(dim=8)}, "v_head_dim: rank 1 says 8, the others 16"),
    ({"mask": PrefixLM(4)}, "mask: rank 1 says 'PrefixLM(length=4)', the others 'Full()'"),
    ({"dropout_p": 0.5}, "dropout_p: rank 1 says 0.5, the others 0.0"),
    ({"softcap": 0.5}, "softcap: rank 1 says 0.5, the others 0.0"),
    ({"attn_mask": torch.zeros(8, 24)}, "attn_mask: rank 1 says 'float32 (1, 1, :, 24)', the others 'none'"),
    ({"layout": Striped(2)}, "layout: rank 1 says 'Striped(block=2)', the others 'HeadTail()'"),
    ({"rotate_method": "alltoall"}, "rotate_method: rank 1 says 'alltoall', the others 'auto'"),
    ({"q": tensor(requires_grad=True)}, "requires_grad: rank 1 says True, the others False"),
]


@pytest.mark.parametrize("mode", [{}, {"seq_len": 24, "debug": True}], ids=["first call", "debug"])
@pytest.mark.parametrize(("arguments", "message"), ODD, ids=lambda each: str(each)[:12])
def test_ranks_that_disagree_are_told_alike_who_says_what(
    arguments: dict[str, Any], message: str, mode: dict[str, Any]
) -> None:
    with recorded_collectives(of_first_calls=True) as collectives:
        errors = errors_by_rank(RANKS, lambda rank: call(**(arguments if rank == 1 else {}), **mode))
    for error in errors:
        assert type(error) is ValueError
        assert f"the ranks of the context-parallel axis disagree about {message}" in str(error)
    # Hashes, then the sizes of readable facts and these; no more.
    assert [kinds(collectives, rank) for rank in range(RANKS)] == [["AllGather"] * 3] * RANKS


def test_long_masks_that_differ_at_the_end_are_told_in_short() -> None:
    for error in errors_by_rank(RANKS, lambda rank: call(mask=Documents([*[0] * 100, 24 - (rank == 1)]))):
        assert "disagree about mask: rank 1 says" in str(error)
        assert len(str(error)) < 600


# Hints


class Old(RuntimeError):
    """An error of Python 3.10, which has no notes."""

    @property
    def add_note(self) -> None:
        raise AttributeError


def _raise_old(_x: torch.Tensor, _whole: torch.Tensor) -> None:
    raise Old("sizes 32 and 64 must match", 7)


HINT = (
    "In this context_parallel buffer 0 is a shard of length 32 of 64, buffer 2 is a shard of length 32 of 64. Was a "
    "tensor of the whole length made before the context was entered? List it in buffers (the very object, no copy), or "
    "shard it by context_parallel_shard"
)
# What a body does with a shard of (1, 64, 4) and a whole tensor, and the end of what its error says.
HINTS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str]] = {
    "add": (lambda x, whole: x + whole, HINT), "cat": (lambda x, whole: torch.cat([x, whole], 2), HINT),
    "view": (lambda x, whole: x.view(1, 64, 4), HINT),
    "cross_entropy": (lambda x, whole: torch.nn.functional.cross_entropy(x[0], whole[0, :, 0].long()), HINT),
    "without notes": (_raise_old, str(("sizes 32 and 64 must match\n" + HINT, 7))),
    "other lengths": (lambda x, whole: x @ torch.zeros(7, 7), ""), "one index": (lambda x, whole: x[0, 0, 64], ""),
    "ours": (lambda x, whole: call(q=x[None], k=whole[None], v=whole[None], seq_len=64), ""),
}  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", HINTS)
def test_hints_on_shapes_of_whole_and_shard(name: str, nested: bool) -> None:
    """One hint, also where an inner context has no buffers."""
    raising, hint = HINTS[name]

    def body(rank: int) -> str:
        x, y, z, whole = torch.zeros(1, 64, 4), torch.zeros(10), torch.zeros(64), torch.zeros(1, 64, 4)
        inner = context_parallel(dist.group.WORLD) if nested else nullcontext()
        context = context_parallel(dist.group.WORLD, buffers=[x, y, z], buffer_seq_dims=[1, 0, 0])
        with pytest.raises((RuntimeError, ValueError, IndexError)) as error, context, inner:
            raising(x, whole)
        assert x.shape == (1, 64, 4)
        return "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])

    text = run_ranks(2, body)[0]
    assert text.endswith(hint)
    assert text.count("In this context_parallel") == bool(hint)
