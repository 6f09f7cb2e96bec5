"""Sparse attention through functions with the signatures of packages, implemented in plain torch on CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layers.test_sparse import attend, attention, block_problem, dense_blocks, problem
from support.masked_problems import shown
from support.ranks import run_ranks
from support.sequences import Sequence, check_layer, normal

from cp_dtensor import (
    Causal,
    Contiguous,
    Documents,
    HeadTail,
    Mask,
    SlidingWindow,
    Striped,
    block_attention,
    select_keys,
    select_pooled,
)
from cp_dtensor.layers import block_kernels, chosen, chosen_kernels, cudnn_indexer
from cp_dtensor.layers.chosen_reference import Chosen, attend_chosen_reference, chosen_gradients_reference
from cp_dtensor.layers.masked import Queries, largest_seen
from cp_dtensor.layers.package_kernels import PackageKernels

INFINITY = float("inf")


def flash_mla(factor: float = 1.0) -> Any:
    """FlashMLA: 64 or 128 heads, 512 values, keys in multiples of 128; lse +inf for queries without keys."""

    def flash_mla_sparse_fwd(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int,
        attn_sink: torch.Tensor | None, *, use_legacy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        check_shapes(q, kv.squeeze(1), indices.squeeze(1))
        assert use_legacy
        out, lse = attend_chosen_reference(
            q.transpose(0, 1)[None], Chosen(kv[None], indices[None], attn_sink, d_v, sm_scale)
        )
        return out[0].transpose(0, 1).contiguous() * factor, lse, lse[0].T.masked_fill(lse[0].T == -INFINITY, INFINITY)

    return SimpleNamespace(flash_mla_sparse_fwd=flash_mla_sparse_fwd)


def check_shapes(q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor) -> None:
    """Refuse what the packages refuse."""
    assert q.size(1) in (64, 128)
    assert q.size(2) == rows.size(1)
    assert q.size(2) in (512, 576)
    assert indices.size(1) % 128 == 0
    assert indices.dtype == torch.int32
    assert all(x.is_contiguous() for x in (q, rows, indices))


def cudnn() -> Any:
    """cuDNN: gradients, scores of keys up to an offset, and top-k of rows of several lengths."""

    def sparse_attention_backward_wrapper(
        q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor,
        attn_sink: torch.Tensor, topk_idxs: torch.Tensor, *, softmax_scale: float,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        check_shapes(q, kv, topk_idxs)
        assert all(x.is_contiguous() for x in (out, dout, lse))
        chosen = Chosen(kv[None, :, None], topk_idxs[None, :, None], attn_sink, out.size(2), softmax_scale)
        of_queries = [x.transpose(0, 1)[None] for x in (dout, q, out)]
        dq, d_rows, d_sink = chosen_gradients_reference(*of_queries, lse.T[None], chosen)
        assert d_sink is not None
        return {"dq": dq[0].transpose(0, 1).contiguous(), "dkv": d_rows[0, :, 0], "d_sink": d_sink}

    def indexer_forward_wrapper(
        q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, *, ratio: int, sm_scale: float,
        q_causal_offsets: torch.Tensor,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        assert ratio == sm_scale == 1
        assert q_causal_offsets.dtype == torch.int32
        scores = (torch.einsum("bthd,bsgd->bths", q.double(), k.double()).relu() * w.unsqueeze(3)).sum(2).float()
        last = q_causal_offsets.view(-1, 1, 1) + torch.arange(q.size(1)).unsqueeze(1)
        return {"scores": scores.masked_fill(torch.arange(k.size(1)) > last, -INFINITY)}

    def indexer_top_k_wrapper(
        scores: torch.Tensor, seq_lens: torch.Tensor, top_k: int, *, return_val: bool, deterministic: bool
    ) -> dict[str, torch.Tensor]:
        assert deterministic
        assert not return_val
        assert seq_lens.dtype == torch.int32
        numbers = torch.arange(scores.size(1), dtype=torch.int32)
        is_seen = numbers < seq_lens.unsqueeze(1)
        assert bool((scores > -INFINITY)[is_seen].all()), "a key that is seen was not scored"
        return {"indices": largest_seen(scores, is_seen, numbers, top_k)}

    return SimpleNamespace(**{name: each for name, each in locals().items() if callable(each)})


def fla(factor: float = 1.0) -> Any:
    """fla-core: as many queries as keys, 16 heads of a group, a power of 2 blocks; NaN for queries without keys."""

    def check_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, counts: int) -> None:
        assert q.size(1) == k.size(1) == v.size(1) == blocks.size(1)
        assert q.size(2) == 16 * k.size(2)
        assert counts == blocks.size(3) == 1 << (counts - 1).bit_length()
        assert all(x.is_contiguous() for x in (q, k, v, blocks))

    def chosen(k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, scale: float, size: int) -> Chosen:
        positions = torch.arange(k.size(1))
        seen = block_kernels._causal(positions)
        queries = [Queries(positions, seen, seen)]
        return Chosen(torch.cat((v, k), 3), blocks, None, v.size(3), scale, size, queries)

    def parallel_nsa_fwd(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, counts: int, size: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_call(q, k, v, blocks, counts)
        out, lse = attend_chosen_reference(q.transpose(1, 2), chosen(k, v, blocks, scale, size))
        out = out.masked_fill(lse.unsqueeze(3) == -INFINITY, float("nan"))
        return out.transpose(1, 2) * factor, lse.transpose(1, 2)

    def parallel_nsa_bwd(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
        blocks: torch.Tensor, counts: int, size: int, scale: float,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        check_call(q, k, v, blocks, counts)
        given = [x.transpose(1, 2) for x in (do, q, o, lse)]
        dq, d_rows, _ = chosen_gradients_reference(*given, chosen(k, v, blocks, scale, size))
        dv, dk = d_rows.split((v.size(3), k.size(3)), 3)
        return dq.transpose(1, 2) * factor, dk, dv

    return SimpleNamespace(parallel_nsa_fwd=parallel_nsa_fwd, parallel_nsa_bwd=parallel_nsa_bwd)


@contextmanager
def kernels_used(changed: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """Pretends that packages serve attention; `changed` are other modules by package."""
    modules = {"sgl-flash-mla": flash_mla(), "nvidia-cudnn-frontend": cudnn(), "fla-core": fla(), **changed}
    with (
        mock.patch.object(chosen_kernels, "serves", return_value=True),
        mock.patch.object(block_kernels, "serves", return_value=True),
        mock.patch.object(PackageKernels, "load", lambda self: modules[self.distribution]),
    ):
        yield


@pytest.mark.parametrize("part", [1 << 20, 6], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_by_kernels(with_sinks: bool, part: int) -> None:
    """Heads, dims and keys are padded; parts of queries; queries without keys."""
    sequence = Sequence(11, 3, HeadTail(), 2)
    tokens, whole, indices = problem(sequence, 5, with_sinks)
    whole = [x.float().double() for x in whole]  # kernels take sinks in float32
    with kernels_used(), mock.patch.object(chosen, "_PART", part):
        check_layer(
            sequence, attend(sequence, indices), partial(attention, indices), tokens, whole,
            tolerance=1e-6 if with_sinks else 1e-9,
        )  # fmt: skip


@pytest.mark.parametrize("dims", [(512, 64), (512, 0), (300, 20)])
def test_padding_of_queries_and_keys(dims: tuple[int, int]) -> None:
    """No copy of what kernels take as it is."""
    value_dim, dim = dims[0], sum(dims)
    q, rows, indices = normal(1, 64, 4, dim), normal(1, 9, 1, dim, seed=1), torch.zeros(1, 4, 1, 128, dtype=torch.int32)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    chosen = Chosen(rows, indices, None, value_dim, 1.0)
    made = chosen_kernels._queries(q, value_dim), *chosen_kernels._keys(chosen)
    check_shapes(*made)
    is_same = [x.data_ptr() == y.data_ptr() for x, y in zip(made, (q, rows, indices), strict=True)]
    assert is_same == [value_dim == 512, value_dim == 512, True]
    assert torch.equal(chosen_kernels._unpadded(made[1], value_dim, dim), rows[0, :, 0])
    assert float(made[0].sum()) == pytest.approx(float(q.sum()))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("has_sink", [False, True])
def test_first_use_of_attention(direction: str, has_sink: bool) -> None:
    """Right kernels pass, wrong ones do not."""
    check = partial(chosen_kernels._small_error, direction, normal(1, 3, 1, 20), 40, has_sink, 16)
    with kernels_used():
        assert check() == ""
    wrong = cudnn()
    found = wrong.sparse_attention_backward_wrapper
    wrong.sparse_attention_backward_wrapper = lambda *x, **y: {**found(*x, **y), "dkv": found(*x, **y)["dkv"] * 1.1}
    with kernels_used({"sgl-flash-mla": flash_mla(1.1), "nvidia-cudnn-frontend": wrong}):
        assert ("out" if direction == "forward" else "d_rows") in check()


@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_over_blocks_by_kernels(with_sinks: bool) -> None:
    """Queries at their positions in whole sequences, padded groups and numbers of blocks, queries without keys."""
    sequence, size = Sequence(21, 3, HeadTail(), 2), 4
    tokens, numbers = block_problem(sequence, size)
    numbers = F.pad(numbers, (0, 1), value=-1)
    seen = shown(Causal(), 21, 21, 1)

    def ours(mesh: Any, q: Any, k: Any, v: Any, *sinks: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        options = {"block_indices": sequence.shard(numbers, dist.get_rank()), "block_size": size, "seq_len": 21}
        return block_attention(q, k, v, mesh=mesh, sinks=sinks[0] if sinks else None, **options).transpose(1, 2)

    def reference(*given: torch.Tensor) -> torch.Tensor:
        sinks = given[3] if with_sinks else torch.full((4,), -1e30, dtype=torch.float64)
        return dense_blocks(numbers, size, seen, *given[:3], sinks)

    with kernels_used():
        check_layer(sequence, ours, reference, tokens, [normal(4, seed=4)] if with_sinks else [])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_first_use_of_attention_over_blocks(direction: str) -> None:
    check = partial(block_kernels._small_error, direction, torch.float64, 3, 8, 5, 16, 4, torch.device("cpu"))
    with mock.patch.object(block_kernels, "_CHECKED", 300):
        with kernels_used():
            assert check() == ""
        with kernels_used({"fla-core": fla(1.1)}):
            assert ("out" if direction == "forward" else "dq") in check()


def test_what_serves_and_what_steps_back(caplog: pytest.LogCaptureFixture) -> None:
    """A package that is not there, calls that it does not take, wrong results and deterministic algorithms."""
    caplog.set_level("INFO", "cp_dtensor.attention")
    x: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    fine, operation = "torch", f"an operation {time.monotonic()}"  # logged and checked once in a process

    def serves(package: str, refusal: str | None = None, wrong: str = "", **options: Any) -> bool:
        return PackageKernels("some-kernels", package, operation).serve(x, refusal, (wrong,), lambda: wrong, **options)

    assert not serves("no_such_package_at_all")
    assert "some-kernels is not installed" in caplog.messages[-1]
    assert not serves(fine, refusal="they need more")
    assert caplog.messages[-1].endswith("of a package: they need more")
    with pytest.warns(RuntimeWarning, match=r"some-kernels is not used for an operation .* wrong by 7"):
        assert not serves(fine, wrong="wrong by 7")
    with mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value=True):
        assert not serves(fine, adds_in_any_order=True)
        assert "deterministic algorithms are asked for" in caplog.messages[-1]
        assert serves(fine)
    assert caplog.messages[-1].startswith("some-kernels computes an operation")
    assert serves(fine, adds_in_any_order=True)
    x.is_cuda = False
    assert not serves(fine)


def selected(sequence: Sequence, given: list[torch.Tensor], topk: int, **options: Any) -> list[torch.Tensor]:
    place = {"layout": sequence.layout, "seq_len": sequence.length, "topk": topk, **options}

    def body(rank: int) -> torch.Tensor:
        return select_keys(*[sequence.shard(x, rank) for x in given], mesh=dist.group.WORLD, **place)  # type: ignore

    return run_ranks(sequence.ranks, body)


@contextmanager
def indexer_used(serves_top_k: bool, step: int) -> Iterator[None]:
    """Pretends that the package serves indexers."""
    with (
        kernels_used(),
        mock.patch.object(cudnn_indexer, "_serves", return_value=True),
        mock.patch.object(cudnn_indexer, "_top_k_serves", return_value=serves_top_k),
        mock.patch.object(cudnn_indexer, "_BYTES", step),
        mock.patch.object(cudnn_indexer, "_FEWEST_QUERIES", 1),
        mock.patch.object(cudnn_indexer, "_FEWEST_COLUMNS", 8),
    ):
        yield


MASKS: list[Mask | None] = [
    None, Documents([0, 9, 11, 40, 57]), SlidingWindow(12, 3), Documents([0, 30]) | SlidingWindow(3, None),
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("step", [1 << 29, 4 * 57 * 5], ids=["one block", "blocks"])
def test_keys_by_kernels(mask: Mask | None, is_causal: bool, step: int) -> None:
    """Equal to those of torch operations, with equal scores, for any mask and layout; also without the top-k."""
    given = [normal(2, 57, 3, 4).round(), normal(2, 57, 4, seed=1).round(), normal(2, 57, 3, seed=2).round()]
    for ranks, layout in ((1, Contiguous()), (2, HeadTail()), (3, Striped(2))):
        sequence = Sequence(57, ranks, layout, 2)
        wanted = selected(sequence, given, 6, mask=mask, is_causal=is_causal)
        for serves_top_k in (True, False):
            with indexer_used(serves_top_k, step):
                found = selected(sequence, given, 6, mask=mask, is_causal=is_causal)
            assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True)), (ranks, serves_top_k)


@pytest.mark.parametrize(("columns", "topk", "fits"), [(4097, 2048, True), (4096, 2048, False), (9000, 2049, False)])
def test_what_the_top_k_takes(columns: int, topk: int, fits: bool) -> None:
    """The kernel for 4,096 columns selected wrong keys on a GPU."""
    with mock.patch.object(PackageKernels, "serve") as serve:
        cudnn_indexer._top_k_serves(torch.empty(1, columns, device="meta"), topk)
    assert (serve.call_args.args[1] is None) == fits


@pytest.mark.parametrize("serves_top_k", [True, False])
def test_pooled_keys_by_kernels(serves_top_k: bool) -> None:
    """Equal to those of torch operations where a block has more queries than there are pooled keys."""
    q, weights = normal(2, 57, 3, 4).round(), normal(2, 57, 3, seed=2).round()
    pooled = normal(2, 57 // 4, 4, seed=1).round()

    def found() -> torch.Tensor:
        def body(_: int) -> torch.Tensor:
            mesh: Any = dist.group.WORLD
            return select_pooled(q, pooled, weights, size=4, topk=3, mesh=mesh, seq_len=57)

        return run_ranks(1, body)[0]

    wanted = found()
    with indexer_used(serves_top_k, 1 << 29):
        assert torch.equal(found(), wanted)


@pytest.mark.parametrize("changed", ["", "scores", "place", "keys"])
def test_first_use_of_the_indexer(changed: str) -> None:
    """Right kernels pass; wrong scores, scores that depend on the place, and wrong keys do not."""
    module = cudnn()
    scores, keys = module.indexer_forward_wrapper, module.indexer_top_k_wrapper

    def changed_scores(q: Any, k: Any, w: Any, **options: Any) -> dict[str, torch.Tensor]:
        factor = {"scores": 1.01, "place": 1 + 1e-6 * (k.size(1) % 2)}.get(changed, 1.0)
        return {"scores": scores(q, k, w, **options)["scores"] * factor}

    def changed_keys(values: torch.Tensor, *rest: Any, **options: Any) -> dict[str, torch.Tensor]:
        found = keys(values.flip(1) if changed == "keys" else values, *rest, **options)
        return found

    module.indexer_forward_wrapper, module.indexer_top_k_wrapper = changed_scores, changed_keys
    said: dict[str, Callable[[], str]] = {
        "scores": lambda: cudnn_indexer._scores_error(normal(1, 2, 4).bfloat16()),
        "keys": lambda: cudnn_indexer._top_k_error(20, 90, 30, torch.device("cpu")),
    }
    with kernels_used({"nvidia-cudnn-frontend": module}), mock.patch.object(cudnn_indexer, "_DIM", 4):
        assert (said["scores"]() == "") == (changed in ("", "keys"))
        assert (said["keys"]() == "") == (changed != "keys")
