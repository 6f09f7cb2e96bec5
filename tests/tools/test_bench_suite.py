"""The benchmark tool: inputs, errors, and methods that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.masked_problems import shown

from cp_dtensor.tools import measure
from cp_dtensor.tools import ranks as tools_ranks
from cp_dtensor.tools.cases import AllTokens, ByLayout, Case, Heads, Method, Select, Source, all_tokens
from cp_dtensor.tools.errors import Outcome, reference_head, relative_errors, seen_keys
from cp_dtensor.tools.measure import Effort, GroupLost, Suite
from cp_dtensor.tools.parsing import lognormal_documents, mask_by_name
from cp_dtensor.tools.ranks import Device, Failed, Ranks
from cp_dtensor.tools.report import Row

CPU = torch.device("cpu")
CASE = Case(32, Heads(4, 2), 8, 2, "float32", "causal", "HeadTail", "auto")


def shard_of(rank: int) -> Select:
    return ByLayout().select(CASE, rank, 2, CPU)


# Errors


@pytest.mark.parametrize("mask", ["causal", "full", "window 4", "documents", "documents:3,9", "documents:0,0"])
def test_the_reference_is_attention(mask: str) -> None:
    generator = torch.Generator().manual_seed(0)
    value = lognormal_documents(13, 3, 1.0) if mask == "documents" else mask_by_name(mask, 13)
    q, k, v, grad_out = (torch.randn(2, 13, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    out, dq = reference_head(q, k, v, grad_out, dk, dv, seen_keys(value, 13), block_elements=2 * 13 * 5)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=shown(value, 13, 13, 1)[0, 0])
    expected.backward(grad_out)
    torch.testing.assert_close((out, dq, dk, dv), (expected.detach(), *(leaf.grad for leaf in leaves)))


def test_errors_are_of_the_whole_and_see_every_rank() -> None:
    source = Source(3, CPU)
    whole = source.inputs(CASE, all_tokens)
    out = F.scaled_dot_product_attention(whole.q, whole.k, whole.v, is_causal=True, enable_gqa=True)

    def body(ranks: Ranks) -> dict[str, dict[str, float]]:
        select = shard_of(ranks.rank)
        mine = torch.stack([select(out[:, head]) for head in range(4)], 1)
        outcomes = {"right": Outcome((mine,), select), "zero on rank 1": Outcome((mine * (ranks.rank == 0),), select)}
        if ranks.rank == 0:
            outcomes["alone"] = Outcome((out * 1.5,), all_tokens)
        return relative_errors(CASE, source, outcomes, ranks)

    first, second = as_ranks(2, body)
    assert first == second
    assert first["right"]["out"] < 1e-6
    lost = torch.stack([shard_of(1)(out[:, head]) for head in range(4)]).norm() / out.norm()
    assert first["zero on rank 1"]["out"] == pytest.approx(lost.item(), rel=1e-5)
    assert first["alone"]["out"] == pytest.approx(0.5, rel=1e-5)


def test_shards_are_parts_of_the_whole_and_lie_as_models_have_them() -> None:
    source = Source(0, CPU)
    whole, again = source.inputs(CASE, all_tokens), source.inputs(CASE, all_tokens)
    assert torch.equal(whole.k, again.k)
    assert not torch.equal(whole.k, Source(1, CPU).inputs(CASE, all_tokens).k)
    assert not torch.equal(whole.k, whole.v)
    local = source.inputs(CASE, shard_of(1))
    assert torch.equal(local.q, torch.cat([whole.q[:, :, 8:16], whole.q[:, :, 16:24]], 2))
    assert local.q.transpose(1, 2).is_contiguous()
    assert torch.equal(local.with_expanded_kv().k, local.k.repeat_interleave(2, 1))


# Failures, on ranks that are threads


def as_ranks(world_size: int, body: Callable[[Ranks], Any]) -> list[Any]:
    """Runs `body` on ranks that share a store, but no process group."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: body(Ranks(store, rank, world_size)), range(world_size)))


def failure(ranks: Ranks, errors: dict[int, str], taking_part: bool = True) -> tuple[str, bool]:
    """Returns message and `alike` of the failure of a function that raises these errors on these ranks."""

    def body() -> None:
        if ranks.rank in errors:
            raise MemoryError(errors[ranks.rank])

    with pytest.raises(Failed) as caught:
        ranks.together(body, taking_part)
    return str(caught.value), caught.value.alike


def test_ranks_fail_together() -> None:
    def body(ranks: Ranks) -> None:
        assert ranks.gather({"rank": ranks.rank}) == [{"rank": 0}, {"rank": 1}]
        assert ranks.together(lambda: ranks.rank, ranks.rank < 1) == [0]
        full = {0: "20 bytes of 10\nare too many", 1: "30 bytes of 11"}
        assert failure(ranks, full) == ("MemoryError: 20 bytes of 10", True)
        assert failure(ranks, {1: "full"}) == ("rank 1: MemoryError: full", False)
        waited = {0: "timed out", 1: "full"}
        assert failure(ranks, waited) == ("rank 0: MemoryError: timed out; rank 1: MemoryError: full", False)
        assert failure(ranks, {0: "full"}, ranks.rank == 0) == ("MemoryError: full", True)  # all who take part

    as_ranks(2, body)


