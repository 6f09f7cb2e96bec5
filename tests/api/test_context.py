"""`context_parallel` and its buffers; what is refused when one is made is in test_sharding.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import shard
from support.ranks import run_ranks
from support.shards import CAUSAL, Shards
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped, _torch, context_parallel

Q, K, V = CAUSAL.draw(0)[:3]
DRAW = torch.Generator().manual_seed(0)
FLOATS = torch.randn(2, 3, 5, generator=DRAW)
FLOATS[0, 0], FLOATS[1, 1, 2] = float("nan"), -0.0
WHOLES: list[tuple[torch.Tensor, int]] = [
    (torch.randint(99, (2, 11), generator=DRAW), 1), (torch.randn(4, 3, dtype=torch.complex64, generator=DRAW), 0),
    (torch.rand(2, 2, 9, generator=DRAW) > 0.5, -1), (FLOATS, -2), (torch.randn(7, generator=DRAW).bfloat16(), 0),
    (torch.randn(6, 4, generator=DRAW).t(), 1),
]  # fmt: skip
"""Buffers and their sequence dims."""


def context(buffers: Any = (), dims: Any = None, mesh: Any = None, **options: Any) -> context_parallel:
    dims = [0] * len(buffers) if dims is None else dims
    return context_parallel(mesh or dist.group.WORLD, buffers=buffers, buffer_seq_dims=dims, **options)


def plain() -> torch.Tensor:
    """What SDPA of whole tensors gives outside of contexts."""
    return F.scaled_dot_product_attention(Q, K, V, enable_gqa=True)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(2), MirroredBatch()], ids=repr)
def test_buffers_are_shards_inside_and_restored_bit_for_bit(layout: Layout) -> None:
    chosen = [each for each in WHOLES if layout != MirroredBatch() or (each[0].size(0) == 2 and each[0].dim() > 1)]
    dims = [dim for _, dim in chosen]

    def body(rank: int) -> None:
        buffers = [whole.clone() for whole, _ in chosen]
        inside = [bits(shard(whole, layout, rank, 3, dim % whole.dim())) for whole, dim in chosen]
        before = [(bits(buffer), buffer.data_ptr(), buffer.stride()) for buffer in buffers]
        with context(buffers, dims, layout=layout):
            assert [bits(buffer) for buffer in buffers] == inside
            buffers[0].add_(1)
        assert [(bits(buffer), buffer.data_ptr(), buffer.stride()) for buffer in buffers] == before

    run_ranks(3, body)


@pytest.mark.parametrize("collection", [list, tuple, set])
def test_no_restore_buffers_are_found_by_identity_and_stay_sharded(collection: Callable[..., Any]) -> None:
    def body(rank: int) -> None:
        tokens, same_values, labels = (torch.arange(8).view(1, 8) for _ in range(3))
        memory = StorageWeakRef(tokens.untyped_storage())
        expected = shard(tokens, HeadTail(), rank, 2, 1)
        with context(
            (tokens, same_values, labels), (1, 1, 1), no_restore_buffers=collection([labels, tokens])
        ) as entered:
            assert memory.expired(), "the full contents are still held"
        assert torch.equal(tokens, expected)
        assert torch.equal(labels, expected)
        assert torch.equal(same_values, torch.arange(8).view(1, 8))
        assert entered is None

    run_ranks(2, body)


def test_contexts_that_are_never_entered_or_entered_twice() -> None:
    alone = plain()

    def body(rank: int) -> None:
        tokens, shards = torch.arange(8), Shards(rank)
        never = context([tokens], no_restore_buffers=[tokens])
        assert torch.equal(plain(), alone)
        del never
        assert torch.equal(tokens, torch.arange(8))
        once = context([tokens], seq_len=11)
        with once:
            with pytest.raises(RuntimeError, match="already entered"), once:
                pytest.fail("entered")
            assert tokens.numel() == 4
            shards.check()  # the first entry goes on
        assert torch.equal(tokens, torch.arange(8))
        left = context([tokens], no_restore_buffers=[tokens])
        with left:
            pass
        with pytest.raises(ValueError, match="left sharded"), left:
            pytest.fail("entered")
        assert tokens.numel() == 4

    run_ranks(2, body)


def test_the_mesh_may_be_bound_beforehand_and_decorate_functions() -> None:
    def body(rank: int) -> None:
        tokens = torch.arange(8)
        bound = functools.partial(context_parallel, mesh=init_device_mesh("cpu", (2,)))

        @bound(buffers=[tokens], buffer_seq_dims=[0], seq_len=11, layout=Contiguous())
        def step() -> list[int]:
            Shards(rank, layout=Contiguous()).check()
            return tokens.tolist()

        for _ in range(2):
            assert step() == [[0, 1, 2, 3], [4, 5, 6, 7]][rank]
            assert tokens.numel() == 8

    run_ranks(2, body)


def test_kinds_of_meshes() -> None:
    def body(rank: int) -> None:
        flat = init_device_mesh("cpu", (4,))
        named = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp"))
        for mesh, ranks in (
            (flat, 4), (flat.get_group(), 4), (dist.group.WORLD, 4), (named["cp"], 2), (named["dp"], 2),
            (named.get_group("cp"), 2), (named["dp", "cp"]._flatten("dp_cp"), 4), (named["tp"], 1),
        ):  # fmt: skip
            here = dist.get_rank(mesh if isinstance(mesh, dist.ProcessGroup) else mesh.get_group())
            tokens = torch.arange(11)
            with context([tokens], mesh=mesh):
                assert torch.equal(tokens, shard(torch.arange(11), HeadTail(), here, ranks, 0))
                Shards(here, ranks=ranks).check()
            assert torch.equal(tokens, torch.arange(11))
        with pytest.raises(ValueError, match=r"one dim.*2 dims.*dp.*cp"):
            context_parallel(named["dp", "cp"])

    run_ranks(4, body)


def test_buffers_may_share_memory() -> None:
    def body(rank: int) -> None:
        text = torch.arange(18).view(2, 9)
        tokens, labels = text[:, :-1], text[:, 1:]
        expected = [shard(each.clone(), HeadTail(), rank, 2, 1) for each in (tokens, labels)]
        with context([tokens, labels], [1, 1]):
            assert torch.equal(tokens, expected[0])
            assert torch.equal(labels, expected[1])
            assert torch.equal(text, torch.arange(18).view(2, 9))
        text.add_(1)
        assert torch.equal(tokens, text[:, :-1])
        assert torch.equal(labels, text[:, 1:])

    run_ranks(2, body)


ERRORS = {"body": KeyError, "sharding": IndexError, "replacing": AssertionError, "library": OSError}


@pytest.mark.parametrize("fails", ERRORS)
def test_an_exception_leaves_every_buffer_whole(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the body, or on entry; the same context may be entered afterwards."""
    alone, swap = plain(), _torch.swap_identities
    ranks = 1 if fails == "library" else 2  # a patch is that of all ranks

    def swap_or_fail(first: torch.Tensor, second: torch.Tensor) -> None:
        assert not getattr(first, "fails", False)
        swap(first, second)

    monkeypatch.setattr(_torch, "swap_identities", swap_or_fail)

    def body(rank: int) -> None:
        kept, restored, broken = buffers = [torch.arange(11) + each for each in range(3)]
        tried = context(buffers, no_restore_buffers=[] if fails == "body" else [kept])
        if fails == "sharding":
            broken.data = torch.tensor(1)  # has no dim 0 any more
        broken.fails = fails == "replacing"  # type: ignore[attr-defined]
        no_library = mock.patch.object(torch.library, "Library", side_effect=OSError)
        with no_library if fails == "library" else nullcontext(), pytest.raises(ERRORS[fails]), tried:
            raise KeyError
        assert torch.equal(kept, torch.arange(11))
        assert torch.equal(restored, torch.arange(11) + 1)
        assert torch.equal(plain(), alone)
        broken.fails = False  # type: ignore[attr-defined]
        broken.data = torch.arange(11)
        with tried:
            assert torch.equal(broken, shard(torch.arange(11), HeadTail(), rank, ranks, 0))
            Shards(rank, ranks=ranks).check()
        assert torch.equal(broken, torch.arange(11))

    run_ranks(ranks, body)


