"""`python -m cp_dtensor plan`: clusters that are not there, ways to compute on them, timelines, and what to paste."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cp_dtensor import Cluster, Contiguous, HeadTail
from cp_dtensor.__main__ import main
from cp_dtensor.engine.choose import attention_bytes
from cp_dtensor.plan.cluster import PACKAGE_KERNELS
from cp_dtensor.tools.cases import Case, Heads
from cp_dtensor.tools.plan import Planned, chosen, drawn, load_cluster, save_cluster, snippet, spec_of, timeline, ways

HEADS = Heads(32, 8)
TWO_NODES = Cluster("H100", nodes=2)


def by_method(cluster: Cluster, tokens: int = 131072) -> dict[str, Planned]:
    return {each.method: each for each in ways(cluster, Case(tokens, HEADS), ["HeadTail"])}


def test_a_cluster_is_gpus_and_tiers() -> None:
    """NVLink within 8 GPUs (72 of an NVL72), a port of the network for each of them, shared if it is oversubscribed."""
    pods = Cluster("GB200", nodes=4, internode="XDR800", oversubscription=4)
    assert [(tier.ranks, tier.shares_memory) for tier in pods.tiers] == [(72, True), (4, False)]
    assert pods.tiers[1].speed == pytest.approx(100e9 * 330 / 450 / 4)
    assert pods.ranks == 288
    assert [part and [tier.ranks for tier in part.tiers] for part in map(pods.part, (1, 36, 72, 100, 144, 360))] == [
        [1], [36], [72], None, [72, 2], None,
    ]  # fmt: skip
    assert [tier.ranks for tier in Cluster("A100", gpus_per_node=1, nodes=3).tiers] == [3]
    fast, usual = Cluster("H200", packages=True).gpu, Cluster("H200").gpu
    assert fast.flops / usual.flops == pytest.approx(675 / 590)
    assert fast.kernels == PACKAGE_KERNELS
    own = replace(usual, link_speed=1e11, shares_memory=False)
    assert [(tier.ranks, tier.speed) for tier in Cluster(own, nodes=1).tiers] == [(8, 1e11)]
    with pytest.raises(ValueError, match="of at least 1, got 8, 0, 1 and 1"):
        Cluster("H100", nodes=0)
    with pytest.raises(ValueError, match="got 'H100, Token Ring'"):
        Cluster("H100", nodes=2, internode="Token Ring")


def test_ways_have_the_bytes_of_their_plans() -> None:
    found = by_method(TWO_NODES)
    assert [*found] == ["nested ring", "hybrid", "ring", "ulysses"]
    spec = spec_of(Case(131072, HEADS), HeadTail(), 16)
    for label, method in (("hybrid", "hybrid"), ("nested ring", "ring")):
        assert found[label].estimate.bytes_over(1) == pytest.approx(attention_bytes(spec, method, (2, 8))[0], rel=0.25)
    total = found["ring"].estimate.bytes_over(0) + found["ring"].estimate.bytes_over(1)
    assert total == pytest.approx(attention_bytes(spec, "ring", (16,))[0], rel=0.25)
    assert [*by_method(Cluster("H100"))] == ["ring", "ulysses"]


def test_pods_are_a_third_tier(capsys: pytest.CaptureFixture[str]) -> None:
    """The network between them is oversubscribed; K/V enter a pod once."""
    cluster = Cluster("H100", gpus_per_node=4, nodes=2, pods=2, oversubscription=4)
    assert [tier.ranks for tier in cluster.tiers] == [4, 2, 2]
    assert cluster.tiers[1].speed == 4 * cluster.tiers[2].speed
    degrees = {degree: cluster.part(degree) for degree in (2, 8, 12, 16, 32)}
    assert [part and [tier.ranks for tier in part.tiers] for part in degrees.values()] == [
        [2], [4, 2], None, [4, 2, 2], None,
    ]  # fmt: skip
    found, spec = by_method(cluster), spec_of(Case(131072, HEADS), HeadTail(), 16)
    assert [*found] == ["nested ring", "hybrid", "ring", "ulysses"]
    for label, method in (("hybrid", "hybrid"), ("nested ring", "ring")):
        over = [found[label].estimate.bytes_over(tier) for tier in (2, 1)]
        assert over == pytest.approx(attention_bytes(spec, method, (2, 2, 4))[:2], rel=0.25)
    flat = [found["ring"].estimate.bytes_over(tier) for tier in range(3)]
    assert sum(flat) == pytest.approx(attention_bytes(spec, "ring", (16,))[0], rel=0.25)
    # Queries and out come from 3 ranks of the node, 4 of the other one and 8 of the other pod.
    by_heads = [found["ulysses"].estimate.bytes_over(tier) for tier in range(3)]
    assert [size / by_heads[2] for size in by_heads] == pytest.approx([3 / 8, 4 / 8, 1])
    main(["plan", "--gpus-per-node", "4", "--nodes", "2", "--pods", "2", "--seq-len", "128k", "--degrees", "16"])
    text = capsys.readouterr().out
    assert "\nbetween pods " in text
    assert 'mesh_dim_names=("ring_pods", "ring", "ulysses"))["ring_pods", "ring", "ulysses"]' in text


def test_what_is_exposed_is_what_links_add() -> None:
    """A slower network exposes more; computation stays, but for another rank that may be the slowest."""
    slow = by_method(Cluster("H100", nodes=2, internode="Ethernet 25G"))
    for method, each in by_method(TWO_NODES).items():
        if each.transport == slow[method].transport:
            assert each.computing == pytest.approx(slow[method].computing, rel=0.02)
        assert each.exposed < slow[method].exposed
        assert each.computing + each.exposed == pytest.approx(each.estimate.seconds)
        assert slow[method].transferring(1) > 10 * each.transferring(1)


def test_documents_are_planned_in_the_layout_that_is_balanced_for_them() -> None:
    node = Cluster("H100")
    found = ways(node, Case(131072, HEADS, "documents 2048"), ["HeadTail", "Balanced"])
    best = chosen(found, node)
    assert best.layout == "Balanced"
    assert best.imbalance < 0.05 < next(each for each in found if each.layout == "HeadTail").imbalance
    assert best.estimate.seconds < min(each.estimate.seconds for each in found if each.layout == "HeadTail")


@pytest.mark.parametrize("method", ["nested ring", "ring", "ulysses"])
def test_the_timeline_is_that_of_the_prediction(method: str) -> None:
    """What is busy is busy once, ends with the prediction, and takes as long as computation and transfers do."""
    planned = by_method(Cluster("H100", nodes=2, internode="Ethernet 100G"))[method]
    spans, whole = drawn(planned)
    assert whole == pytest.approx(planned.estimate.seconds)
    for lane in (None, 0, 1):
        of_lane = sorted((start, stop) for tier, start, stop in spans if tier == lane)
        assert all(stop <= later + 1e-9 for (_, stop), (later, _) in pairwise(of_lane))
        assert all(0 <= start <= stop <= whole * (1 + 1e-9) for start, stop in of_lane)
        busy = sum(stop - start for start, stop in of_lane)
        if lane is not None:
            assert planned.transferring(lane) < busy < planned.transferring(lane) * 1.5 + 2e-3
    heading, *lines = timeline(planned).splitlines()
    assert heading.index("|backward") == 14 + int(planned.estimate.forward / whole * 96)
    assert [line[:14].strip() for line in lines] == ["GPU", "in a node", "between nodes"]


def test_snippets_name_the_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    nested, flat = by_method(TWO_NODES)["nested ring"], by_method(TWO_NODES)["ulysses"]
    assert snippet(nested, 64).splitlines()[:2] == [
        'mesh = init_device_mesh("cuda", (4, 2, 8), mesh_dim_names=("dp", "ring", "ulysses"))["ring", "ulysses"]',
        'with context_parallel(mesh, method="ring", layout=HeadTail(), rotate_method="symm_mem", ...):',
    ]
    assert snippet(flat, 16).splitlines()[:2] == [
        'mesh = init_device_mesh("cuda", (16,), mesh_dim_names=("cp",))["cp"]',
        'with context_parallel(mesh, method="ulysses", layout=HeadTail(), ...):',
    ]
    for text in (snippet(nested, 64), snippet(flat, 16)):
        assert text.endswith("[parallelism]  # TorchTitan\ncontext_parallel_degree = 16")


def test_the_command_prints_degrees_ways_reasons_and_a_timeline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "plan.png"
    output = ["-o", str(picture)] * (importlib.util.find_spec("matplotlib") is not None)
    main(["plan", "--gpu", "h100", "--nodes", "2", "--seq-len", "256k", "--heads", "64:8", *output])
    text = capsys.readouterr().out
    assert text.startswith("262,144 tokens, 64:8:128 heads, causal, bfloat16, on 16 GPUs (h100): 8 at 330 GB/s; 2")
    degrees, of_all = text.split("the best way for each number of ranks\n")[1].split("\n16 ranks\n")
    assert [line.split()[0] for line in degrees.splitlines()[1:] if line] == ["1", "2", "4", "8", "16"]
    assert [" ".join(line.split()[2:4]) for line in of_all.splitlines()[1:3]] == ["nested ring", "hybrid allgather"]
    assert "chosen: nested ring, K/V by symm_mem, HeadTail: the first within 30% of the fastest\n" in text
    assert "exposed\n" in text
    assert 'mesh_dim_names=("ring", "ulysses"))["ring", "ulysses"]' in text
    assert not output or picture.read_bytes().startswith(b"\x89PNG")


def test_gpus_that_are_nodes_have_links_between_nodes_only(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--gpus-per-node", "1", "--nodes", "4", "--seq-len", "64k", "--degrees", "4"])
    text = capsys.readouterr().out
    assert "between nodes" in text
    assert "in a node" not in text


def test_measured_clusters_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, other = tmp_path / "cluster.json", tmp_path / "other.json"
    cluster = Cluster("B200", gpus_per_node=4, packages=True)
    save_cluster(cluster, saved)
    assert load_cluster(saved) == cluster
    main(["plan", "--cluster", str(saved), "--nodes", "2", "--seq-len", "64k", "--degrees", "8"])
    assert f"on 8 GPUs ({saved}): 4 at 610 GB/s; 2 at 36.7 GB/s" in capsys.readouterr().out
    main(["plan", "--cluster", str(saved), "--nodes", "2", "--oversubscription", "2", "--degrees", "8"])
    assert "2 at 18.3 GB/s" in capsys.readouterr().out
    save_cluster(TWO_NODES, other)
    for file, options, unread in (
        (saved, "--packages --gpu B200", "--gpu, --packages"),
        (other, "--gpus-per-node 8 --nodes 4 --oversubscription 2", "--gpus-per-node, --nodes, --oversubscription"),
    ):
        with pytest.raises(SystemExit):
            main(["plan", "--cluster", str(file), *options.split(" ")])
        assert f"--cluster {file} has measured what {unread} would assume" in capsys.readouterr().err
    other.write_text('{"gpu": {}}')
    with pytest.raises(ValueError, match=r"other\.json is not a file of `doctor --save`"):
        load_cluster(other)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan --gpu V100", "expected hardware to be a GPU, one of A100"),
        ("plan --internode string --nodes 2", "got 'H100, string'"),
        ("plan --seq-len 1.5M", "expected a number of tokens, such as 8192, 128k or 1M, got '1.5M'"),
        ("plan --degrees 12 --nodes 2", "expected --degrees that divide the GPUs, 2 x 8, into neighbours; got [12]"),
        ("plan --degrees 8 3", "that divide the GPUs, 8, into neighbours; got [8, 3]"),
        ("plan --cluster /no/such/file", "No such file"),
        ("plan --seq-len 64 --mask documents:0,96", "the documents of a mask end at 96"),
        ("doctor --device cpu --save x.json", "--save: expected GPUs whose links can be measured, got none"),
        ("plan --layouts Zigzag", "expected a layout, one of HeadTail"),
        ("plan --seq-len 8k --degrees 1 -o x.word", "--output x.word"),
    ],
)
def test_command_lines_that_are_refused(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(command.split(" "))
    assert message in capsys.readouterr().err


def test_layouts_by_name_are_planned() -> None:
    case = Case(4096, HEADS)
    (found,) = [each for each in ways(TWO_NODES, case, ["Contiguous"]) if each.method == "ulysses"]
    assert found.imbalance > 0.5
    assert spec_of(case, Contiguous(), 16).partition.groups()[0].world_size == 16
