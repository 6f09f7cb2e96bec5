"""Recurrences through functions with the signatures of flash-linear-attention, implemented in plain torch on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.recurrences import HEADS, K, V, check, layer, problem
from support.sequences import Sequence, normal, recurrence
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Contiguous, HeadTail, Striped, _torch, linear_attention, mamba2
from cp_dtensor.attention.backends import first_use
from cp_dtensor.layers import chunked, fla, package_kernels
from cp_dtensor.layers.chunked import ChunkedRecurrence, Rows
from cp_dtensor.spec.cache import LRUCache

KINDS = {"gated_delta_rule": (True, False), "kda": (True, True), "simple_gla": (False, False), "gla": (False, True)}
"""For each kind, whether it is a delta rule, and whether decays differ by channel."""


def pretended(factor: float = 1.0) -> Callable[..., Any]:
    """Stands for the functions of the package: sequences of variable length in one row, states by sequence."""

    def chunk(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None = None,
        beta: torch.Tensor | None = None, *, scale: float, initial_state: torch.Tensor | None,
        output_final_state: bool, cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        assert q.size(0) == 1
        assert q.dtype == k.dtype == v.dtype
        if v.dtype == torch.bfloat16:
            q, k, v = q.float(), k.float(), v.float()
        edges = tuple(cu_seqlens.tolist())
        initial = None if initial_state is None else initial_state.unsqueeze(1).to(v.dtype)
        out, finals = recurrence(Sequence(edges[-1], 1, Contiguous(), 1, edges), q, k, v, g, beta, scale, initial)
        return out * factor, finals.squeeze(1) if output_final_state else None

    return chunk


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "CHECKED", (70, 33))


@contextmanager
def kernels_used(kernel: Callable[..., Any] | None = None) -> Iterator[None]:
    """Pretends that the package serves layers, with these kernels by kind."""
    with (
        mock.patch("cp_dtensor.layers.layer.fla_serves", lambda rows, lengths: all(lengths)),
        mock.patch.object(fla, "_kernel", kernel or (lambda *_kind: pretended())),
    ):
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "sequence", "with_states"),
    [
        ("scan", Sequence(11, 3, HeadTail(), 2), False),
        ("scan", Sequence(12, 3, Contiguous(), 1, (0, 2, 7, 12)), False),
        ("scan", Sequence(8, 2, Striped(2), 2, (0, 3, 8)), False),
        ("scan", Sequence(11, 3, HeadTail(), 1, (0, 2, 11)), True),  # maps have gradients through these states alone
        ("heads", Sequence(9, 2, Striped(2), 1, (0, 3, 9)), False),
        ("heads", Sequence(9, 2, Striped(2), 1, (0, 3, 9)), True),
    ],
    ids=str,
)
def test_ranks_have_the_results_and_gradients_of_one(
    kind: str, method: str, sequence: Sequence, with_states: bool
) -> None:
    used: list[tuple[bool, bool]] = []

    def kernel(*kind: bool) -> Callable[..., Any]:
        used.append(kind)  # type: ignore[arg-type]
        return pretended()

    with kernels_used(kernel):
        check(kind, sequence, with_states, method=method, tolerance=1e-5)
    assert {*used} == {KINDS[kind]}


def test_one_run_gives_outputs_and_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients. Backward has no more columns than the layer."""
    monkeypatch.setattr(chunked, "CHUNK", 4)
    monkeypatch.setattr(chunked, "BY_CHANNEL_CHUNK", 4)
    columns: list[int] = []

    def kernel(*arguments: torch.Tensor, **options: Any) -> Any:
        columns.append(arguments[2].size(-1))
        return pretended()(*arguments, **options)

    monkeypatch.setattr(fla, "_kernel", lambda *kind: kernel)
    lengths, results = (5, 9), []
    for by_channel in (True, False):
        whole = problem("kda" if by_channel else "gated_delta_rule", 2, 14)
        whole |= {name: whole[name].repeat(1, 1, HEADS // whole[name].size(2), 1) for name in "qk"}
        leaves = [x.requires_grad_() for x in whole.values()]
        entering = normal(2, 2, HEADS, K, V, seed=5).requires_grad_()
        q, k, v, g, beta = leaves
        for kind in (fla.FlaRecurrence, ChunkedRecurrence):
            recurrence = kind.of(Rows(v, q, k, g, beta), 0.5, lengths)
            transition, state = recurrence.maps([0, 1])
            found = [transition @ entering + state, recurrence.outputs([entering[0], entering[1]])[0]]
            grads = torch.autograd.grad([x.square().sum() for x in found], [*leaves, entering])
            results.append([transition, state, *found, *grads])
    for got, expected in (results[:2], results[2:]):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert columns == [V + K, V] * 2


@pytest.mark.parametrize("decays", ["", "by head", "by channel"])
@pytest.mark.parametrize("is_delta", [True, False])
def test_the_first_use_compares_outputs_maps_and_gradients(is_delta: bool, decays: str) -> None:
    q, v = torch.zeros(1, 1, 3, 8, dtype=torch.float64), torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    with mock.patch.object(fla, "_kernel", return_value=pretended()):
        assert fla._small_error(q, v, decays, is_delta) == ""
    with mock.patch.object(fla, "_kernel", return_value=pretended(1.1)):
        assert "out of a small problem is wrong by" in fla._small_error(q, v, decays, is_delta)


def test_layers_share_the_edges_of_their_sequences() -> None:
    """Each new tensor makes the host wait for the device."""
    x = torch.zeros(2, 8, 1, 4)
    seen: list[torch.Tensor] = []

    def kernel(*arguments: torch.Tensor, cu_seqlens: torch.Tensor, **options: Any) -> Any:
        seen.append(cu_seqlens)
        return arguments[2], None

    with mock.patch.object(fla, "_kernel", return_value=kernel):
        for lengths in ((5, 3), (5, 3), (4, 4)):
            fla.FlaRecurrence.of(Rows(x, x, x, None, None), 1.0, lengths).outputs([None, None])
    assert seen[0] is seen[1]
    assert [each.tolist() for each in seen[1:]] == [[0, 5, 8, 13, 16], [0, 4, 8, 12, 16]]


def test_a_recurrence_without_decays_has_a_first_use_of_its_own() -> None:
    """The package compiles another kernel for it."""
    tried: list[str] = []
    q, g = torch.zeros(1, 4, 2, 8).bfloat16(), torch.zeros(1, 4, 2)

    def small_error(q: torch.Tensor, v: torch.Tensor, decays: str, is_delta: bool) -> str:
        tried.append(decays)
        return ""

    with (
        mock.patch.object(package_kernels, "find_spec", return_value=True),
        mock.patch.object(fla, "_small_error", small_error),
        mock.patch.object(first_use, "_verdicts", LRUCache()),
        mock.patch.object(torch.Tensor, "is_cuda", True),
    ):
        for decays in (g, None, g.unsqueeze(-1), g, None):
            assert fla.fla_serves(Rows(q, q, q, decays, None), [4])
    assert tried == ["by head", "", "by channel"]


def test_kernels_get_finite_decays_and_one_dtype() -> None:
    """Kernels subtract sums of decays. The values of mamba2 are x dt in float32."""
    generator = torch.Generator().manual_seed(0)
    x, b = (torch.randn(1, 6, 1, 3, generator=generator).bfloat16() for _ in range(2))
    dt = torch.tensor([1.0, 2.0, float("inf"), 1.0, 1.0, 1.0]).view(1, 6, 1)
    seen: list[torch.Tensor] = []

    def kernel(*arguments: torch.Tensor, g: torch.Tensor, **options: Any) -> Any:
        seen.append(g)
        out, final = pretended()(*arguments, g=g, **options)
        return out.bfloat16(), final

    def body(rank: int) -> None:
        out = linear_attention(b, b, x, -dt, mesh=dist.group.WORLD)
        assert torch.isfinite(out).all()  # type: ignore[arg-type]
        assert mamba2(x, dt.clamp(max=2), -torch.ones(1), b, b, mesh=dist.group.WORLD).dtype == torch.bfloat16  # type: ignore[union-attr]

    with (
        mock.patch("cp_dtensor.layers.layer.fla_serves", lambda rows, lengths: all(lengths)),
        mock.patch.object(fla, "_kernel", return_value=kernel),
    ):
        run_ranks(1, body)
    assert len(seen) > 1
    assert all(torch.isfinite(g).all() for g in seen)


def test_the_first_use_may_be_an_operator_of_compiled_code() -> None:
    q, v = torch.zeros(1, 1, 1, 8, dtype=torch.float64), torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    with mock.patch.object(fla, "_kernel", return_value=pretended()), _torch.below_autograd():
        assert fla._small_error(q, v, "by head", True) == ""


@pytest.mark.parametrize("length", [2, 11])
def test_checkpoints_and_second_backward_passes(length: int) -> None:
    """Also on a rank without tokens; a retained graph gives the same gradients again."""
    sequence, whole = Sequence(length, 3, Contiguous(), 1), problem("gated_delta_rule", 1, length)

    def body(rank: int) -> None:
        mine = {each: sequence.shard(x, rank).requires_grad_() for each, x in whole.items()}

        def out() -> torch.Tensor:
            return layer("gated_delta_rule", mine, mesh=dist.group.WORLD, layout=Contiguous(), seq_len=length)

        results = [out(), checkpoint(out, use_reentrant=False)]
        first, again = (
            torch.autograd.grad(results[0].square().sum(), list(mine.values()), retain_graph=True) for _ in "12"
        )
        other = torch.autograd.grad(results[1].square().sum(), list(mine.values()))  # type: ignore[union-attr]
        torch.testing.assert_close([again, other], [first, first], rtol=0, atol=0)

    with kernels_used():
        run_ranks(3, body)


@pytest.mark.parametrize(("length", "edges"), [(2, (0,)), (5, (0, 1, 5))], ids=["no tokens", "a document of one rank"])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("kernels", [True, False])
def test_one_tensor_alone_has_a_gradient(kernels: bool, name: str, length: int, edges: tuple[int, ...]) -> None:
    """Ranks join the same collectives, also in a checkpoint, which computes again up to the last tensor it saved.

    Without documents, the last rank has no tokens. With documents, no rank needs the map of the first rank's piece.
    """
    sequence, whole = Sequence(length, 3, Contiguous(), 1, edges), problem("gated_delta_rule", 1, length)

    def body(rank: int) -> None:
        mine = {each: sequence.shard(x, rank) for each, x in whole.items()}
        mine[name].requires_grad_()

        def out() -> torch.Tensor:
            return layer("gated_delta_rule", mine, mesh=dist.group.WORLD, **sequence.options())

        grads = []
        for result in (out(), checkpoint(out, use_reentrant=False)):
            grads.append(torch.autograd.grad(result.square().sum(), mine[name]))  # type: ignore[union-attr]
        torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)

    with kernels_used() if kernels else nullcontext():
        run_ranks(3, body)


def test_cpus_and_float32_do_not_use_the_package() -> None:
    q = torch.zeros(1, 1, 1, 8)
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        assert not fla.fla_serves(Rows(q, q, q, None, None), [1])
    q = q.bfloat16()
    assert not fla.fla_serves(Rows(q, q, q, None, None), [1])


def test_a_first_use_inside_of_a_checkpoint_saves_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recomputed forward does not check again, so it would save fewer tensors."""
    monkeypatch.setattr(first_use, "_verdicts", LRUCache())

    def check() -> str:
        with torch.enable_grad():
            x = torch.ones(2, requires_grad=True)
            (x * x).sum().backward()
        return ""

    def layer(x: torch.Tensor) -> torch.Tensor:
        assert first_use.first_use(("a kernel",), x.device, check) == ""
        return x.square()

    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
