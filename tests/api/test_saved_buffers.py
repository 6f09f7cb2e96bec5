"""Buffers that something outlives a context with: code that saves them for backward, profilers, caches of autocast."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import shard
from support.ranks import run_ranks
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cp_dtensor import Contiguous, HeadTail, Layout, Striped, context_parallel

RANKS, LENGTH, WIDTH, WORDS = 2, 10, 6, 7
INSIDE = pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after exit"])
REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
Around = Callable[[], AbstractContextManager[Any]]


class Problem:
    """Hidden states, a table of factors, tokens and labels; `buffers` are those that a context shards."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(WORDS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
        self.table = torch.randn(LENGTH, WIDTH, dtype=torch.float64, generator=generator)
        self.turns = torch.randn(LENGTH, WIDTH // 2, dtype=torch.complex128, generator=generator)
        self.tokens = torch.randint(WORDS, (1, LENGTH), generator=generator)
        self.labels = torch.randint(WORDS, (1, LENGTH), generator=generator)
        self.calls = 0

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self.table, self.turns, self.tokens, self.labels]

    def context(self, **options: Any) -> context_parallel:
        return context_parallel(dist.group.WORLD, buffers=self.buffers, buffer_seq_dims=[0, 0, 1, 1], **options)

    def check_whole(self) -> None:
        assert all(map(torch.equal, self.buffers, Problem().buffers))


