"""Sharding, unsharding and positions over meshes of two axes, in either order of axes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.method_checks import RING_ULYSSES, ULYSSES_RING, place
from support.problems import shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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

LAYOUTS = [Contiguous(), HeadTail(), Striped(), Striped(3), MirroredBatch()]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool]
NAMES = [RING_ULYSSES, ULYSSES_RING, ("cp_node", "cp_gpu")]
Names = tuple[str, ...]
Shape = tuple[int, int]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
each_mesh = pytest.mark.parametrize(
    ("names", "shape"), [(names, shape) for names in NAMES for shape in ((2, 2), (3, 2))], ids=str
)


def on_mesh(names: Names, shape: Shape) -> tuple[DeviceMesh, int, int]:
    """The mesh, this rank's place in the sequence, and how many ranks there are."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return mesh, place(list(coordinate), names, shape), mesh.size()


def distinct(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose elements tell where they stand, as far as the dtype can."""
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    if dtype.is_complex:
        return torch.complex(values.float(), -values.float()).to(dtype)
    return (values % 128 if dtype != torch.int64 else values).to(dtype)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(
    st.sampled_from(LAYOUTS), st.integers(0, 20), st.sampled_from(DTYPES), st.sampled_from(NAMES),
    st.tuples(st.integers(1, 3), st.integers(1, 3)), st.sampled_from([1, 2, -2]),
)  # fmt: skip
def test_shards_are_those_of_the_place_and_unshard_is_the_inverse(
    layout: Layout, length: int, dtype: torch.dtype, names: Names, shape: Shape, dim: int
) -> None:
    sizes = [2, 2, 2, 3]
    sizes[dim] = length
    whole = distinct(tuple(sizes), dtype)

    def body(rank: int) -> None:
        mesh, here, size = on_mesh(names, shape)
        (mine,) = context_parallel_shard(mesh, [whole], [dim], layout)
        assert torch.equal(mine, shard(whole, layout, here, size, dim % 4))
        (back,) = context_parallel_unshard(mesh, [mine], [dim], layout)
        assert back.dtype == dtype
        assert torch.equal(back, whole)

    run_ranks(shape[0] * shape[1], body)


def whole_loss(hidden: torch.Tensor) -> torch.Tensor:
    """A loss that mixes tokens."""
    return (hidden.cumsum(1) ** 2 * normal(*hidden.shape, seed=2)).sum()


@each_mesh
@each_layout
@pytest.mark.parametrize("grad", ["replicated", "partial"])
def test_gradients_through_shard_and_unshard_are_those_of_one_device(
    grad: str, layout: Layout, names: Names, shape: Shape
) -> None:
    alone = normal(2, 7, 3, seed=0).requires_grad_()
    whole_loss(alone.sin()).backward()
    shares = torch.linspace(0.1, 1, shape[0] * shape[1], dtype=torch.float64)
    shares /= shares.sum()

    def body(rank: int) -> torch.Tensor:
        mesh, _, _ = on_mesh(names, shape)
        whole = normal(2, 7, 3, seed=0).requires_grad_()
        (mine,) = context_parallel_shard(mesh, [whole], [1], layout)
        (hidden,) = context_parallel_unshard(mesh, [mine.sin()], [1], layout, grad=grad)
        (whole_loss(hidden) * (shares[rank] if grad == "partial" else 1.0)).backward()
        assert whole.grad is not None
        return whole.grad

    torch.testing.assert_close(sum(run_ranks(len(shares), body)), alone.grad, rtol=1e-10, atol=1e-10)


def test_the_axis_called_ulysses_is_the_inner_one_by_hand() -> None:
    """Ranks 0 1 2 3 stand at (0, 0), (0, 1), (1, 0), (1, 1) of the mesh."""

    def body(rank: int) -> dict[Names, list[int]]:
        meshes = {names: on_mesh(names, (2, 2))[0] for names in NAMES}
        return {names: local_positions(mesh, 4, Contiguous()).tolist() for names, mesh in meshes.items()}

    owned = run_ranks(4, body)
    assert [of_rank[RING_ULYSSES] for of_rank in owned] == [[0], [1], [2], [3]]
    assert [of_rank[ULYSSES_RING] for of_rank in owned] == [[0], [2], [1], [3]]
    assert [of_rank["cp_node", "cp_gpu"] for of_rank in owned] == [[0], [1], [2], [3]]


def test_shards_whose_lengths_are_not_the_layouts_are_refused_on_every_rank() -> None:
    def body(rank: int) -> None:
        mesh, here, _ = on_mesh(ULYSSES_RING, (2, 2))
        with pytest.raises(ValueError, match=r"got \[1, 2, 3, 4\].*expected \[3, 3, 2, 2\]"):
            context_parallel_unshard(mesh, [torch.zeros(here + 1)], [0], Contiguous())

    run_ranks(4, body)
