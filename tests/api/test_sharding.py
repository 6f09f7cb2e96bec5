"""`context_parallel_shard`, `context_parallel_unshard` and `local_positions`."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.collectives import errors_by_rank
from support.problems import shard
from support.ranks import run_ranks
from support.sequences import normal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from cp_dtensor import (
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
    context_parallel_shard,
    context_parallel_unshard,
    local_positions,
)

WORLD = 3
LAYOUTS = [Contiguous(), HeadTail(), Striped(), Striped(block=3), MirroredBatch()]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=repr)


def distinct(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose elements tell where they stand, as far as the dtype can."""
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    if dtype.is_complex:
        return torch.complex(values.float(), -values.float()).to(dtype)
    return (values % 256 if dtype == torch.bfloat16 else values % 3 == 1 if dtype == torch.bool else values).to(dtype)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...], int, torch.dtype]:
    """A layout, and a tensor's shape, sequence dim (perhaps negative) and dtype."""
    layout = draw(st.sampled_from(LAYOUTS))
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    dim = draw(st.integers(1 if isinstance(layout, MirroredBatch) else 0, len(shape) - 1))
    shape[dim] = draw(st.integers(0, 20))
    return layout, tuple(shape), draw(st.sampled_from([dim, dim - len(shape)])), draw(st.sampled_from(DTYPES))


@settings(max_examples=120)
@example((Contiguous(), (18, 1), 0, torch.bool), 2)
@given(cases(), st.integers(1, 4))
def test_shards_are_the_layouts_positions_and_unshard_is_the_inverse(
    case: tuple[Layout, tuple[int, ...], int, torch.dtype], world_size: int
) -> None:
    layout, shape, dim, dtype = case

    def body(rank: int) -> None:
        whole = distinct(shape, dtype)
        (mine,) = context_parallel_shard(dist.group.WORLD, [whole], [dim], layout)
        assert mine.dtype == dtype
        assert torch.equal(mine, shard(whole, layout, rank, world_size, dim % len(shape)))
        (back,) = context_parallel_unshard(dist.group.WORLD, [mine], [dim], layout)
        assert back.dtype == dtype
        assert torch.equal(back, whole)
        assert torch.equal(whole, distinct(shape, dtype))

    run_ranks(world_size, body)


def test_several_tensors_of_different_lengths_and_dims_at_once() -> None:
    wholes = [distinct((2, 9), torch.int64), distinct((5, 3), torch.complex64), distinct((2, 2, 1), torch.bool)]

    def body(rank: int) -> None:
        shards = context_parallel_shard(dist.group.WORLD, wholes, (1, 0, -1))
        for mine, whole, dim in zip(shards, wholes, (1, 0, 2), strict=True):
            assert torch.equal(mine, shard(whole, HeadTail(), rank, WORLD, dim))
        for back, whole in zip(context_parallel_unshard(dist.group.WORLD, shards, (1, 0, -1)), wholes, strict=True):
            assert torch.equal(back, whole)

    run_ranks(WORLD, body)


def test_shards_are_new_memory() -> None:
    def body(rank: int) -> None:
        whole = distinct((6, 2), torch.float32)
        (mine,) = context_parallel_shard(dist.group.WORLD, [whole], [0], Contiguous())
        mine.fill_(-1)
        assert torch.equal(whole, distinct((6, 2), torch.float32))

    run_ranks(1, body)
    run_ranks(WORLD, body)


@each_layout
def test_the_gradient_of_shard_is_zero_outside_of_the_shard_and_sums_to_the_whole(layout: Layout) -> None:
    weight = normal(4, 7, 2)

    def body(rank: int) -> torch.Tensor:
        whole = normal(4, 7, 2, seed=1).requires_grad_()
        (mine,) = context_parallel_shard(dist.group.WORLD, [whole], [1], layout)
        (mine * shard(weight, layout, rank, WORLD, 1)).sum().backward()
        owned = shard(torch.arange(56).view(4, 7, 2), layout, rank, WORLD, 1)
        others = torch.ones(56, dtype=torch.bool)
        others[owned.flatten()] = False
        assert whole.grad is not None
        assert not whole.grad.flatten()[others].any()
        return whole.grad

    torch.testing.assert_close(sum(run_ranks(WORLD, body)), weight, rtol=0, atol=0)


def whole_loss(hidden: torch.Tensor) -> torch.Tensor:
    """A loss that mixes tokens."""
    return (hidden.cumsum(1) ** 2 * normal(*hidden.shape, seed=2)).sum()


@pytest.mark.parametrize("length", [1, 2, 7, 12])
@pytest.mark.parametrize("grad", ["replicated", "partial"])
@each_layout
def test_gradients_through_shard_and_unshard_are_those_of_one_device(layout: Layout, grad: str, length: int) -> None:
    alone = normal(2, length, 3).requires_grad_()
    whole_loss(alone.sin()).backward()

    def body(rank: int) -> torch.Tensor:
        whole = normal(2, length, 3).requires_grad_()
        (mine,) = context_parallel_shard(dist.group.WORLD, [whole], [1], layout)
        (hidden,) = context_parallel_unshard(dist.group.WORLD, [mine.sin()], [1], layout, grad=grad)
        share = [0.5, 0.2, 0.3][rank] if grad == "partial" else 1.0
        (whole_loss(hidden) * share).backward()
        assert whole.grad is not None
        return whole.grad

    torch.testing.assert_close(sum(run_ranks(WORLD, body)), alone.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [0, 1, 2, 5, 13])