def embedding(problem: Problem, weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(problem.tokens, weight)


def attention(problem: Problem, hidden: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
    problem.calls += 1
    x = (hidden * (problem.table if table is None else table)).unsqueeze(1)
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
run: Callable[..., Any] = partial(checkpoint, use_reentrant=False)


def plain(problem: Problem, weight: torch.Tensor | None = None) -> torch.Tensor:
    return loss(problem, attention(problem, embedding(problem, problem.weight if weight is None else weight)))


def checkpointed(problem: Problem) -> torch.Tensor:
    return run(loss, problem, run(attention, problem, run(embedding, problem, problem.weight)))


def arguments(problem: Problem, use_reentrant: bool) -> torch.Tensor:
    """Buffers that are arguments; reentrant checkpoints take no keywords."""
    hidden = embedding(problem, problem.weight)
    if use_reentrant:
        return loss(problem, checkpoint(attention, problem, hidden, problem.table, use_reentrant=True))
    return loss(problem, run(attention, problem, hidden=hidden, table=problem.table))


def nested(problem: Problem, outer: bool, inner: bool) -> torch.Tensor:
    def twice(hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            hidden = checkpoint(attention, problem, hidden, use_reentrant=inner)
        return hidden

    return loss(problem, checkpoint(twice, embedding(problem, problem.weight), use_reentrant=outer))


def selective(problem: Problem) -> torch.Tensor:
    kept = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
    return run(plain, problem, problem.weight, context_fn=partial(create_selective_checkpoint_contexts, kept))


def views(problem: Problem) -> torch.Tensor:
    """As rotary positions, whose table is complex; autograd saves views of it."""
    pairs = torch.view_as_complex(embedding(problem, problem.weight).unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * problem.turns[:, :1]).flatten(-2) * problem.turns.real[:, :1]
    return loss(problem, attention(problem, turned))


def own_function(problem: Problem) -> torch.Tensor:
    hidden = embedding(problem, problem.weight)
    return loss(problem, attention(problem, Scaled.apply(hidden, problem.table)))


def checked(
    steps: Steps, inside: bool, around: Around = nullcontext, within: Around = nullcontext,
    after: Around = nullcontext, layout: Layout | None = None,
) -> None:  # fmt: skip
    """Compares gradients of the weights with those of one device, and the number of forwards.

    `around` and `within` the context are hooks; a backward after exit is in `after()`.
    """
    alone = Problem()
    steps(alone).backward()

    def body(rank: int) -> Any:
        mine = Problem()
        with ExitStack() as stack:
            stack.enter_context(around())
            with mine.context(layout=layout), within():
                out = steps(mine)
                if inside:
                    out.backward()
                    assert mine.table.size(0) == LENGTH // RANKS
        mine.check_whole()
        if not inside:
            with after():
                out.backward()
        mine.check_whole()
        assert mine.calls == alone.calls
        return mine.weight.grad

    torch.testing.assert_close(sum(run_ranks(RANKS, body)), alone.weight.grad, rtol=1e-10, atol=1e-10)


STEPS: dict[str, Steps] = {
    "plain": plain, "views": views, "own function": own_function, "checkpointed": checkpointed, "selective": selective,
    "one checkpoint": lambda problem: run(plain, problem, problem.weight),
    "reentrant checkpoint": lambda problem: checkpoint(plain, problem, problem.weight, use_reentrant=True),
    **{f"arguments, reentrant {each}": partial(arguments, use_reentrant=each) for each in (True, False)},
    **{f"nested, reentrant {outer}, {inner}": partial(nested, outer=outer, inner=inner)
       for outer in (True, False) for inner in (True, False)},
}  # fmt: skip


# Torch's own warning: within a reentrant checkpoint, nothing requires grad in the first forward.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@INSIDE
@pytest.mark.parametrize("name", STEPS)
def test_functions_and_checkpoints_that_save_buffers(name: str, inside: bool) -> None:
    checked(STEPS[name], inside)


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
def test_hooks_of_saved_tensors(where: str, hooks: Around, steps: Steps, inside: bool) -> None:
    checked(steps, inside, **{where: hooks})


@REENTRANT
def test_a_recompute_inside_of_the_next_context(use_reentrant: bool) -> None:
    """It is in the layout and on the buffers of its forward, not of the context that is open around the backward."""

    def steps(problem: Problem) -> torch.Tensor:
        return checkpoint(plain, problem, problem.weight, use_reentrant=use_reentrant)

    def following() -> context_parallel:
        return context_parallel(dist.group.WORLD, seq_len=LENGTH, layout=Contiguous())

    checked(steps, False, after=following, layout=Striped())


@REENTRANT
def test_an_exception_in_the_recompute_leaves_buffers_whole(use_reentrant: bool) -> None:
    def fails_the_second_time(problem: Problem, weight: torch.Tensor) -> torch.Tensor:
        if problem.calls:
            raise KeyError("recompute")
        return plain(problem, weight)

    def body(rank: int) -> None:
        problem = Problem()
        with problem.context():
            out = checkpoint(fails_the_second_time, problem, problem.weight, use_reentrant=use_reentrant)
        with pytest.raises(KeyError, match="recompute"):
            out.backward()
        problem.check_whole()
        q = torch.randn(1, 1, 4, 4)
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), (q @ q.mT / 2).softmax(-1) @ q)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("context_of", ["nobody", "this thread", "another thread"])
@REENTRANT
def test_a_checkpoint_made_outside_never_becomes_ring_attention(use_reentrant: bool, context_of: str) -> None:
    alone = Problem()
    plain(alone).backward()

    def body(rank: int) -> None:
        problem = Problem()
        in_context = rank in {"nobody": [], "this thread": [0, 1], "another thread": [1]}[context_of]
        group = dist.new_group([1]) if context_of == "another thread" else dist.group.WORLD
        out = checkpoint(plain, problem, problem.weight, use_reentrant=use_reentrant)
        with context_parallel(group) if in_context else nullcontext():
            dist.barrier()
            if context_of == "this thread":  # it may or may not belong to this context: refused, never guessed
                with pytest.raises(RuntimeError, match=r"is ambiguous.*ContextParallel"):
                    out.backward()
            elif not in_context:
                out.backward()
                torch.testing.assert_close(problem.weight.grad, alone.weight.grad, rtol=1e-10, atol=1e-10)
                assert problem.calls == 2
            dist.barrier()

    run_ranks(2, body)


def test_a_buffer_that_requires_grad_inside_gets_the_gradient_of_its_shard() -> None:
    """The alias of a leaf that requires grad leads to the same leaf."""
    whole, x = Problem().table, Problem(1).table

    def body(rank: int) -> None:
        table = whole.clone()
        with save_on_cpu(), context_parallel(dist.group.WORLD, buffers=[table], buffer_seq_dims=[0]):
            table.requires_grad_()
            mine = shard(x, HeadTail(), rank, RANKS, 0).requires_grad_()
            (run(lambda y: y * table * table, mine) * table).sum().backward()
            torch.testing.assert_close(table.grad, shard(3 * x * whole**2, HeadTail(), rank, RANKS, 0))
        torch.testing.assert_close(mine.grad, shard(whole**3, HeadTail(), rank, RANKS, 0))

    run_ranks(RANKS, body)


def test_a_gradient_of_a_buffer_that_comes_after_exit_is_told() -> None:
    def body(rank: int) -> None:
        table = torch.ones(LENGTH, WIDTH)
        with context_parallel(dist.group.WORLD, buffers=[table], buffer_seq_dims=[0]):
            total = (table.requires_grad_() * 2).sum()
        total.backward()
        assert table.grad is None

    with pytest.warns(UserWarning, match=r"shape \(5, 6\), after the context had ended"):
        run_ranks(RANKS, body)


def test_hooks_outlive_a_context_that_is_left_first() -> None:
    """Hooks that are pushed inside stay when the context is left before them, and nothing of ours does."""
    packed: list[str] = []
    enter = vars(saved_tensors_hooks)["__enter__"]

    def hooks(name: str) -> Any:
        return saved_tensors_hooks(lambda x: (packed.append(name), x.detach())[1], lambda x: x)

    def save() -> None:
        x = torch.ones(3, requires_grad=True)
        (x * x).sum().backward()

    def body(rank: int) -> None:
        with hooks("outer"):
            context, inner = context_parallel(dist.group.WORLD), hooks("inner")
            context.__enter__()
            assert vars(saved_tensors_hooks)["__enter__"] is not enter
            inner.__enter__()
            context.__exit__(None, None, None)
            assert vars(saved_tensors_hooks)["__enter__"] is enter
            save()
            assert set(packed) == {"inner"}
            inner.__exit__(None, None, None)
            save()
            assert packed[-1] == "outer"
        del packed[:]
        save()
        assert not packed

    run_ranks(1, body)


def context(*buffers: torch.Tensor, **options: Any) -> context_parallel:
    return context_parallel(dist.group.WORLD, buffers=buffers, buffer_seq_dims=[0] * len(buffers), **options)


def references(tensor: torch.Tensor, count: int) -> list[Any]:
    return [torch._C._WeakTensorRef(tensor) for _ in range(count)]


def expired(weak: list[Any]) -> list[bool]:
    return [each.expired() for each in weak]


def test_weak_references_stay_with_the_content_and_end_with_it() -> None:
    def body(rank: int) -> None:
        kept, cases = [], []
        for outside, inside, restore in product((0, 3), (0, 3), (True, False)):
            tokens = torch.arange(10)
            of_whole = references(tokens, outside)
            with context(tokens, no_restore_buffers=[] if restore else [tokens]):
                assert tokens.numel() == 5
                assert expired(of_whole) == [not restore] * outside
                of_shard = references(tokens, inside)
            assert tokens.numel() == (10 if restore else 5)
            kept.append(tokens)
            cases.append((of_whole, of_shard, restore))
        gc.collect()
        for of_whole, of_shard, restore in cases:
            assert expired(of_whole) == [not restore] * len(of_whole)
            assert expired(of_shard) == [restore] * len(of_shard)
        del tokens, kept
        gc.collect()
        assert all(all(expired(of_whole + of_shard)) for of_whole, of_shard, _ in cases)

    run_ranks(2, body)


def test_inside_of_a_profiler_that_records_shapes() -> None:
    def body(rank: int) -> None:
        tokens, table = torch.arange(10), torch.randn(10, 4)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True):
            tokens.add_(0)
            for _ in range(2):
                with context(tokens, table):
                    torch.nn.functional.embedding(tokens, table.requires_grad_()).sum().backward()
                    torch.testing.assert_close(table.grad, torch.ones(10, 4))
        assert tokens.tolist() == list(range(10))
        assert table.grad is None

    run_ranks(1, body)


@pytest.mark.parametrize("used_before", [False, True])
def test_inside_of_autocast_which_remembers_casts_of_leaves(used_before: bool) -> None:
    whole, weight = torch.randn(12, 8), torch.eye(8)

    def body(rank: int) -> None:
        leaf = whole.clone()
        with torch.autocast("cpu", torch.bfloat16):
            if used_before:
                (leaf.requires_grad_() @ weight).sum()
                leaf.requires_grad_(False)
            with context(leaf):
                out = leaf.requires_grad_() @ weight
                assert out.dtype == torch.bfloat16
                torch.testing.assert_close(out, shard(whole, HeadTail(), rank, 2, 0).bfloat16())
                out.sum().backward()
                torch.testing.assert_close(leaf.grad, torch.ones(6, 8))
            torch.testing.assert_close(leaf.requires_grad_() @ weight, whole.bfloat16())  # no cast of the shard
        assert torch.equal(leaf.detach(), whole)

    run_ranks(2, body)
