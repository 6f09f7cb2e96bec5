"""`context_parallel` and its buffers."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import Problem, reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped, _torch, context_parallel

PROBLEM = Problem(q_len=10, kv_len=10, is_causal=True)
Q, K, V, GRAD_OUT = PROBLEM.draw(0)
OUT = reference(PROBLEM, Q, K, V, GRAD_OUT)[0]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def assert_ring(layout: Layout, rank: int, world_size: int) -> None:
    """SDPA of this rank's shards is that of the whole sequence."""
    out = F.scaled_dot_product_attention(*(shard(each, layout, rank, world_size) for each in (Q, K, V)), is_causal=True)
    torch.testing.assert_close(out, shard(OUT, layout, rank, world_size), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(2)], ids=repr)
def test_buffers_are_shards_inside_and_restored_bit_for_bit(layout: Layout) -> None:
    def body(rank: int) -> None:
        draw = torch.Generator().manual_seed(0)
        floats = torch.randn(2, 3, 5, generator=draw)
        floats[0, 0], floats[1, 1, 2] = float("nan"), -0.0
        buffers = [
            torch.randint(99, (2, 11), generator=draw),
            torch.randn(4, 3, dtype=torch.complex64, generator=draw),
            torch.rand(2, 2, 9, generator=draw) > 0.5,
            floats,
            torch.randn(7, generator=draw).bfloat16(),
            torch.randn(6, 4, generator=draw).t(),
        ]
        dims = [1, 0, -1, -2, 0, 1]
        wholes, memory = [buffer.clone() for buffer in buffers], [buffer.data_ptr() for buffer in buffers]
        inside = [shard(whole, layout, rank, 3, dim % whole.dim()) for whole, dim in zip(wholes, dims, strict=True)]
        strides = [buffer.stride() for buffer in buffers]
        with context_parallel(dist.group.WORLD, buffers=buffers, buffer_seq_dims=dims, layout=layout):
            for buffer, expected in zip(buffers, inside, strict=True):
                assert buffer.dtype == expected.dtype
                assert buffer.shape == expected.shape
                assert bits(buffer) == bits(expected)
            buffers[0].add_(1)
        for buffer, whole in zip(buffers, wholes, strict=True):
            assert buffer.shape == whole.shape
            assert bits(buffer) == bits(whole)
        assert [buffer.data_ptr() for buffer in buffers] == memory
        assert [buffer.stride() for buffer in buffers] == strides

    run_ranks(3, body)


def test_rows_of_the_batch_may_be_sharded_differently() -> None:
    random = torch.rand(2, 3, 5)

    def body(rank: int) -> None:
        tokens, mask = torch.arange(20).view(2, 10), random > 0.5
        expected = [shard(tokens, MirroredBatch(), rank, 2, 1), shard(mask, MirroredBatch(), rank, 2, 2)]
        context = functools.partial(context_parallel, layout=MirroredBatch())
        with context(dist.group.WORLD, buffers=[tokens, mask], buffer_seq_dims=[1, -1]):
            assert torch.equal(tokens, expected[0])
            assert torch.equal(mask, expected[1])
        with pytest.raises(ValueError, match="one batch size"):
            context(dist.group.WORLD, buffers=[tokens, mask[:1]], buffer_seq_dims=[1, 2])

    run_ranks(2, body)


@pytest.mark.parametrize("collection", [list, tuple, set])
def test_no_restore_buffers_are_found_by_identity_and_stay_sharded(collection: Callable[..., Any]) -> None:
    def body(rank: int) -> None:
        tokens, same_values, labels = (torch.arange(8).view(1, 8) for _ in range(3))
        memory = StorageWeakRef(tokens.untyped_storage())
        expected = shard(tokens, HeadTail(), rank, 2, 1)
        with context_parallel(
            mesh=dist.group.WORLD,
            buffers=(tokens, same_values, labels),
            buffer_seq_dims=(1, 1, 1),
            no_restore_buffers=collection([labels, tokens]),
        ):
            assert memory.expired(), "the full contents are still held"
        assert torch.equal(tokens, expected)
        assert torch.equal(labels, expected)
        assert torch.equal(same_values, torch.arange(8).view(1, 8))

    run_ranks(2, body)