def test_buffers_that_are_shards_by_now_are_refused_on_entry() -> None:
    def body(rank: int) -> None:
        tokens = torch.arange(16)
        options: dict[str, Any] = {"buffers": [tokens], "buffer_seq_dims": [0], "no_restore_buffers": [tokens]}
        one, other = context_parallel(dist.group.WORLD, **options), context_parallel(dist.group.WORLD, **options)
        with one, pytest.raises(ValueError, match=r"got a shard of shape \(8,\): it was"), other:
            pytest.fail("entered")
        for context in (one, other):
            with pytest.raises(ValueError, match=r"it was left sharded .* or this one before"), context:
                pytest.fail("entered")
        assert tokens.numel() == 8

    run_ranks(2, body)


def test_contexts_over_one_buffer_are_left_in_the_reverse_order() -> None:
    def body(rank: int) -> None:
        tokens, mesh = torch.arange(16), init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "gpus"))
        outer = context([tokens], mesh=mesh["nodes"], layout=Contiguous())
        outer.__enter__()
        inner = context([tokens], mesh=mesh["gpus"], layout=Contiguous())
        inner.__enter__()
        assert tokens.tolist() == [8 * (rank // 2) + 4 * (rank % 2) + each for each in range(4)]  # of the outer shard
        with pytest.raises(RuntimeError, match="reverse order"):
            outer.__exit__(None, None, None)
        assert tokens.numel() == 4  # nothing has changed
        inner.__exit__(None, None, None)
        outer.__exit__(None, None, None)
        assert torch.equal(tokens, torch.arange(16))

    run_ranks(4, body)


def test_shards_are_no_buffers_over_the_same_ranks() -> None:
    def body(rank: int) -> None:
        tokens, labels, mesh = torch.arange(16), torch.arange(16), init_device_mesh("cpu", (2, 2))
        rows, cols = mesh.get_group(0), mesh.get_group(1)
        with context([tokens, labels], mesh=rows, no_restore_buffers=[labels]):
            for index, buffers in enumerate(([tokens], [labels.clone(), tokens])):
                with pytest.raises(ValueError, match=rf"buffer {index}: .* a shard of shape \(8,\): it is a buffer of"):
                    context(buffers, mesh=rows)
            with context([tokens], mesh=cols):
                assert len(tokens) == 4
        with pytest.raises(ValueError, match=r"a shard of shape \(8,\): it was left sharded \(no_restore_buffers\) by"):
            context([tokens, labels], mesh=rows)
        context([tokens, labels], mesh=cols)
        labels.set_(torch.arange(16))
        context([tokens, labels], mesh=rows)

    run_ranks(4, body)
