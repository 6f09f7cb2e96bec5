"""Estimates of every method by the cost model, and `explain`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.explained import explained
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Balanced, Batched, Documents, Full, PerDocument, explain
from cp_dtensor.api import explain as api
from cp_dtensor.comm.collective import AllGather, AllToAll
from cp_dtensor.engine.choose import _by_heads, ring_estimate
from cp_dtensor.plan.cluster import Cluster, Hardware, Tier
from cp_dtensor.plan.cost import Step, seconds
from cp_dtensor.plan.partition import CallSpec, LayoutPartition, head_stages
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.layouts import Contiguous, HeadTail
from cp_dtensor.spec.masks import Causal

H200 = Hardware.of("H200")
SHARED = Cluster(H200, (Tier.of(H200, 8),))


def shape(length: int, ranks: int = 8, kv_heads: int = 8) -> CallSpec:
    return CallSpec(
        LayoutPartition(HeadTail(), length, length, 1, ranks), Causal(), 1, 32, kv_heads, 128, 128, "bfloat16"
    )


def tier(ranks: int, speed: float = H200.link_speed, shares_memory: bool = True) -> Tier:
    return Tier(ranks, speed, H200.link_latency, shares_memory)


@pytest.mark.parametrize(("length", "usual", "little"), [(16384, 1, 1), (24576, 2, 1), (32768, 4, 2), (65536, 4, 4)])
def test_stages_of_heads_have_more_work_where_they_hide_little(length: int, usual: int, little: int) -> None:
    """0.55, 1.2, 2.2 and 8.8e12 operations of a rank of 4, with 8 query heads."""
    causal = shape(length, 4, kv_heads=32)
    for masking in Masking:
        by_row = dataclasses.replace(causal, masking=masking)
        hides_little = masking is not Masking.BY_SHAPE
        assert head_stages(by_row, 4, publishes=True) == (little if hides_little else usual)
        assert head_stages(by_row, 4, publishes=False) == usual


def test_stages_that_pay_on_8_gpus_and_have_whole_kv_heads() -> None:
    """32,768 tokens: 16 heads of 192/128 have 0.69e12 operations of a rank, 32 heads of 128 have 1.1e12."""
    of_192 = dataclasses.replace(shape(32768, kv_heads=16), q_heads=16, head_dim=192)
    assert head_stages(of_192, 8, publishes=True) == 1
    assert head_stages(shape(32768, kv_heads=32), 8, publishes=True) == 2
    # 8 kv heads; parts of one would each need its keys and values.
    assert [head_stages(shape(1 << 20, ranks), ranks, publishes=True) for ranks in (1, 2, 4, 8, 16)] == [4, 4, 2, 1, 1]


def test_each_of_three_axes_has_its_links() -> None:
    """Of GB200, 72 GPUs are an NVL72: nodes of 4, and 18 of them."""
    found = explained(2, 18, 4, names=("cp_pod", "cp_node", "cp_gpu"), hardware="GB200")
    assert found.axes == ("cp_pod", "cp_node", "cp_gpu")
    assert found.assumption == (
        "assumed: cp_pod: GB200, InfiniBand NDR, 36.7 GB/s; cp_node: GB200, NVL72, 610 GB/s; cp_gpu: GB200, NVL72, "
        "610 GB/s"
    )
    assert "over cp_pod  over cp_node  over cp_gpu" in str(found)
    ring = found.methods["ring"]
    assert ring.outer_bytes < ring.axis_bytes[1] / 30 < ring.axis_bytes[2] / 30
    alone = explained(2, 1, 4, names=("cp_pod", "cp_node", "cp_gpu"), hardware="GB200")
    assert alone.axes == ("cp_pod", "cp_gpu"), "an axis of one rank is left out"


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_exchanges_of_heads_hide_behind_other_stages(stages: int) -> None:
    """All but the first arrival and the last departure, where attention takes longer; none of them under masks by row.

    Of a forward of 4 s whose exchanges take 1 s and 0.5 s, launched at once, with copies of no time.
    """
    ring = (Step(flops=4 * H200.flops / stages),)
    link = Tier(2, H200.link_speed, 0.0, shares_memory=True)
    towards, away = 2 * H200.link_speed, H200.link_speed  # a half of them stays
    gpu = dataclasses.replace(H200, launch=0.0, memory_speed=1e30)
    for hides, expected in ((True, 4 + 1.5 / stages), (False, 5.5)):
        work = _by_heads(ring, towards, away, stages, link, hides)
        assert seconds(work, Cluster(gpu, (link,))) == pytest.approx(expected)


def test_rings_hold_what_is_in_flight() -> None:
    """By hop one shard each: of 3 steps, 2 of gradients and 1 of contributions, and the own one; one step has no hops
    ahead of it. All others' at once are 7 shards: 1 stage of K/V and none ahead."""
    call = dataclasses.replace(shape(2048), partition=LayoutPartition(Contiguous(), 2048, 2048, 1, 8), mask=Full())
    shard = 2048 // 8 * call.head_bytes * call.kv_heads
    for transport, shards in (
        (AllToAll(), 3 + 3 + 1),
        (AllToAll(transfers_ahead=1), 2 + 3 + 1),
        (AllGather(), 7 * 4 + 1),
    ):
        assert ring_estimate(call, SHARED, transport).memory == pytest.approx(shards * shard)
    alone = dataclasses.replace(call, partition=LayoutPartition(Contiguous(), 512, 512, 1, 2))
    assert ring_estimate(alone, Cluster(H200, (tier(2),)), AllToAll()).memory == pytest.approx((1 + 3 + 1) * shard)