def test_a_context_that_is_never_entered_changes_nothing() -> None:
    plain = F.scaled_dot_product_attention(Q, K, V)

    def body(rank: int) -> None:
        tokens = torch.arange(8)
        context = context_parallel(dist.group.WORLD, buffers=[tokens], buffer_seq_dims=[0], no_restore_buffers=[tokens])
        assert torch.equal(tokens, torch.arange(8))
        assert torch.equal(F.scaled_dot_product_attention(Q, K, V), plain)
        del context
        assert torch.equal(tokens, torch.arange(8))

    run_ranks(2, body)


def test_entering_twice_is_refused_and_the_first_entry_goes_on() -> None:
    def body(rank: int) -> None:
        tokens = torch.arange(8)
        context = context_parallel(dist.group.WORLD, buffers=[tokens], buffer_seq_dims=[0], seq_len=Q.size(2))
        with context:
            with pytest.raises(RuntimeError, match="already entered"), context:
                pytest.fail("entered")
            assert tokens.numel() == 4
            assert_ring(HeadTail(), rank, 2)
        assert torch.equal(tokens, torch.arange(8))

    run_ranks(2, body)


def test_the_mesh_may_be_bound_beforehand_and_decorate_functions() -> None:
    def body(rank: int) -> None:
        tokens = torch.arange(8)
        context = functools.partial(context_parallel, mesh=init_device_mesh("cpu", (2,)))

        @context(buffers=[tokens], buffer_seq_dims=[0], seq_len=Q.size(2), layout=Contiguous())
        def step() -> list[int]:
            assert_ring(Contiguous(), rank, 2)
            return tokens.tolist()

        for _ in range(2):
            assert step() == [[0, 1, 2, 3], [4, 5, 6, 7]][rank]
            assert tokens.numel() == 8

    run_ranks(2, body)


def test_kinds_of_meshes() -> None:
    def body(rank: int) -> None:
        flat = init_device_mesh("cpu", (4,))
        named = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp"))
        for mesh, world_size in (
            (flat, 4), (flat.get_group(), 4), (dist.group.WORLD, 4), (named["cp"], 2), (named["dp"], 2),
            (named.get_group("cp"), 2), (named["dp", "cp"]._flatten("dp_cp"), 4), (named["tp"], 1),
        ):  # fmt: skip
            group = mesh if isinstance(mesh, dist.ProcessGroup) else mesh.get_group()
            tokens = torch.arange(10)
            with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[0]):
                assert torch.equal(tokens, shard(torch.arange(10), HeadTail(), dist.get_rank(group), world_size, 0))
                assert_ring(HeadTail(), dist.get_rank(group), world_size)
            assert torch.equal(tokens, torch.arange(10))
        with pytest.raises(ValueError, match=r"one dim.*2 dims.*dp.*cp"):
            context_parallel(named["dp", "cp"])
        with pytest.raises(TypeError, match="got str"):
            context_parallel("cp")  # type: ignore[arg-type]

    run_ranks(4, body)


def test_what_does_not_fit_is_refused_on_creation_before_any_collective() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        tokens, labels = torch.arange(8).view(1, 8), torch.arange(8).view(1, 8)
        sharded = distribute_tensor(tokens, mesh)
        hidden = torch.ones(1, 8, requires_grad=True) * 2
        if rank != 0:  # which would have to join a collective
            return
        create = functools.partial(context_parallel, mesh)
        with pytest.raises(ValueError, match="buffer 2 is the same tensor as buffer 0"):
            create(buffers=[tokens, labels, tokens], buffer_seq_dims=[1, 1, 1])
        with pytest.raises(ValueError, match=r"no_restore_buffers.*same objects.*\(1, 8\)"):
            create(buffers=[tokens], buffer_seq_dims=[1], no_restore_buffers=[labels])
        for dim in (2, -3):
            with pytest.raises(ValueError, match=f"buffer 1: sequence dim {dim} is out of range"):
                create(buffers=[tokens, labels], buffer_seq_dims=[1, dim])
        for dims in ([1], [1, 1, 1], None):
            with pytest.raises(ValueError, match=f"got {len(dims or [])} for 2"):
                create(buffers=[tokens, labels], buffer_seq_dims=dims)
        with pytest.raises(TypeError, match=r"buffer 0: expected a plain torch.Tensor.*DTensor"):
            create(buffers=[sharded], buffer_seq_dims=[1])
        with pytest.raises(ValueError, match=r"buffer 1: got a tensor that requires grad.*context_parallel_shard"):
            create(buffers=[tokens, hidden], buffer_seq_dims=[1, 1])
        with pytest.raises(ValueError, match=r"'ring'.*'allgather', 'alltoall'"):
            create(rotate_method="ring")
        with pytest.raises(TypeError, match="layout"):
            create(layout=HeadTail)  # type: ignore[arg-type]

    run_ranks(2, body)


