"""The benchmark tool under masks: methods, their shards and results, and one run on two ranks."""

from __future__ import annotations

import sys
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.forked_programs import launch
from support.masked_problems import shown
from torch.nn.attention.flex_attention import create_block_mask

from cp_dtensor.spec.masks import Causal
from cp_dtensor.tools import torch_methods
from cp_dtensor.tools.cases import Case, Heads
from cp_dtensor.tools.flex import mask_mod, whole_mask
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.report import Results
from cp_dtensor.tools.torch_methods import VarlenArguments

CPU = torch.device("cpu")


def case(mask: str, seq_len: int = 256, dropout: float = 0.0) -> Case:
    return Case(seq_len, Heads(4, 2), 8, 1, "float32", mask, "HeadTail", "auto", dropout)


def test_flash_attention_4_gives_torch_as_many_results_as_it_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn.cute.interface")

    def _flash_attn_fwd(q: int, *, causal: bool) -> tuple[object, ...]:
        return q, causal, None, None, _flash_attn_fwd.compile_cache  # type: ignore[attr-defined]

    def _flash_attn_bwd(q: int) -> tuple[int, int, int]:
        return q, q + 1, q + 2

    _flash_attn_fwd.compile_cache = {}  # type: ignore[attr-defined]
    functions = {"_flash_attn_fwd": _flash_attn_fwd, "_flash_attn_bwd": _flash_attn_bwd}
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with torch_methods._with_fewer_results():
        assert vars(module)["_flash_attn_fwd"](5, causal=True) == (5, True)
        assert vars(module)["_flash_attn_bwd"](5) == (5, 6, 7)
        assert vars(module)["_flash_attn_fwd"].compile_cache is _flash_attn_fwd.compile_cache  # type: ignore[attr-defined]
    assert {name: vars(module)[name] for name in functions} == functions


def test_methods_take_part_where_they_can() -> None:
    asked = ["ideal", "ideal-kernels", "ours-auto", "ours-auto PerDocument", "torch-allgather", "torch-flex PTRR"]
    chosen = methods_by_name(asked)
    assert [each.name for each in chosen] == asked
    suited = {mask: [each.name for each in chosen if each.has_row(case(mask))] for mask in ("causal", "window 4")}
    assert suited["causal"] == ["ideal", "ours-auto", "ours-auto PerDocument", "torch-allgather"]
    assert suited["window 4"] == ["ideal-kernels", "ours-auto", "ours-auto PerDocument", "torch-flex PTRR"]
    assert [each.name for each in chosen if each.has_row(case("causal", dropout=0.1))] == asked[:4]
    refusals = {each.name: each.refusal(case("window 4", 257), 2) for each in chosen}
    assert refusals["ours-auto PerDocument"] == "PerDocument is a layout of documents"
    assert refusals["torch-flex PTRR"] == "the length is not a multiple of 128 for each rank"
    assert refusals["ours-auto"] is None
    (per_document,) = methods_by_name(["torch-flex PerDocument"])
    assert per_document.refusal(case("documents 100", 8192), 2) == "not all lengths of documents are multiples of 4"


