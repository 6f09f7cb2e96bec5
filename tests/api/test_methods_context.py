"""Nested contexts with other methods, over one axis and over two, compared with one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support.method_checks import RING_ULYSSES, ULYSSES_RING, place
from support.problems import Problem, assert_close, reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, Striped, context_parallel

LENGTH = 13
Names = tuple[str, ...]
Shape = tuple[int, ...]


def on_mesh(names: Names, shape: Shape) -> tuple[DeviceMesh, int, int]:
    """The mesh, this rank's place in the sequence, and how many ranks there are."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return mesh, place(list(coordinate), names, shape), mesh.size()


PROBLEM = Problem(LENGTH, LENGTH, batch=2, q_heads=4, kv_heads=2, is_causal=True)
WHOLE = PROBLEM.draw(0)
REFERENCE = reference(PROBLEM, *WHOLE)


class Shards:
    """A rank's leaves of one problem, and what attention of them should give."""

    def __init__(self, layout: Layout, here: int, size: int) -> None:
        *self.leaves, self.grad_out = (shard(each, layout, here, size) for each in WHOLE)
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.expected_out, *self.expected_grads = (shard(each, layout, here, size) for each in REFERENCE)
        self.out = torch.empty(0)

    def forward(self) -> None:
        """To be called inside of a context."""
        self.out = F.scaled_dot_product_attention(*self.leaves, is_causal=True, enable_gqa=True)
        assert_close(self.out, self.expected_out)

    def backward(self) -> None:
        self.out.backward(self.grad_out)
        for leaf, expected in zip(self.leaves, self.expected_grads, strict=True):
            assert_close(leaf.grad, expected)
            leaf.grad = None


@pytest.mark.parametrize("names", [RING_ULYSSES, ULYSSES_RING], ids=", ".join)
def test_nested_contexts_with_other_methods(names: Names) -> None:
    """Each level has its own ranks, layout and method; backward belongs to the level of its forward."""

    def body(rank: int) -> None:
        mesh, here, size = on_mesh(names, (2, 2))
        outer, between, after = (Shards(HeadTail(), here, size) for _ in range(3))
        of_rings = Shards(Striped(1), here, size)
        of_axis = Shards(Contiguous(), mesh.get_local_rank("ulysses"), 2)
        with context_parallel(mesh, method="hybrid", seq_len=LENGTH):
            outer.forward()
            with context_parallel(mesh, method="ring", layout=Striped(1), seq_len=LENGTH):
                of_rings.forward()
                outer.backward()
                with context_parallel(mesh["ulysses"], method="ulysses", layout=Contiguous(), seq_len=LENGTH):
                    of_axis.forward()
                    of_rings.backward()
                of_rings.forward()
            between.forward()
            of_axis.backward()
            with pytest.raises(KeyError), context_parallel(mesh, method="ring"):
                raise KeyError
            after.forward()
        for shards in (between, of_rings, after):
            shards.backward()

    run_ranks(4, body)