# `explain`; docs/choosing.md has whole tables, which test_docs.py compares


def test_explain_prints_one_table_and_returns_what_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
        found = explain(mesh, seq_len=32768, q_heads=32, kv_heads=8)
        assert set(found.methods) == {"hybrid", "ring"}
        assert found.chosen in found.methods
        return str(found)

    (table,) = set(run_ranks(4, body))
    assert capsys.readouterr().out == f"{table}\n"
    assert "32,768 tokens on 2 x 2 ranks, 32:8 heads of 128" in table
    assert "assumed: ring: H200, NVLink 4, 330 GB/s; ulysses: H200, NVLink 4, 330 GB/s" in table


def test_a_process_group_of_gpus_is_measured_as_a_mesh_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api._torch, "uses_nccl", lambda group, device: device.type == "cuda")
    measured = Cluster(H200, (tier(1, 123e9),))
    monkeypatch.setattr(api, "cluster_of", lambda ranks, device, itemsize: measured)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    (found,) = run_ranks(1, lambda rank: explain(dist.group.WORLD, seq_len=4096, q_heads=8, quiet=True))
    assert found.assumption == "measured: GPU; the group: 123 GB/s, shared memory"


def test_explain_of_a_group_with_other_hardware_and_dtypes() -> None:
    call: dict[str, Any] = {"names": (), "seq_len": (32768, 65536), "is_causal": False}
    usual = explained(2, **call)
    assert set(usual.methods) == {"ring", "ulysses"}
    assert "over the group" in str(usual)
    forward = usual.methods["ring"].forward
    slow = dataclasses.replace(H200, link_speed=1e9)
    assert explained(2, **call, hardware=slow).methods["ring"].forward > forward
    assert explained(2, **call, dtype=torch.float32).methods["ring"].forward > 15 * forward


def test_explain_assumes_a_network_between_nodes_of_eight() -> None:
    """No shared memory across a network: K/V of its ring come by collectives."""
    call: dict[str, Any] = {"seq_len": 32768, "q_heads": 32, "kv_heads": 8}
    default = explained(2, 8, **call)
    flat = explained(16, names=("cp",), **call, hardware="h100")
    named = explained(2, 8, **call, hardware={"ring": "h200, ethernet 100g", "ulysses": "H200"})
    assert default.assumption == "assumed: ring: H200, InfiniBand NDR, 36.7 GB/s; ulysses: H200, NVLink 4, 330 GB/s"
    assert flat.assumption == ("assumed: cp: hosts of 8 H100, NVLink 4, and InfiniBand NDR, 36.7 GB/s, between them")
    assert set(flat.methods) == {"split ring", "split hybrid", "ring", "ulysses"}
    assert flat.methods["split ring"].outer_bytes < flat.methods["ring"].outer_bytes / 4
    assert "split: over two axes" in str(flat)
    assert "ring: H200, Ethernet 100G, 9.17 GB/s; ulysses: H200, NVLink 4, 330 GB/s" in named.assumption
    for found in (default, named):
        assert found.methods["hybrid"].transport in ("allgather", "alltoall")
        assert found.methods["ring"].transport == "symm_mem"  # of the inner rings
    assert flat.methods["ring"].transport != "symm_mem"
    assert named.methods["hybrid"].forward > default.methods["hybrid"].forward


