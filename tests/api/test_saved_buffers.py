"""Buffers that code inside of a context saves for backward, which runs after the context has restored them."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import shard
from support.ranks import run_ranks
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cp_dtensor import HeadTail, context_parallel

WORLD, LENGTH, WIDTH, WORDS = 2, 10, 6, 7
INSIDE = pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after exit"])


class Problem:
    """Hidden states, a table of factors, tokens and labels; `buffers` are those that a context shards."""

    def __init__(self) -> None:
        self.weight = torch.randn(WORDS, WIDTH, dtype=torch.float64, requires_grad=True)
        self.table = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
        self.turns = torch.randn(LENGTH, WIDTH // 2, dtype=torch.complex128)
        self.tokens = torch.randint(WORDS, (1, LENGTH))
        self.labels = torch.randint(WORDS, (1, LENGTH))

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self.table, self.turns, self.tokens, self.labels]


def embedding(problem: Problem, weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(problem.tokens, weight)


def attention(problem: Problem, hidden: torch.Tensor) -> torch.Tensor:
    x = (hidden * problem.table).unsqueeze(1)
    return F.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1)


def loss(problem: Problem, hidden: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ problem.weight.T).flatten(0, 1), problem.labels.flatten(), reduction="sum")


class Scaled(torch.autograd.Function):
    """hidden * table, with the table saved."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(table)
        return hidden * table

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


Steps = Callable[[Problem], torch.Tensor]


def run(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    return checkpoint(function, *args, use_reentrant=False, **kwargs)  # type: ignore[no-any-return]


def checkpointed(problem: Problem) -> torch.Tensor:
    return run(loss, problem, run(attention, problem, run(embedding, problem, problem.weight)))


def one_checkpoint(problem: Problem) -> torch.Tensor:
    def everything(weight: torch.Tensor) -> torch.Tensor:
        return loss(problem, attention(problem, embedding(problem, weight)))

    return run(everything, problem.weight)


def nested(problem: Problem) -> torch.Tensor:
    return run(
        lambda weight: run(loss, problem, run(attention, problem, run(embedding, problem, weight))), problem.weight
    )


def selective(problem: Problem) -> torch.Tensor:
    def policy() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.bmm.default])

    return run(
        lambda weight: loss(problem, attention(problem, embedding(problem, weight))), problem.weight, context_fn=policy
    )


def plain(problem: Problem) -> torch.Tensor:
    return loss(problem, attention(problem, embedding(problem, problem.weight)))


def views(problem: Problem) -> torch.Tensor:
    """As rotary positions, whose table is complex; autograd saves views of it."""
    pairs = torch.view_as_complex(embedding(problem, problem.weight).unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * problem.turns[:, :1]).flatten(-2) * problem.turns.real[:, :1]
    return loss(problem, attention(problem, turned))


def own_function(problem: Problem) -> torch.Tensor:
    hidden = embedding(problem, problem.weight)
    return loss(problem, attention(problem, Scaled.apply(hidden, problem.table)))


def checked(steps: Steps, inside: bool, around: Callable[[], Any], within: Callable[[], Any] = nullcontext) -> None:
    """Compares the gradient of the weights with that of one device; `around` and `within` the context are hooks."""
    seed = int(torch.randint(1 << 30, ()))

    def problem() -> Problem:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Problem()

    alone = problem()
    steps(alone).backward()
    problems = [problem() for _ in range(WORLD)]

    def body(rank: int) -> Any:
        mine = problems[rank]
        with ExitStack() as stack:
            stack.enter_context(around())
            with context_parallel(dist.group.WORLD, buffers=mine.buffers, buffer_seq_dims=[0, 0, 1, 1]), within():
                out = steps(mine)
                if inside:
                    out.backward()
        if not inside:
            out.backward()
        for ours, whole in zip(mine.buffers, alone.buffers, strict=True):
            assert torch.equal(ours, whole)
        return mine.weight.grad

    torch.testing.assert_close(sum(run_ranks(WORLD, body)), alone.weight.grad, rtol=1e-10, atol=1e-10)