def test_buffers_may_share_memory() -> None:
    def body(rank: int) -> None:
        text = torch.arange(18).view(2, 9)
        tokens, labels = text[:, :-1], text[:, 1:]
        expected = [shard(each.clone(), HeadTail(), rank, 2, 1) for each in (tokens, labels)]
        with context_parallel(dist.group.WORLD, buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
            assert torch.equal(tokens, expected[0])
            assert torch.equal(labels, expected[1])
            assert torch.equal(text, torch.arange(18).view(2, 9))
        text.add_(1)
        assert torch.equal(tokens, text[:, :-1])
        assert torch.equal(labels, text[:, 1:])

    run_ranks(2, body)


def test_an_exception_in_the_body_passes_and_everything_is_restored() -> None:
    plain = F.scaled_dot_product_attention(Q, K, V)

    def body(rank: int) -> None:
        buffers = [torch.arange(8), torch.arange(15.0).view(3, 5)]
        wholes = [buffer.clone() for buffer in buffers]
        with (
            pytest.raises(KeyError, match="mine"),
            context_parallel(dist.group.WORLD, buffers=buffers, buffer_seq_dims=[0, 1]),
        ):
            raise KeyError("mine")
        assert all(map(torch.equal, buffers, wholes))
        assert torch.equal(F.scaled_dot_product_attention(Q, K, V), plain)

    run_ranks(2, body)


@pytest.mark.parametrize("fails", ["sharding", "replacing"])
def test_an_exception_on_entry_leaves_every_buffer_whole(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.scaled_dot_product_attention(Q, K, V)
    swap = _torch.swap_identities

    def swap_or_fail(first: torch.Tensor, second: torch.Tensor) -> None:
        assert not getattr(first, "fails", False)
        swap(first, second)

    monkeypatch.setattr(_torch, "swap_identities", swap_or_fail)

    def body(rank: int) -> None:
        kept, restored, broken = torch.arange(8), torch.arange(9), torch.arange(10)
        buffers = [kept, restored, broken]
        context = context_parallel(
            dist.group.WORLD, buffers=buffers, buffer_seq_dims=[0, 0, 0], no_restore_buffers=[kept]
        )
        if fails == "sharding":
            broken.data = torch.tensor(1)  # has no dim 0 any more
        broken.fails = fails == "replacing"  # type: ignore[attr-defined]
        with pytest.raises((AssertionError, IndexError)), context:
            pytest.fail("entered")
        assert torch.equal(restored, torch.arange(9))
        assert torch.equal(kept, torch.arange(8))
        assert torch.equal(F.scaled_dot_product_attention(Q, K, V), plain)
        broken.fails = False  # type: ignore[attr-defined]
        broken.data = torch.arange(10)
        with context:
            assert torch.equal(broken, shard(torch.arange(10), HeadTail(), rank, 2, 0))
        assert torch.equal(broken, torch.arange(10))

    run_ranks(2, body)


def test_an_error_of_the_library_on_entry_reaches_the_caller() -> None:
    def body(rank: int) -> None:
        context = context_parallel(dist.group.WORLD)
        broken = mock.patch.object(torch.library, "Library", side_effect=OSError("no"))
        with broken, pytest.raises(OSError, match="no"), context:
            pytest.fail("entered")
        with context:
            assert_ring(HeadTail(), 0, 1)

    run_ranks(1, body)