def test_an_axis_of_one_rank_counts_as_none() -> None:
    for sizes, name in (((1, 4), "ulysses"), ((4, 1), "ring")):
        found = explained(*sizes)
        assert found.axes == (name,)
        assert set(found.methods) == {"ring", "ulysses"}
        assert "65,536 tokens on 4 ranks" in str(found)
    both = explained(1, 2, hardware={"ring": "H100, Ethernet 100G", "ulysses": "H100"})
    assert both == explained(1, 2, hardware={"ulysses": "H100"})
    assert both.assumption == "assumed: ulysses: H100, NVLink 4, 330 GB/s"
    assert "tokens on 1 rank, " in str(explained(1, names=()))


def test_explain_of_a_mask() -> None:
    """What is hidden takes no time; a mask is causal too if asked for; a causal mask is what is_causal says."""
    documents = Documents([*range(0, 65536, 500), 65536])
    options: dict[str, Any] = {
        "causal": {}, "causal mask": {"mask": Causal()}, "full": {"is_causal": False}, "documents": {"mask": documents},
        "causal documents": {"mask": documents, "is_causal": True},
        "made for them": {"mask": documents, "layout": Balanced(documents, 65536)},
        "many pieces": {"layout": PerDocument(documents.cu_seqlens)},
    }  # fmt: skip
    found = {name: explained(2, names=(), q_heads=64, **each) for name, each in options.items()}
    assert found["causal"].methods == found["causal mask"].methods
    # By row, so few launches: of shapes there would be thousands.
    assert found["many pieces"].methods["ring"].forward < 2 * found["causal"].methods["ring"].forward
    seconds = {name: each.methods["ring"].forward for name, each in found.items()}
    assert seconds["causal documents"] < seconds["documents"] < seconds["causal"] / 10 < seconds["full"] / 15
    received = {name: each.methods["ring"].outer_bytes for name, each in found.items()}
    assert 0 < received["made for them"] < received["documents"] < received["causal"]
    assert "batch 1, Documents(...) (0.8% of all pairs), torch.bfloat16, HeadTail()" in str(found["documents"])
    assert "batch 1, causal, torch.bfloat16, HeadTail()" in str(found["causal mask"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hardware": "V100"}, ValueError, "expected hardware to be a GPU, one of A100, H100, .* got 'V100'"),
        ({"hardware": "H100, string"}, ValueError, "one of NVLink 3, .* got 'H100, string'"),
        ({"hardware": {"ring": "H100"}}, ValueError, "of each mesh axis, ring, ulysses; got that of ring"),
        (
            {"hardware": dict.fromkeys(("ring", "ulysses", "cp"), "H100")}, ValueError, "got that of ring, ulysses, cp"
        ),
        ({"hardware": 620e12}, TypeError, "to be a Hardware, the name of one, or a mapping to these, got 6"),
        ({"q_heads": 0}, ValueError, "expected q_heads to be an integer >= 1, got 0"),
        ({"q_heads": 6, "kv_heads": 4}, ValueError, "q_heads to be a multiple of kv_heads, got 6 and 4"),
        ({"head_dim": 1.5}, ValueError, r"expected head_dim to be an integer >= 1, got 1\.5"),
        ({"v_head_dim": -1}, ValueError, "expected v_head_dim to be an integer >= 1, got -1"),
        ({"v_head_dim": 0}, ValueError, "expected v_head_dim to be an integer >= 1, got 0"),
        ({"seq_len": -1}, ValueError, "expected seq_len to be a length >= 0"),
        ({"seq_len": 8, "mask": Documents([0, 9])}, ValueError, "the documents of a mask end at 9"),
        ({"mask": Batched([Causal(), Full()])}, ValueError, "the mask is of 2 batch rows, got a batch of 1"),
        ({"dtype": "bfloat16"}, TypeError, "expected dtype to be a floating torch.dtype, got 'bfloat16'"),
        ({"dtype": torch.int8}, TypeError, "expected dtype to be a floating torch.dtype, got torch.int8"),
        ({"head_dim": 192, "latent_dims": (512, 192)}, ValueError, "0 < Dr < head_dim, 192; got"),
        ({"latent_dims": 512}, ValueError, "got 512"),
        ({"latent_dims": (0, 64)}, ValueError, r"got \(0, 64\)"),
        ({"latent_dims": (512, 64), "kv_heads": 4}, ValueError, "kv_heads to be None for latents; got 4"),
    ],
    ids=str,
)  # fmt: skip
def test_explain_refuses_what_is_no_call(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        explained(2, 2, **options)