@each_layout
def test_local_positions_are_the_shard_of_arange(layout: Layout, length: int) -> None:
    def body(rank: int) -> None:
        rows = torch.arange(length).expand(5, length)
        positions = local_positions(dist.group.WORLD, length, layout, batch_size=5)
        assert positions.dtype == torch.int64
        assert torch.equal(positions, shard(rows, layout, rank, WORLD, 1))
        if not isinstance(layout, MirroredBatch):
            positions = local_positions(dist.group.WORLD, length, layout)
            assert positions.dtype == torch.int64
            assert torch.equal(positions, shard(rows[0], layout, rank, WORLD, 0))

    run_ranks(WORLD, body)


def test_positions_of_mirrored_rows_differ_so_the_batch_size_is_asked_for() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="batch_size"):
            local_positions(dist.group.WORLD, 8, MirroredBatch())
        assert local_positions(dist.group.WORLD, 4, MirroredBatch(), batch_size=2).tolist() == [
            [2 * rank, 2 * rank + 1],
            [2 - 2 * rank, 3 - 2 * rank],
        ]
        for seq_len in (-1, 2.0):
            with pytest.raises(ValueError, match="seq_len"):
                local_positions(dist.group.WORLD, seq_len)  # type: ignore[arg-type]

    run_ranks(2, body)


def test_meshes_of_one_dim_and_slices_of_a_larger_one_name_the_axis() -> None:
    whole = distinct((2, 9), torch.int64)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        (mine,) = context_parallel_shard(mesh["cp"], [whole], [1])
        assert torch.equal(mine, shard(whole, HeadTail(), rank % 2, 2, 1))
        assert torch.equal(context_parallel_unshard(mesh["cp"], [mine], [1])[0], whole)
        for function in (context_parallel_shard, context_parallel_unshard):
            with pytest.raises(ValueError, match="2 dims"):
                function(mesh, [whole], [1])
            with pytest.raises(TypeError, match="str"):
                function("cp", [whole], [1])  # type: ignore[arg-type]

    run_ranks(4, body)


@pytest.mark.parametrize("function", [context_parallel_shard, context_parallel_unshard])
def test_what_does_not_fit_is_refused_before_any_collective(function: Callable[..., object]) -> None:
    tokens = distinct((2, 8), torch.int64)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(tokens, mesh)
        if rank != 0:  # which would have to join a collective
            return
        for dim in (2, -3):
            with pytest.raises(ValueError, match=rf"buffer 1: sequence dim {dim} is out of range for shape \(2, 8\)"):
                function(mesh, [tokens, tokens], [1, dim])
        with pytest.raises(ValueError, match="got 1 for 2"):
            function(mesh, [tokens, tokens], [1])
        for dim in (True, 1.0, None):
            with pytest.raises(TypeError, match="buffer 0: expected an integer sequence dim"):
                function(mesh, [tokens], [dim])
        for not_plain in (sharded, [1, 2]):
            with pytest.raises(TypeError, match=f"plain torch.Tensor.*{type(not_plain).__name__}"):
                function(mesh, [not_plain], [1])
        for layout in (HeadTail, "headtail"):
            with pytest.raises(TypeError, match="layout"):
                function(mesh, [tokens], [1], layout)
        with pytest.raises(ValueError, match=r"buffer 1: .*needs a batch dim"):
            function(mesh, [tokens, tokens], [1, -2], MirroredBatch())
        with pytest.raises(ValueError, match="one batch size"):
            function(mesh, [tokens, tokens[:1]], [1, 1], MirroredBatch())

    run_ranks(2, body)


def test_unshard_refuses_an_unknown_kind_of_gradient() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="summed"):
            context_parallel_unshard(dist.group.WORLD, [torch.zeros(2)], [0], grad="summed")  # type: ignore[arg-type]

    run_ranks(2, body)


def test_shards_whose_lengths_are_not_the_layouts_are_refused_on_every_rank() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=r"got \[4, 1\].*expected \[3, 2\]"):
            context_parallel_unshard(dist.group.WORLD, [torch.zeros([4, 1][rank])], [0], Contiguous())

    run_ranks(2, body)


@pytest.mark.parametrize("differ", ["dtype", "shape", "dim", "layout", "count", "grad"])
def test_ranks_that_unshard_different_things_are_refused_on_every_rank(differ: str) -> None:
    def body(rank: int) -> None:
        odd = rank == 1
        tensor = torch.zeros(4, 5 if odd and differ == "shape" else 4, dtype=DTYPES[odd and differ == "dtype"])
        count = 2 if odd and differ == "count" else 1
        dim = int(odd and differ == "dim")
        layout = Contiguous() if odd and differ == "layout" else HeadTail()
        context_parallel_unshard(
            dist.group.WORLD, [tensor] * count, [dim] * count, layout,
            grad="partial" if odd and differ == "grad" else "replicated",
        )  # fmt: skip

    for error in errors_by_rank(WORLD, body):
        assert type(error) is ValueError
        assert "what rank 1 unshards differs from the others (here: one of " in str(error)
