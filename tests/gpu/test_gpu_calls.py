"""A table of calls on several GPUs: against dense attention in float64, in CUDA graphs, and twice with equal bits.

Calls are cases of tests/matrix, whose world `gpu(2)` has every front at one length by the method "auto".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from matrix.features import Case, Tensors, expected
from matrix.fronts import FRONTS
from matrix.worlds import WORLDS, World, check, compare, leaves_of, mesh_of, results_of
from support.gpu_checks import BACKENDS, WAYS, WORLD_SIZE, by, captured, replays
from support.package_kernels import Unwanted
from support.processes import Processes, started
from support.staging import BY_HEAD, in_stages
from torch.nn.attention import sdpa_kernel

from cp_dtensor import (
    Balanced,
    Batched,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    MirroredBatch,
    PrefixLM,
    SlidingWindow,
    Striped,
)
from cp_dtensor.attention.backends import cudnn_flex, select
from cp_dtensor.attention.backends.packages import has_package_kernels
from cp_dtensor.comm import symm_mem_workspace as workspace
from cp_dtensor.comm.head_exchange_symm_mem import obstacle_to_shared_memory
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.engine import latent, planner
from cp_dtensor.spec.model_masks import Keys
from cp_dtensor.tools.parsing import lognormal_documents

pytestmark = pytest.mark.gpu(WORLD_SIZE)
WORLD = WORLDS["gpu(2)"]


@contextmanager
def by_heads(stages: int, shares_memory: bool) -> Iterator[None]:
    """While open, Ulysses exchanges heads in stages, through shared memory or by collectives."""
    found: list[str | None] = []

    def obstacle(*args: Any) -> str | None:
        found.append(obstacle_to_shared_memory(*args) if shares_memory else "not wanted in this test")
        return found[-1]

    with in_stages(stages), mock.patch.object(planner, "obstacle_to_shared_memory", obstacle):
        yield
    assert found
    assert all((each is None) == shares_memory for each in found), found


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """While open, every tile must be computed by this backend, however short; optional ones may not step back."""
    names: set[str] = set()

    def noted(*arguments: Any) -> Any:
        backend = select.choose_backend(*arguments)
        names.add(backend.name)
        return backend

    with (
        mock.patch.object(planner, "choose_backend", noted),
        mock.patch.object(cudnn_flex, "SHORTEST", 1),
        mock.patch.object(cudnn_flex, "_INTERVALS", Unwanted()),
    ):
        yield
    assert names == {name}


SETUPS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "stages": partial(in_stages, 2),
    "transfers head by head": lambda: mock.patch.dict(ROTATE_METHODS, {"symm_mem": SymmetricMemory(BY_HEAD)}),
    "latents head by head": lambda: mock.patch.object(latent, "EXPANDED_BYTES", 1),
    "shared memory": partial(by_heads, 1, True),
    "shared memory in stages": partial(by_heads, 2, True),
    "collectives": partial(by_heads, 1, False),
    "collectives in stages": partial(by_heads, 2, False),
    **{name: partial(sdpa_kernel, backend) for name, backend in BACKENDS.items()},
    **{name: partial(chosen, name) for name in ("FLASH_ATTENTION_4", "EFFICIENT_ATTENTION", "CUDNN_FLEX_ATTENTION")},
}
"""What holds around the calls on a rank, by name."""


def run_cases(rank: int, front: str, cases: list[Case], setup: str = "", world: World = WORLD) -> None:
    """Checks cases on this rank."""
    cases = [FRONTS[front].settle(case, world.size) for case in cases]
    for case in cases:  # by torch's own choice of kernels
        expected(case)
        expected(case, one_device=case.dtype != "float64")
    with SETUPS[setup]():
        for case in cases:
            try:
                check(rank, front, case, world)
            except Exception as error:
                raise AssertionError(f"{front} {case}: {error}") from error


# In float64, within 1e-10. Ranks have few rows, or none.

GPU = Case(device="cuda", enable_gqa=True)
SHAPES = {
    "even": replace(GPU, lengths=(256, 256), heads=(4 * WORLD_SIZE, 2 * WORLD_SIZE), head_dim=32, is_causal=True),
    "uneven": replace(GPU, lengths=(203, 203), batch=1, head_dim=64, is_causal=True),
    "cross": replace(GPU, lengths=(96, 160), heads=(4, 1), head_dim=16),
    "three heads": replace(GPU, lengths=(40, 40), batch=1, heads=(3, 3), is_causal=True),
    "few tokens": replace(GPU, lengths=(3, 1), batch=1, heads=(2, 2), is_causal=True),
}
LAYOUTS: list[Layout] = [Contiguous(), HeadTail(), Striped(1), MirroredBatch()]
METHODS = [
    ("symm_mem", ""), ("symm_mem", "transfers head by head"),
    *(("ulysses", f"{how}{stages}") for how in ("shared memory", "collectives") for stages in ("", " in stages")),
]  # fmt: skip


@pytest.mark.parametrize(("way", "setup"), METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_methods_in_float64(gpus: Processes, shape: str, way: str, setup: str) -> None:
    cases = [by(way, replace(SHAPES[shape], layout=layout)) for layout in LAYOUTS]
    gpus.run(_sharing_memory, cases, setup)


def _sharing_memory(rank: int, cases: list[Case], setup: str) -> None:
    assert workspace.p2p_obstacle(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())) is None
    run_cases(rank, "function", cases, setup)


AXES = World((2, 2), device="cuda", fixture="four_on_two")
DEVICES = (0, 1, 1, 0)
"""Of ranks (0, 0), (0, 1), (1, 0), (1, 1): neighbours on each axis are on different GPUs, if there are two."""
OF_AXES = [
    replace(shape, layout=layout, method=method, transport=transport, seed=seed)
    for seed, shape in enumerate((
        replace(SHAPES["uneven"], batch=2, heads=(8, 4), head_dim=32), replace(SHAPES["cross"], heads=(8, 2)),
        replace(SHAPES["even"], lengths=(64, 64), batch=1, heads=(6, 3), head_dim=8),
    ))
    for layout in LAYOUTS[:3]
    for method, transport in (
        ("hybrid", "symm_mem"), ("hybrid", "alltoall"), ("ring", "symm_mem"), ("ring", "allgather"),
    )
]  # fmt: skip


def _on_axes(rank: int, setup: str) -> None:
    torch.cuda.set_device(DEVICES[rank] % torch.cuda.device_count())
    run_cases(rank, "function", OF_AXES, setup, AXES)


@pytest.fixture(scope="module")
def four_on_two() -> Iterator[Processes]:
    # Neighbours need NCCL between GPUs; "nccl" is gloo where all ranks share one.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() > 1 else "nccl"
    yield from started(AXES.size, timeout=120, backend=backend)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("setup", ["", "stages"])
def test_two_axes_in_float64(four_on_two: Processes, setup: str) -> None:
    four_on_two.run(_on_axes, setup)


# In bfloat16, with at most 1.5 times the error of torch's attention on one GPU.

BF16 = replace(GPU, dtype="bfloat16", lengths=(1237, 1237), heads=(4, 2), head_dim=64)
WINDOW, DOCUMENTS = SlidingWindow(200, 30) & Causal(), lognormal_documents(1237, median=100, sigma=1.0)
BY_ROW = Batched([DOCUMENTS, lognormal_documents(1237, median=30, sigma=1.5, seed=1)])
MASKS: dict[str, Case] = {
    "documents": replace(BF16, mask=DOCUMENTS),
    "documents by batch row": replace(BF16, mask=BY_ROW),
    "empty documents and padding": replace(BF16, mask=Documents([3, 3, 100, 100, 700, 1100, 1100], within=Causal())),
    "window": replace(BF16, mask=WINDOW),
    "window and sinks": replace(BF16, mask=WINDOW, sinks=True),
    "prefix": replace(BF16, mask=PrefixLM(300)),
    "causal or window": replace(BF16, mask=Causal() | SlidingWindow(50, 100)),
    "boolean": replace(BF16, is_causal=True, bias="bool"),
    "additive": replace(BF16, bias="float"),
}


def _masked(rank: int, kind: str, way: str) -> None:
    """Before each call, another one leaves NaN in the memory that it uses again, under another mask."""
    case, mesh, other = MASKS[kind], mesh_of(WORLD), by(way, MASKS["prefix"])
    for layout in (HeadTail(), Contiguous(), Striped(1), Balanced(case.whole_mask, 1237)):
        x, grad_out = leaves_of(other, mesh)
        with torch.no_grad():
            for leaf in x.values():
                leaf.masked_fill_(leaf > 0, float("nan"))
        FRONTS["function"].call(other, mesh, x).backward(grad_out)
        run_cases(rank, "function", [by(way, replace(case, layout=layout))])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MASKS)
def test_masks_in_bfloat16(gpus: Processes, kind: str, way: str) -> None:
    gpus.run(_masked, kind, way)


PLAIN = [
    replace(BF16, lengths=(1024, 1024), heads=(8, 2), is_causal=True),
    replace(BF16, lengths=(1024, 1024), heads=(8, 2)),
    replace(BF16, lengths=(1001, 1001), heads=(8, 2), is_causal=True),
    replace(BF16, lengths=(997, 997), heads=(8, 2)),
    replace(BF16, is_causal=True, sinks=True),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_backends_in_bfloat16(gpus: Processes, backend: str, way: str) -> None:
    gpus.run(run_cases, "function", [by(way, case) for case in PLAIN], backend)


@dataclass(frozen=True)
class DeepSeek(Case):
    """Latents with the dims of DeepSeek-V3."""

    @property
    def latent_dims(self) -> tuple[int, int, int]:
        return 64, 128, 512


LATENT = DeepSeek(
    device="cuda", dtype="bfloat16", lengths=(1237, 1237), batch=1, head_dim=128, latent=True, is_causal=True,
    scale=(128 * 512) ** -0.5,
)  # fmt: skip
LATENTS = [LATENT, replace(LATENT, is_causal=False, mask=Documents([0, 500, 700, 1237], within=Causal()))]


@pytest.mark.parametrize("way", [*WAYS, "auto"])
@pytest.mark.parametrize("setup", ["", "latents head by head"])
def test_latents_in_bfloat16(gpus: Processes, setup: str, way: str) -> None:
    gpus.run(run_cases, "mla", [by(way, case) for case in LATENTS], setup)


PACKED = [
    replace(
        BF16, lengths=(515, 515), heads=(8, 2), seed=seed,
        mask=Batched([Documents(edges, within=within) for edges in ([0, 100, 100, 400, 515], [0, 1 + seed, 515])]),
    )
    for seed, within in enumerate((Full(), Causal(), SlidingWindow(64, 0)))
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_varlen_attn_in_bfloat16(gpus: Processes, way: str) -> None:
    gpus.run(run_cases, "varlen_attn", [by(way, case) for case in PACKED])


# Kernels of optional packages


@dataclass(frozen=True)
class TwoHeadDims(Case):
    """Head dim 192 of queries and keys, 128 of values."""

    def draw(self) -> Tensors:
        drawn = super().draw()
        return {**drawn, "v": drawn["v"][..., :128], "grad_out": drawn["grad_out"][..., :128]}


class Kernel(NamedTuple):
    """A call, and the name of the backend that must compute it."""

    case: Case
    backend: str


OF_PACKAGE = replace(BF16, lengths=(2125, 2125), batch=1, heads=(8, 2), head_dim=128)
OF_2125 = lognormal_documents(2125, median=300, sigma=1.0)
SEVERAL = Causal() & (SlidingWindow(300, 0) | Keys(((0, 64),)))
KERNELS = {
    "causal": Kernel(replace(OF_PACKAGE, is_causal=True), "FLASH_ATTENTION_4"),
    "deterministic": Kernel(replace(OF_PACKAGE, is_causal=True, deterministic=True), "FLASH_ATTENTION_4"),
    "two head dims": Kernel(
        TwoHeadDims(**{**vars(OF_PACKAGE), "heads": (4, 4), "head_dim": 192, "layout": Contiguous()}),
        "FLASH_ATTENTION_4",
    ),
    "head dim 512": Kernel(replace(OF_PACKAGE, is_causal=True, head_dim=512), "EFFICIENT_ATTENTION"),
    "documents": Kernel(replace(OF_PACKAGE, mask=OF_2125), "CUDNN_FLEX_ATTENTION"),
    "balanced": Kernel(replace(OF_PACKAGE, mask=OF_2125, layout=Balanced(OF_2125, 2125)), "CUDNN_FLEX_ATTENTION"),
    "window": Kernel(
        replace(OF_PACKAGE, mask=SlidingWindow(300, 20), layout=Contiguous()), "CUDNN_FLEX_ATTENTION"
    ),
    "several intervals": Kernel(replace(OF_PACKAGE, mask=SEVERAL), "CUDNN_FLEX_ATTENTION"),
}  # fmt: skip


@pytest.mark.skipif(
    not (torch.cuda.is_available() and has_package_kernels(torch.cuda.get_device_capability()))
    or not all(package.version for package in select.PACKAGES),
    reason="needs the packages of cp_dtensor[kernels] and Hopper or datacenter Blackwell GPUs",
)
@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_of_packages(gpus: Processes, kind: str) -> None:
    case, backend = KERNELS[kind]
    gpus.run(run_cases, "function", [replace(case, method="ring")], backend)


# Equal bits


def _differing(rank: int, front: str, case: Case, is_global: bool) -> list[str]:
    """Returns the results that differ when a call is repeated, with random delays on random ranks."""
    case, draw, found = FRONTS[front].settle(case, WORLD.size), random.Random(rank), []
    mesh, first = mesh_of(WORLD), dict[str, torch.Tensor]()
    torch.use_deterministic_algorithms(is_global)
    try:
        for _ in range(4):
            torch.manual_seed(3)  # of which the seed of dropout is drawn
            torch.cuda._sleep(draw.randrange(1_000_000))
            results = results_of(FRONTS[front], replace(case, deterministic=not is_global), mesh)
            first = first or results
            found += [name for name in results if not torch.equal(results[name], first[name])]
            assert torch.are_deterministic_algorithms_enabled() == is_global
    finally:
        torch.use_deterministic_algorithms(False)
    return found


REPEATED = {
    "causal": replace(BF16, is_causal=True),
    "wide": replace(BF16, is_causal=True, lengths=(2048, 2048), heads=(4 * WORLD_SIZE,) * 2, head_dim=128),
    "documents": replace(BF16, mask=DOCUMENTS),
    "dropout": replace(BF16, mask=WINDOW, dropout_p=0.3),
}


@pytest.mark.parametrize("is_global", [False, True], ids=["this call", "torch's algorithms"])
@pytest.mark.parametrize(
    ("front", "kind", "way"),
    [*(("function", kind, way) for kind in REPEATED for way in WAYS), ("zigzag", "wide", "auto")],
)
def test_bits_are_equal_on_demand(gpus: Processes, front: str, kind: str, way: str, is_global: bool) -> None:
    for differing in gpus.run(_differing, front, by(way, REPEATED[kind]), is_global):
        assert not differing, differing


# CUDA graphs


def _graph(rank: int, front: str, case: Case, stages: int = 0) -> None:
    """Replays a captured forward and backward with new inputs; what is not of these inputs is no matter of rounding."""
    usual = replace(FRONTS[front], slack=4.0)
    x, grad_out = leaves_of(case, mesh := mesh_of(WORLD))
    inputs, names = [*(each.detach() for each in x.values()), grad_out], [*x]

    def call() -> tuple[torch.Tensor, ...]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in zip(names, inputs, strict=False)}
        out = usual.call(case, mesh, leaves)
        out.backward(inputs[-1])
        return out.detach(), *(leaf.grad for leaf in leaves.values())

    def draw(seed: int) -> list[torch.Tensor]:
        drawn, grad_out = leaves_of(replace(case, seed=seed), mesh)
        return [*(each.detach() for each in drawn.values()), grad_out]

    with in_stages(stages) if stages else nullcontext():
        for seed, results in replays(rank, call, inputs, draw):
            compare(replace(case, seed=seed), mesh, dict(zip(["out", *names], results, strict=True)), usual)


CAPTURED = {
    "causal": ("function", replace(BF16, is_causal=True, lengths=(512, 512))),
    "documents": ("function", MASKS["documents"]),
    "sinks": ("function", replace(BF16, is_causal=True, sinks=True)),
    "latents": ("mla", LATENT),
    "in stages": ("function", by("ulysses", replace(BF16, heads=(8 * WORLD_SIZE, 4 * WORLD_SIZE), is_causal=True))),
}


@pytest.mark.parametrize("way", captured([*WAYS, "ring"]))
@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_captured_calls_take_fresh_inputs(gpus: Processes, kind: str, way: str) -> None:
    front, case = CAPTURED[kind]
    gpus.run(_graph, front, by(way, case))


@pytest.mark.parametrize("way", captured(["allgather", "ulysses"]))
@pytest.mark.parametrize("kind", ["sinks", "latents"])
def test_captured_calls_take_fresh_sinks_and_weights(gpus: Processes, kind: str, way: str) -> None:
    front, case = CAPTURED[kind]
    gpus.run(_graph, front, by(way, case))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_captured_stages_take_fresh_inputs(gpus: Processes, stages: int) -> None:
    gpus.run(_graph, *CAPTURED["in stages"], stages)
