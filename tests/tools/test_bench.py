"""`python -m cp_dtensor bench`: cases, methods, numbers, failures, and one run on two ranks."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.forked_programs import launch
from support.masked_problems import shown
from support.ranks import run_ranks

from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.tools import bench, command, torch_methods
from cp_dtensor.tools.bench import parse_options, too_large
from cp_dtensor.tools.cases import (
    WHOLE,
    Case,
    Heads,
    Method,
    grid,
    head_of,
    inputs_of,
    mask_mod,
    positions_by_layout,
    require,
    rows_of,
)
from cp_dtensor.tools.errors import ERRORS, Outcome, reference_head, relative_errors
from cp_dtensor.tools.measure import Suite, Work, compare
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.ranks import Device, Failed, Ranks
from cp_dtensor.tools.report import ERROR, MEASURED, REFUSED, Row, machine_columns, table_of, times_of

CPU = torch.device("cpu")
CASE = Case(32, Heads(4, 2, 8), batch=2, dtype="float32")
MASKS = ["causal", "full", "window 4", "documents 3", "documents:3,9", "documents:0,0", "prefix:5"]


# Cases and options


def test_heads() -> None:
    assert Heads.parse("64:8") == Heads(64, 8, 128)
    assert (Heads.parse("64:8:256").dims, Heads.parse("4:4:6/2").dims) == ((256, 256), (6, 2))
    for text in ("8", "8:3", "0:0", "a:b", "8:4:2:1", "8:4:0", "8:4:64/", "8:4:/64"):
        with pytest.raises(ValueError, match=r"expected .*heads"):
            Heads.parse(text)


def test_flops_count_what_is_not_masked() -> None:
    full, window = (replace(CASE, mask=mask) for mask in ("full", "window 2"))
    assert full.flops("fwd") == 2 * 2 * (2 * 4 * 32 * 32 * 8)  # two products of a multiply and an add
    assert replace(full, heads=Heads(4, 4, 6, 2)).flops("fwd") == 2 * (2 * 4 * 32 * 32) * (6 + 2)
    assert CASE.flops("fwd") == full.flops("fwd") * (32 * 33 / 2) / 32**2
    assert window.flops("fwd") == full.flops("fwd") * (32 + 31) / 32**2
    assert CASE.flops("fwdbwd") == 3.5 * CASE.flops("fwd")


def test_nodes_are_measured_by_one_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three masks, and every way over one axis and over two; the machine says how many ranks stand for a node."""
    options = parse_options(["--nodes", "2", "--device", "cpu"])
    names = {method.name for method in options.methods}
    assert {"ours-allgather", "ours-ulysses", "ours-auto", "ours-nested-2", "ours-hybrid-4", "ours-auto-2"} <= names
    assert {case.mask for case in options.cases} == {"causal", "documents 2048", "window 4096"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine_columns(4, 2)["machine"] == "4xCPU as 2x2"


def test_the_grid_has_all_combinations_and_needs_ever_more_memory() -> None:
    heads = [Heads(32, 8), Heads(32, 32)]
    cases = grid(heads=heads, seq_len=[256, 64, 64], backend=["auto", "MATH"])
    assert {(case.seq_len, case.heads, case.backend) for case in cases} == {
        *product((64, 256), heads, ("auto", "MATH"))
    }
    keys = [case.seq_len * case.heads.kv for case in cases]
    assert len(cases) == 8
    assert keys == sorted(keys)


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = parse_options([])
    assert sorted({case.seq_len for case in options.cases}) == [8192, 32768, 65536, 131072, 262144]
    assert {case.heads for case in options.cases} == {Heads(32, 8), Heads(32, 32), Heads(64, 8)}
    assert {(case.mask, case.dtype) for case in options.cases} == {("causal", "bfloat16")}
    ours = {f"ours-{name}" for name in ROTATE_METHODS}
    assert {"ideal", "torch-allgather", "torch-alltoall", *ours} <= {method.name for method in options.methods}
    chosen = parse_options(
        ["--device", "cpu", "--seq-lens", "96", "--mask", "full", "--methods", "ideal", "ours-alltoall"]
    )
    assert [(case.seq_len, case.heads, case.mask) for case in chosen.cases] == [(96, Heads(8, 2, 64), "full")]
    assert [method.name for method in chosen.methods] == ["ideal", "ours-alltoall"]
    small = parse_options(["--device", "cpu"])
    assert [case.seq_len for case in small.cases] == [1024, 2048]
    errors = parse_options(["--device", "cpu", "--errors"])
    assert errors.errors == 1.5
    expected = {*product(("FLASH_ATTENTION", "MATH"), ("causal", "full"))}
    assert {(case.backend, case.mask) for case in errors.cases} == expected


def test_methods_by_name() -> None:
    names = ["ideal", "ours-auto PerDocument", "torch-allgather", "torch-flex PTRR", "ours-flex", "ours-hybrid-2"]
    assert [each.name for each in methods_by_name(names)] == names
    both = [each.name for each in methods_by_name(["ideal", "ours-auto"], graph=True, compiled="ours")]
    assert both == ["ideal", "ours-auto", "ours-auto compiled", "ours-auto graph"]


# Inputs and errors


@pytest.mark.parametrize("mask", MASKS)
def test_the_reference_is_attention(mask: str) -> None:
    """And masks of FlexAttention are the same masks."""
    generator, case = torch.Generator().manual_seed(0), replace(CASE, seq_len=13, mask=mask)
    q, k, v, grad_out = (torch.randn(2, 13, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    out, gradients = reference_head(q, k, v, grad_out, case.seen_keys(), block_elements=2 * 13 * 5)
    leaves, allowed = [x.detach().clone().requires_grad_() for x in (q, k, v)], shown(case.mask_value, 13, 13, 1)[0, 0]
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=allowed)
    expected.backward(grad_out)
    torch.testing.assert_close((out, *gradients), (expected.detach(), *(leaf.grad for leaf in leaves)))
    position = torch.arange(13)
    assert torch.equal(mask_mod(case, CPU)(None, None, position[:, None], position), allowed)


def test_shards_are_parts_of_the_whole_and_lie_as_models_have_them() -> None:
    whole = inputs_of(CASE, positions_by_layout(CASE, WHOLE, CPU))
    assert torch.equal(whole.k[:, 1], head_of(CASE, "k", 1, CPU))
    assert not torch.equal(whole.k, whole.v)
    local = run_ranks(2, lambda rank: inputs_of(CASE, positions_by_layout(CASE, "HeadTail", CPU)))[1]
    assert torch.equal(local.q, torch.cat([whole.q[:, :, 8:16], whole.q[:, :, 16:24]], 2))
    assert local.q.transpose(1, 2).is_contiguous()
    mirrored = run_ranks(2, lambda rank: positions_by_layout(CASE, "MirroredBatch", CPU))[0]
    assert mirrored.tolist() == [[*range(16)], [*range(16, 32)]]


def as_ranks(body: Callable[[Ranks], Any]) -> list[Any]:
    """Run `body` on two ranks that are threads."""
    return run_ranks(2, lambda rank: body(Ranks(dist.group.WORLD)))  # type: ignore[arg-type]


def test_errors_are_of_the_whole_and_see_every_rank() -> None:
    everything = positions_by_layout(CASE, WHOLE, CPU)
    whole = inputs_of(CASE, everything)
    out = F.scaled_dot_product_attention(whole.q, whole.k, whole.v, is_causal=True, enable_gqa=True)

    def body(ranks: Ranks) -> dict[int, dict[str, float]]:
        positions = positions_by_layout(CASE, "HeadTail", CPU)
        mine = torch.stack([rows_of(out[:, head], positions) for head in range(4)], 1)
        outcomes = {0: Outcome((mine,), positions), 1: Outcome((mine * (ranks.rank == 0),), positions)}
        if ranks.rank == 0:
            outcomes[2] = Outcome((out * 1.5,), everything)
        return relative_errors(CASE, outcomes, ranks, CPU)

    first, second = as_ranks(body)
    assert first == second
    assert first[0]["out"] < 1e-6
    assert first[1]["out"] == pytest.approx((out[:, :, 8:24].norm() / out.norm()).item(), rel=1e-5)
    assert first[2]["out"] == pytest.approx(0.5, rel=1e-5)


# Numbers


def row(method: str, *by_rank: list[float], ranks: int = 1, **changes: Any) -> Row:
    about = {"pass": "fwd", "method": method, "status": MEASURED, "message": None}
    return {**about, **(times_of(by_rank, ranks) if by_rank else {}), **changes}


def test_the_slowest_rank_counts_and_ideal_is_shared_among_the_ranks() -> None:
    slow = row("ours-allgather", [1.0, 9.0, 1.0], [2.0, 2.5, 3.0], error_out=2e-3, error_dk=3e-3)
    ideal = row("ideal", [4.0, 4.0, 4.0], ranks=2, error_out=1e-3, error_dk=2e-3)
    compare([row("ideal-installed", [9.0]), ideal, slow, row("torch-alltoall", [10.0], [7.0]), row("torch-a", [20.0])])
    assert (slow["median_ms"], slow["low_ms"], slow["high_ms"]) == pytest.approx((2.5, 2.2, 2.8))
    assert (ideal["median_ms"], ideal["percent_of_ideal"]) == (2.0, 100)
    assert (slow["percent_of_ideal"], slow["times_others"], slow["error_ratio"]) == pytest.approx((80, 4, 2))
    compare([slow, row("ideal", status=ERROR), {**ideal, "pass": "fwdbwd"}])
    assert (slow["percent_of_ideal"], slow["times_others"], slow["error_ratio"]) == (None, None, None)


@pytest.mark.parametrize(("limit", "expected"), [(1.9, True), (2.1, False), (None, False)])
def test_errors_beyond_the_limit(limit: float | None, expected: bool) -> None:
    rows = [row("ideal", [1.0], error_ratio=1.0), row("ours", [1.0], error_ratio=2.0), row("torch", status=REFUSED)]
    assert too_large(rows, limit) == expected
    assert too_large([*rows, row("ours-allgather", [1.0])], 9.0), "it has no errors"


def test_the_table_shows_every_row() -> None:
    rows = [
        row("ideal", [4.0], mask="causal", error_out=1e-4, kernels="cuDNN"),
        row("torch-allgather", status=ERROR, message="a|b\nc"),
        *(row(f"ours-{name}", status=REFUSED, message="none.") for name in ("flex", "flex", "auto")),
    ]
    assert table_of(rows, ["mask"]).splitlines() == [
        "| pass | method | median_ms | low_ms | high_ms | error_out | kernels | message |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| fwd | ideal | 4.00 | 4.00 | 4.00 | 1.0e-04 | cuDNN | - |",
        r"| fwd | torch-allgather | - | - | - | - | - | a\|b c |", "", "Not run: ours-flex, ours-auto: none.",
    ]  # fmt: skip


# Failures


def test_ranks_fail_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Each error is printed at once, since other ranks may wait for this one; a refusal is not."""

    def failure(ranks: Ranks, errors: dict[int, Exception], taking_part: bool = True) -> tuple[str, bool]:
        def body() -> None:
            if ranks.rank in errors:
                raise errors[ranks.rank]

        with pytest.raises(Failed) as caught:
            ranks.together(body, taking_part)
        return str(caught.value), caught.value.alike

    def body(ranks: Ranks) -> None:
        assert ranks.gather({"rank": ranks.rank}) == [{"rank": 0}, {"rank": 1}]
        assert ranks.together(lambda: ranks.rank, ranks.rank < 1) == [0]
        full = {0: MemoryError("20 bytes of 10\nare too many"), 1: MemoryError("30 bytes of 11")}
        assert failure(ranks, {**full}) == ("MemoryError: 20 bytes of 10", True)
        assert failure(ranks, {1: MemoryError("full")}) == ("rank 1: MemoryError: full", False)
        waited = {0: RuntimeError("timed out"), 1: MemoryError("full")}
        assert failure(ranks, {**waited}) == ("rank 0: RuntimeError: timed out; rank 1: MemoryError: full", False)
        assert failure(ranks, {0: NotImplementedError("no")}, ranks.rank == 0) == ("NotImplementedError: no", True)

    as_ranks(body)
    printed = capsys.readouterr().err
    assert "rank 0: RuntimeError: timed out\n" in printed
    assert "NotImplementedError" not in printed


def method(name: str, attention: Callable[..., torch.Tensor], **fields: Any) -> Method:
    return Method(name, lambda case, device: attention, **fields)


def run_suite(
    *methods: Method, case: Case = CASE, device: Device | None = None, check_up_to: int = 512
) -> list[list[Row]]:
    """Return the rows of each of two ranks."""

    def body(ranks: Ranks) -> list[Row]:
        rows: list[Row] = []
        suite = Suite(ranks, device or Device(use_gpu=False), 2, check_up_to)
        with suppress(Failed):  # the run has ended: rows are those that were tried
            suite.run(case, ("fwd", "fwdbwd"), methods, rows)
        return rows

    return as_ranks(body)


def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def unable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("not today\nnor tomorrow")


def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    raise ValueError("heads differ")


def test_failures_become_rows_and_the_others_are_measured() -> None:
    methods = (
        method("unable", unable), method("local", local), method("ideal", local, layout=WHOLE),
        method("broken", broken), method("local graph", local, captured=True),
        method("odd", local, context=lambda *_: require(False, "no")),
    )  # fmt: skip
    for rows in run_suite(*methods):
        assert [row["method"] for row in rows[::2]] == ["ideal", "unable", "local", "broken", "local graph", "odd"]
        found = {(row["method"], row["pass"]): row for row in rows}
        ideal = found["ideal", "fwdbwd"]
        assert ideal["status"] == MEASURED
        assert all(ideal[f"error_{name}"] < 1e-6 for name in ERRORS)
        assert [found["ideal", "fwd"][f"error_{name}"] is None for name in ERRORS] == [False, True, True, True]
        assert found["local", "fwd"]["error_out"] > 0.1  # attends to its own shard only
        about = {name: (found[name, "fwd"]["status"], found[name, "fwd"]["message"]) for name in ("unable", "broken")}
        assert about == {
            "unable": (REFUSED, "not today"), "broken": (ERROR, "ValueError: heads differ")
        }  # fmt: skip
        assert found["local graph", "fwd"]["message"] == "CUDA graphs need a GPU"
        assert found["odd", "fwd"]["message"] == "no"


def test_a_failure_on_some_ranks_ends_the_run() -> None:
    def fails_on_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("out of luck")
        return local(q, k, v)

    for rows in run_suite(method("fine", local), method("half", fails_on_one), method("never", local)):
        statuses = [(each["method"], each["status"]) for each in rows]
        assert statuses == [("fine", MEASURED), ("fine", MEASURED), ("half", ERROR)]
        assert rows[-1]["message"] == "rank 1: RuntimeError: out of luck"


def test_kernels_are_those_of_all_ranks() -> None:
    device = Device(use_gpu=False)
    device.kernels_of = lambda call: ("ours", f"of rank {dist.get_rank()}")  # type: ignore[method-assign]
    for rows in run_suite(method("local", local), device=device):
        assert rows[0]["kernels"] == "ours, of rank 0, of rank 1"


def test_results_are_kept_for_errors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all methods would fill the memory in long cases, which are not checked."""
    monkeypatch.setattr(Work, "results", lambda self: pytest.fail("results are copied"))
    for rows in run_suite(method("local", local), check_up_to=1):
        assert [row["status"] for row in rows] == [MEASURED, MEASURED]
        assert "error_out" not in rows[0]


def test_peak_memory_is_that_of_the_call_above_what_was_held_before_it_was_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, peak = [100], [0]

    def allocate(*counts: int) -> None:
        for count in counts:
            held[0] += count
            peak[0] = max(peak[0], held[0])

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, held[0]))
    device = Device(use_gpu=False)
    device.is_gpu = True
    before = device.allocated()
    allocate(70, -50)  # prepares, and 20 stay
    assert device.extra_bytes(lambda: allocate(7, -7), before) == 27
    assert device.extra_bytes(lambda: allocate(7, -7)) == 7