@pytest.mark.parametrize("seconds", [0.05, 60.0])
def test_an_error_is_shown_while_other_ranks_hang(
    seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 waits until rank 0's error is printed. With a limit of 60 seconds it does not wait: nothing is printed."""
    monkeypatch.setattr(tools_ranks, "_LONG_SECONDS", seconds)
    printed = threading.Event()
    monkeypatch.setattr(
        tools_ranks, "print", lambda text, file, **_: (print(text, file=file), printed.set()), raising=False
    )

    def body(ranks: Ranks) -> None:
        def work() -> None:
            if ranks.rank == 0:
                raise ValueError("no such row")
            printed.wait(20 if seconds < 1 else 0)

        with pytest.raises(Failed, match="rank 0: ValueError: no such row"):
            ranks.together(work)

    as_ranks(2, body)
    text = "rank 0 waits for the others after an error: ValueError: no such row\n"
    assert capsys.readouterr().err == (text if seconds < 1 else "")


def method(name: str, attention: Callable[..., torch.Tensor], **settings: Any) -> Method:
    return Method(name, lambda case, device: attention, **settings)


def run_suite(monkeypatch: pytest.MonkeyPatch, *methods: Method) -> list[list[Row]]:
    """The rows of each of two ranks; those that were reported, if the group was lost."""
    monkeypatch.setattr(measure.dist, "barrier", lambda: None)

    def body(ranks: Ranks) -> list[Row]:
        reported: list[Row] = []
        suite = Suite(ranks, Device(use_gpu=False), Effort(2, 1.0), Source(0, CPU), 64, reported.append)
        try:
            return suite.run(CASE, ("fwd", "fwdbwd"), methods)
        except GroupLost:
            return reported

    return as_ranks(2, body)


def without_gqa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.size(1) != k.size(1):
        raise ValueError("heads differ")
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def with_gqa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def unable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("not today\nnor tomorrow")


def test_failures_become_rows_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = (
        method("unable", unable),
        method("local", with_gqa),
        method("ideal", without_gqa, shards=AllTokens(), may_expand_kv=True),
        method("no expansion", without_gqa),
        method("local graph", with_gqa, captured=True),
    )
    for rows in run_suite(monkeypatch, *methods):
        assert [each.method for each in rows[::2]] == ["ideal", "unable", "local", "no expansion", "local graph"]
        by_name = {(each.method, each.pass_name): each for each in rows}
        ideal = by_name["ideal", "fwdbwd"]
        assert ideal.status == "measured"
        assert ideal.note == "K/V repeated to 4 heads; with shared ones ValueError: heads differ"
        assert len(ideal.samples_ms) == 1  # of rank 0
        assert all(each < 1e-6 for each in ideal.errors.values())
        assert list(ideal.errors) == ["out", "dq", "dk", "dv"]
        assert list(by_name["ideal", "fwd"].errors) == ["out"]
        assert len(by_name["local", "fwd"].samples_ms) == 2
        assert by_name["local", "fwd"].errors["out"] > 0.1  # attends to its own shard only
        unable_row = by_name["unable", "fwd"]
        assert (unable_row.status, unable_row.message) == ("refused", "NotImplementedError: not today")
        assert by_name["no expansion", "fwd"].status == "error"
        assert by_name["local graph", "fwd"].message == "NotImplementedError: CUDA graphs need a GPU"


def test_kernels_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.dist, "barrier", lambda: None)

    def body(ranks: Ranks) -> tuple[str, ...]:
        device = Device(use_gpu=False)
        device.kernels_of = lambda call: ("ours", f"of rank {ranks.rank}")  # type: ignore[method-assign]
        suite = Suite(ranks, device, Effort(1, 1.0, 0.0), Source(0, CPU), 0, lambda row: None)
        return suite.run(CASE, ("fwd",), (method("local", with_gqa),))[0].kernels

    assert as_ranks(2, body) == [("ours", "of rank 0", "of rank 1")] * 2


def test_peak_memory_is_that_of_the_call_above_what_was_held_before_it_was_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, peak = [100], [0]

    def allocate(count: int) -> None:
        held[0] += count
        peak[0] = max(peak[0], held[0])

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, held[0]))
    device = Device(use_gpu=False)
    device._is_gpu = True

    def prepare() -> None:
        for count in (70, -50):  # of which 20 stay
            allocate(count)

    def call() -> None:
        for count in (7, -7):
            allocate(count)

    assert device.extra_bytes(call, prepare) == 27
    assert device.extra_bytes(call) == 7


def test_a_failure_on_some_ranks_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fails_second(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append(1)  # appends are atomic: exactly one of the two ranks is the second
        if len(calls) == 2:
            raise RuntimeError("out of luck")
        return with_gqa(q, k, v)

    methods = (method("fine", with_gqa), method("half", fails_second), method("never", with_gqa))
    for rows in run_suite(monkeypatch, *methods):
        assert [(each.method, each.status) for each in rows] == [
            ("fine", "measured"),
            ("fine", "measured"),
            ("half", "error"),
        ]
        assert rows[-1].message in [f"rank {rank}: RuntimeError: out of luck" for rank in (0, 1)]