@pytest.mark.parametrize("mask", ["causal", "documents 100", "window 200", "window 129"])
def test_whole_masks_are_those_of_create_block_mask(mask: str) -> None:
    problem = case(mask, 1024)
    found = whole_mask(problem, CPU)
    expected = create_block_mask(mask_mod(problem, CPU), None, None, 1024, 1024, device="cpu", BLOCK_SIZE=128)
    assert found.seq_lengths == expected.seq_lengths
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("documents", [[(0, 4), (4, 9), (9, 10)], [(0, 10)]])
@pytest.mark.parametrize("queries", [(0, 5), (5, 10), (2, 4), (3, 10)])
def test_queries_of_varlen_attention_see_their_documents(
    documents: list[tuple[int, int]], queries: tuple[int, int]
) -> None:
    """With keys aligned at the ends, as FlashAttention-2 has it."""
    arguments = VarlenArguments.of(documents, queries)
    seen = torch.zeros(10, 10, dtype=torch.bool)
    edges = zip(arguments.cu_seqlens_q, arguments.cu_seqlens_k, strict=True)
    row, column = queries[0], arguments.keys[0]
    for (q, k), (next_q, next_k) in pairwise(edges):
        rows, columns = next_q - q, next_k - k
        block = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        seen[row : row + rows, column : column + columns] = block
        row, column = row + rows, column + columns
    assert (row, column) == (queries[1], arguments.keys[1])
    expected = torch.zeros(10, 10, dtype=torch.bool)
    for start, stop in documents:
        expected[start:stop, start:stop] = shown(Causal(), stop - start, stop - start, 1)[0, 0]
    expected[: queries[0]] = False
    expected[queries[1] :] = False
    assert torch.equal(seen, expected)


NAMES = [
    "ideal", "ideal-kernels", "ideal-varlen", "ours-allgather", "ours-allgather Balanced", "ours-ulysses Contiguous",
    "ours-auto PerDocument", "torch-flex HeadTail", "torch-flex PerDocument", "torch-flex PTRR", "llama3-varlen",
    "ours-flex", "ours-flex Balanced", "ours-flex PerDocument", "ours-flex BalancedBlocks",
]  # fmt: skip
NOT_ON_CPUS = (
    "ideal-varlen", "llama3-varlen", "torch-flex HeadTail", "torch-flex PTRR", "ours-flex", "ours-flex Balanced",
    "ours-flex PerDocument", "ours-flex BalancedBlocks",
)  # fmt: skip
REFUSALS = {
    ("documents 100", "torch-flex PerDocument"): "not all lengths of documents are multiples of 4",
    ("window 40", "ours-auto PerDocument"): "PerDocument is a layout of documents",
    ("causal", "ours-auto PerDocument"): "PerDocument is a layout of documents",
    ("window 40", "ours-flex PerDocument"): "PerDocument is a layout of documents",
    ("causal", "ours-flex PerDocument"): "PerDocument is a layout of documents",
}


def test_a_run_on_two_ranks(tmp_path: Path) -> None:
    arguments = ["--mask", "documents 100", "window 40", "causal", "--dropout", "0", "0.1"]
    arguments += ["--seq-lens", "512", "--heads", "2:1", "--head-dim", "8"]
    arguments += ["--dtype", "float32", "--repeats", "1", "--warm-ms", "0", "--device", "cpu", "--methods", *NAMES]
    arguments += ["--output", str(tmp_path)]
    launch(2, "cp_dtensor", "bench", *arguments, folder=tmp_path)
    report = (tmp_path / "bench.md").read_text()
    assert "## 2 query and 1 kv heads of 8, window 40, forward + backward, float32, HeadTail" in report
    assert "lognormal lengths" in report
    found = Results.from_json((tmp_path / "bench.json").read_text())
    expected = {
        (mask, dropout, each.name, pass_name)
        for mask, dropout in product(("documents 100", "window 40", "causal"), (0.0, 0.1))
        for each in methods_by_name(NAMES)
        if each.has_row(case(mask, dropout=dropout))
        for pass_name in ("fwd", "fwdbwd")
    }
    assert {(row.case.mask, row.case.dropout, row.method, row.pass_name) for row in found.rows} == expected
    for row in found.rows:
        if (row.case.mask, row.method) in REFUSALS:
            assert (row.status, row.message) == ("refused", REFUSALS[row.case.mask, row.method])
        elif row.method in NOT_ON_CPUS:
            assert row.status == "refused"
            assert "NotImplementedError" in row.message
        else:
            assert row.status == "measured", row
            checked = ["out"] if row.pass_name == "fwd" else ["out", "dq", "dk", "dv"]
            assert list(row.errors) == ([] if row.case.dropout else checked)
            assert all(each < 1e-5 for each in row.errors.values())
            assert found.percent_of_ideal(row) is not None