# Torch's methods


@pytest.mark.parametrize(
    "mask", ["documents 50", *(pytest.param(each, marks=pytest.mark.sweep) for each in ("causal", "window 40"))]
)
def test_torchs_methods_for_packed_documents(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for FlashAttention-2, which CPUs do not have, and FlexAttention, which has no backward there."""
    case = replace(CASE, seq_len=256, mask=mask, batch=1)

    def flex_attention(q: Any, k: Any, v: Any, block_mask: Any, enable_gqa: bool) -> torch.Tensor:
        assert {type(x) for x in (q, k, v)} == {torch.Tensor}  # not of a collective that has not ended
        rows, columns = torch.arange(q.size(2))[:, None], torch.arange(k.size(2))
        allowed = block_mask.mask_mod(0, 0, rows, columns)
        blocks = allowed.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).any(3).any(1)
        assert torch.equal(block_mask.to_dense()[0, 0].bool(), blocks)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=enable_gqa)

    def varlen_attn(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: int, window_size: Any, **__: Any) -> torch.Tensor:
        outs = []
        for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            rows, columns = q1 - q0, k1 - k0
            allowed = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            if window_size[0] >= 0:
                allowed &= ~allowed.new_ones(rows, columns).tril(columns - rows - window_size[0] - 1)
            heads = (x.transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
            outs.append(F.scaled_dot_product_attention(*heads, attn_mask=allowed, enable_gqa=True).transpose(0, 1))
        return torch.cat(outs)

    monkeypatch.setattr(torch_methods, "varlen_attn", varlen_attn)
    monkeypatch.setattr(torch_methods, "flex_attention", flex_attention)
    monkeypatch.setattr(torch_methods, "compiled_flex", lambda attention, device: attention)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    names = ["ideal-varlen", "torch-kv-allgather-flex", "llama3-varlen", "torch-ulysses-flex", "torch-ulysses-varlen"]
    for rows in run_suite(*methods_by_name(names), case=case):
        assert [(row["method"], row["status"], row["message"]) for row in rows[1::2]] == [
            (name, MEASURED, None) for name in names
        ]
        assert all(row[f"error_{name}"] < 1e-6 for row in rows[1::2] for name in ERRORS)


def test_flash_attention_4_gives_torch_as_many_results_as_it_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flash_attn.cute.interface")

    def _flash_attn_fwd(q: int, *, causal: bool) -> tuple[object, ...]:
        return q, causal, None, None, module._flash_attn_fwd.compile_cache

    _flash_attn_fwd.compile_cache = {}  # type: ignore[attr-defined]
    module._flash_attn_fwd, module._flash_attn_bwd = _flash_attn_fwd, lambda q: (q, q + 1, q + 2, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with torch_methods._with_fewer_results():
        assert module._flash_attn_fwd(5, causal=True) == (5, True)
        assert module._flash_attn_bwd(5) == (5, 6, 7)
        assert module._flash_attn_fwd.compile_cache is _flash_attn_fwd.compile_cache  # type: ignore[attr-defined]
    assert module._flash_attn_fwd is _flash_attn_fwd


# The command


@pytest.mark.parametrize(
    ("status", "arguments", "code"), [(MEASURED, [], 0), (REFUSED, [], 0), (ERROR, [], 1), (MEASURED, ["--errors"], 1)]
)
def test_a_run_with_errors_ends_with_status_1(
    status: str, arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = SimpleNamespace(rank=0, world_size=2)
    monkeypatch.setattr(command, "start", lambda *_: (ranks, SimpleNamespace(torch_device=CPU)))
    monkeypatch.setattr(
        Suite, "run", lambda self, case, *_: _[-1].append(row("ideal", [4.0], status=status, message="m"))
    )
    monkeypatch.setattr(command, "end", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        bench.main(["--device", "cpu", *arguments])
    assert int(ended.value.code or 0) == code
    assert "`torchrun --nproc-per-node 2 -m cp_dtensor bench --device cpu" in capsys.readouterr().out


NAMES = [
    "ideal", "ideal-installed", "ideal-varlen", "ours-allgather", "ours-allgather Balanced", "ours-ulysses Contiguous",
    "ours-auto PerDocument", "torch-allgather", "torch-allgather FA4", "torch-flex PTRR", "llama3-varlen", "ours-flex",
    "ours-flex BalancedBlocks", "ours-symm_mem", "ours-hybrid-2",
]  # fmt: skip
ON_CPUS = {"ideal", "ideal-installed", "ours-allgather", "ours-allgather Balanced", "ours-ulysses Contiguous"}
REASONS = {
    "ideal": "SDPA has no mask such as documents 100", "ours-auto PerDocument": "PerDocument is a layout of documents",
    "torch-allgather": "torch's context parallel of SDPA has no", "ours-hybrid-2": "it needs several times 2 ranks",
    "ours-symm_mem": "", "torch-flex PTRR": "FlexAttention has no backward on CPUs",
    "ours-allgather graph": "CUDA graphs need a GPU",
}  # fmt: skip


def test_a_run_on_two_ranks(tmp_path: Path) -> None:
    arguments = ["--mask", "documents 100", "causal", "--seq-lens", "256", "--heads", "2:1:8"]
    arguments += ["--dtype", "float32", "--repeats", "1", "--device", "cpu", "--graph"]
    arguments += ["--methods", *NAMES, "--output", "out/rows.csv"]
    printed = launch(2, "cp_dtensor", "bench", *arguments, folder=tmp_path)
    assert "-m cp_dtensor bench --mask 'documents 100' causal" in printed
    for title in ("causal, float32", "documents 100, float32"):
        assert f"\n## 256 tokens, 2:1:8 heads, {title}\n" in printed
    with (tmp_path / "out" / "rows.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 2 * 2 * len(methods_by_name(NAMES, graph=True))
    for row in rows:
        name, documents = row["method"], row["mask"] == "documents 100"
        assert (row["machine"], row["head_dim"]) == ("2xCPU", "8")
        layout = [word for word in name.split()[1:] if word not in ("graph", "FA4")] or ["HeadTail"]
        assert row["layout"] == layout[0]
        runs = name in ON_CPUS - ({"ideal"} if documents else set()) or (name == "ours-auto PerDocument" and documents)
        assert row["status"] == (MEASURED if runs else REFUSED), row
        assert bool(row["message"]) != runs
        if not runs and name in REASONS and (name, documents) != ("torch-allgather", False):
            assert row["message"].startswith(REASONS[name])
        if runs:
            checked = ERRORS if row["pass"] == "fwdbwd" else ["out"]
            assert [each for each in ERRORS if row[f"error_{each}"]] == [*checked]
            assert all(float(row[f"error_{each}"]) < 1e-5 for each in checked)
            assert float(row["percent_of_ideal"]) > 0