@INSIDE
@pytest.mark.parametrize("steps", [plain, views, own_function, checkpointed, one_checkpoint, nested, selective])
def test_functions_and_checkpoints_that_save_buffers(steps: Steps, inside: bool) -> None:
    checked(steps, inside, nullcontext)


def kept_as_they_are() -> Any:
    return saved_tensors_hooks(lambda x: x.detach() if x.requires_grad else x, lambda x: x)


def in_inner_hooks() -> Any:
    stack = ExitStack()
    stack.enter_context(save_on_cpu())
    stack.enter_context(kept_as_they_are())
    return stack


@INSIDE
@pytest.mark.parametrize("steps", [plain, checkpointed])
@pytest.mark.parametrize("hooks", [save_on_cpu, kept_as_they_are, in_inner_hooks])
@pytest.mark.parametrize("where", ["around", "within"])
def test_hooks_of_saved_tensors(where: str, hooks: Callable[[], Any], steps: Steps, inside: bool) -> None:
    checked(steps, inside, *((hooks, nullcontext) if where == "around" else (nullcontext, hooks)))


def test_a_buffer_that_requires_grad_inside_gets_the_gradient_of_its_shard() -> None:
    """The alias of a leaf that requires grad leads to the same leaf."""
    whole = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64)

    def body(rank: int) -> None:
        table = whole.clone()
        with save_on_cpu(), context_parallel(dist.group.WORLD, buffers=[table], buffer_seq_dims=[0]):
            table.requires_grad_()
            mine = shard(x, HeadTail(), rank, WORLD, 0).requires_grad_()
            (run(lambda y: y * table * table, mine) * table).sum().backward()
            torch.testing.assert_close(table.grad, shard(3 * x * whole**2, HeadTail(), rank, WORLD, 0))
        torch.testing.assert_close(mine.grad, shard(whole**3, HeadTail(), rank, WORLD, 0))

    run_ranks(WORLD, body)


def test_a_gradient_of_a_buffer_that_comes_after_exit_is_told() -> None:
    def body(rank: int) -> None:
        table = torch.ones(LENGTH, WIDTH)
        with context_parallel(dist.group.WORLD, buffers=[table], buffer_seq_dims=[0]):
            total = (table.requires_grad_() * 2).sum()
        total.backward()
        assert table.grad is None

    with pytest.warns(UserWarning, match=r"shape \(5, 6\), after the context had ended"):
        run_ranks(WORLD, body)


def test_hooks_outlive_a_context_that_is_left_first() -> None:
    """Hooks that are pushed inside stay when the context is left before them, and nothing of ours does."""
    packed: list[str] = []

    def hooks(name: str) -> Any:
        return saved_tensors_hooks(lambda x: (packed.append(name), x.detach())[1], lambda x: x)

    def save() -> None:
        x = torch.ones(3, requires_grad=True)
        (x * x).sum().backward()

    def body(rank: int) -> None:
        with hooks("outer"):
            context, inner = context_parallel(dist.group.WORLD), hooks("inner")
            context.__enter__()
            inner.__enter__()
            context.__exit__(None, None, None)
            save()
            assert set(packed) == {"inner"}
            inner.__exit__(None, None, None)
            save()
            assert packed[-1] == "outer"
        del packed[:]
        save()
        assert not packed

    run_ranks(1, body)


def test_nothing_is_left_in_torch() -> None:
    enter = vars(saved_tensors_hooks)["__enter__"]

    def body(rank: int) -> None:
        with context_parallel(dist.group.WORLD):
            assert vars(saved_tensors_hooks)["__enter__"] is not enter
        assert vars(saved_tensors_hooks)["__enter__"] is enter

    run_ranks(1, body)
