"""Hints on torch's errors about shapes that are raised inside of a context."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from cp_dtensor import context_parallel, ring_attention


def full_text(error: BaseException) -> str:
    """Message and notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def raised(body: Callable[[torch.Tensor, torch.Tensor], object]) -> str:
    """The error of a body with a buffer, and a whole tensor that is none; three buffers, of lengths 64, 10 and 64."""

    def on_rank(rank: int) -> str:
        x, y, z = torch.zeros(1, 64, 4), torch.zeros(10), torch.zeros(64)
        whole = torch.zeros(1, 64, 4)
        context = context_parallel(dist.group.WORLD, buffers=[x, y, z], buffer_seq_dims=[1, 0, 0])
        with pytest.raises((RuntimeError, ValueError, IndexError)) as error, context:
            body(x, whole)
        assert x.shape == (1, 64, 4)
        return full_text(error.value)

    return run_ranks(2, on_rank)[0]


HINT = (
    "In this context_parallel buffer 0 is a shard of length 32 of 64, buffer 2 is a shard of length 32 of 64. Was a "
    "tensor of the whole length made before the context was entered? List it in buffers (the very object, no copy), or "
    "shard it by context_parallel_shard"
)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, whole: x + whole,
        lambda x, whole: torch.cat([x, whole], 2),
        lambda x, whole: x.view(1, 64, 4),
        lambda x, whole: torch.nn.functional.cross_entropy(x[0], whole[0, :, 0].long()),
    ],
    ids=["add", "cat", "view", "cross_entropy"],
)
def test_shapes_of_whole_and_shard_have_a_hint(body: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    assert raised(body).endswith(HINT)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, whole: x @ torch.zeros(7, 7),
        lambda x, whole: x[0, 0, 64],
        lambda x, whole: ring_attention(x[None], whole[None], whole[None], mesh=dist.group.WORLD, seq_len=64),
    ],
    ids=["other lengths", "one index", "ours"],
)
def test_other_errors_have_none(body: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    assert "In this context_parallel" not in raised(body)


def test_without_notes_the_hint_is_the_last_line_of_the_message() -> None:
    """As in Python 3.10."""

    class Old(RuntimeError):
        @property
        def add_note(self) -> None:
            raise AttributeError

    def body(x: torch.Tensor, whole: torch.Tensor) -> None:
        with context_parallel(dist.group.WORLD):
            raise Old("sizes 32 and 64 must match", 7)

    assert raised(body) == str(("sizes 32 and 64 must match\n" + HINT, 7))


def test_nested_contexts_give_one_hint() -> None:
    """The inner context has no buffers."""

    def body(x: torch.Tensor, whole: torch.Tensor) -> None:
        with context_parallel(dist.group.WORLD):
            x + whole

    assert raised(body).count("In this context_parallel") == 1
