"""Who is measured: one GPU as the ideal, every rotation of this library, torch's own context parallel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor._torch import experimental_context_parallel_settings
from cp_dtensor.api.functional import context_parallel_attention
from cp_dtensor.comm import symm_mem_workspace as workspace
from cp_dtensor.comm.collective import AllGather, AllToAll
from cp_dtensor.comm.select import ROTATE_METHODS, TRANSPORTS
from cp_dtensor.engine.cost_model import estimates, fastest
from cp_dtensor.engine.planner import axes_of
from cp_dtensor.engine.validation import Mesh, sequence_ranks
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.tools.bench.baseline import Baseline
from cp_dtensor.tools.bench.cases import LAYOUTS, Case
from cp_dtensor.tools.bench.flex import flex_baselines
from cp_dtensor.tools.bench.inputs import ByLayout
from cp_dtensor.tools.bench.rows import OURS_PREFIX, TORCH_PREFIX
from cp_dtensor.tools.bench.single_device import backend_of, sdpa, single_devices
from cp_dtensor.tools.bench.varlen import varlen_baselines
from cp_dtensor.tools.bench.work import Attention

GRAPH_SUFFIX = " graph"
COMPILED_SUFFIX = " compiled"
_TORCH_TRANSPORTS = ("allgather", "alltoall")


@dataclass(frozen=True)
class Way:
    """How our library splits the work."""

    method: str
    rotate_method: str = "auto"
    ulysses_degree: int | None = None
    """Ranks of the inner axis; None: there is one axis."""
    layout: str | None = None
    """None: that of the case."""


_WAYS = {
    **{name: Way("ring", name) for name in TRANSPORTS},
    "ulysses": Way("ulysses"),
    "hybrid-2": Way("hybrid", ulysses_degree=2),
    "hybrid-4": Way("hybrid", ulysses_degree=4),
    "two-level-2": Way("ring", ulysses_degree=2),
    "two-level-4": Way("ring", ulysses_degree=4),
    "auto": Way("auto"),
}


def baselines_by_name(
    names: Sequence[str] | None, *, graph: bool = False, compiled: bool = False
) -> tuple[Baseline, ...]:
    """The baselines of these names, in their order of appearance; ours also compiled and as graphs.

    None: all who take part without having been asked to.

    Raises:
        ValueError: nobody is called so.
    """
    known = {baseline.name: baseline for baseline in _all_baselines()}
    if unknown := [name for name in names or () if name not in known]:
        listed = [name for name, each in known.items() if each.by_default or not name.startswith(OURS_PREFIX)]
        with_layout = f"ours also with a layout, such as '{OURS_PREFIX}auto Balanced'"
        raise ValueError(f"unknown baseline {unknown[0]!r}: expected some of {', '.join(listed)}; {with_layout}")
    chosen = [each for name, each in known.items() if (each.by_default if names is None else name in names)]
    result = []
    for baseline in chosen:
        result.append(baseline)
        if not baseline.name.startswith(OURS_PREFIX):
            continue
        if compiled:
            attention = partial(_compiled, baseline.attention)
            result.append(dataclasses.replace(baseline, name=baseline.name + COMPILED_SUFFIX, attention=attention))
        if graph:
            result.append(dataclasses.replace(baseline, name=baseline.name + GRAPH_SUFFIX, captured=True))
    return tuple(result)


def _all_baselines() -> list[Baseline]:
    ways = list(_WAYS.items())
    for layout in LAYOUTS:
        ways += [(f"{name} {layout}", dataclasses.replace(way, layout=layout)) for name, way in _WAYS.items()]
    ours = [
        Baseline(
            OURS_PREFIX + name, partial(_ours, way), partial(_our_refusal, way), partial(_our_workspace, way),
            shards=ByLayout(way.layout), by_default=way.layout is None, predicted_ms=partial(_predicted_ms, way),
        )
        for name, way in ways
    ]  # fmt: skip
    # With q, k, v and grad_out as models have them, its backward with cuDNN fails on all ranks but the last: out is
    # contiguous wherever half of it was merged, and halves of differing strides trip an assertion.
    theirs = [
        Baseline(
            TORCH_PREFIX + name, partial(_torchs, name), _torch_refusal, suits=lambda case: case.is_plain,
            contiguous=True, may_expand_kv=True,
        )
        for name in _TORCH_TRANSPORTS
    ]  # fmt: skip
    alone, gathered = varlen_baselines()
    return [*single_devices(), alone, *ours, *theirs, gathered, *flex_baselines()]


@contextmanager
def _ours(way: Way, case: Case, device: torch.device) -> Iterator[Attention]:
    mesh = _mesh(way.ulysses_degree, device.type)
    mask, layout = case.mask_value, case.layout_value(way.layout)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = context_parallel_attention(
            q, k, v, mesh=mesh, method=way.method, mask=mask, enable_gqa=case.enable_gqa, layout=layout,
            rotate_method=way.rotate_method, seq_len=case.seq_len,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    # Unless told, the library chooses by itself.
    with nullcontext() if case.backend == "auto" else backend_of(case, device):
        yield attention


@cache
def _mesh(ulysses_degree: int | None, device_type: str) -> Mesh:
    """All ranks on one axis, or some of them on an inner one."""
    group = dist.group.WORLD
    assert group is not None
    if ulysses_degree is None:
        return group
    shape = (group.size() // ulysses_degree, ulysses_degree)
    return init_device_mesh(device_type, shape, mesh_dim_names=("ring", "ulysses"))


def _our_refusal(way: Way, case: Case, world_size: int) -> str | None:
    degree = way.ulysses_degree
    if degree is not None and (world_size % degree or degree >= world_size):
        return f"{world_size} ranks are no mesh of several times {degree}"
    try:
        case.layout_value(way.layout)
    except ValueError as error:
        return str(error)
    return None


@contextmanager
def _compiled(
    eager: Callable[[Case, torch.device], AbstractContextManager[Attention]], case: Case, device: torch.device
) -> Iterator[Attention]:
    with eager(case, device) as attention:
        yield torch.compile(attention, fullgraph=True)


@contextmanager
def _torchs(rotate_method: str, case: Case, device: torch.device) -> Iterator[Attention]:
    from torch.distributed.tensor.experimental import context_parallel  # takes a second, and only we need it

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # It wants a buffer to shard, from whose length it sees whether the load can be balanced.
    buffer = torch.zeros(case.seq_len, device=device)
    balanced = case.mask == "causal" and case.layout == "HeadTail"
    with backend_of(case, device), experimental_context_parallel_settings(rotate_method, load_balance=balanced):
        context = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])
        context.__enter__()
        try:
            yield partial(sdpa, case)
        finally:
            # Told of an error, the context of some versions leaves SDPA patched.
            context.__exit__(None, None, None)


def _torch_refusal(case: Case, world_size: int) -> str | None:
    if case.mask == "causal" and case.layout not in ("HeadTail", "Contiguous"):
        return f"torch has no layout like {case.layout}"
    pieces = 2 * world_size if case.layout == "HeadTail" else world_size
    if case.seq_len % pieces:
        return f"the length is not a multiple of {pieces}"
    return None


def _predicted_ms(way: Way, case: Case, pass_name: str, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    ranks = sequence_ranks(_mesh(way.ulysses_degree, device.type))
    itemsize = getattr(torch, case.dtype).itemsize
    shape = CallSpec(
        LayoutPartition(case.layout_value(way.layout), case.seq_len, case.seq_len, case.batch, ranks.size),
        case.mask_value, case.batch, case.heads.q, case.heads.kv, case.head_dim, case.head_dim, case.dtype,
        Masking.BY_SHAPE if case.is_plain else Masking.INTERVALS,
    )  # fmt: skip
    outer, inner = axes_of(ranks, device, itemsize)
    found = estimates(shape, outer, inner, ROTATE_METHODS[way.rotate_method])
    estimate = found[fastest(found) if way.method == "auto" else way.method]
    return 1e3 * (estimate.seconds if pass_name == "fwdbwd" else estimate.forward)


def _our_workspace(way: Way, device: torch.device) -> int:
    """Symmetric memory, which torch's allocator does not count. It is kept from call to call, shared by all calls."""
    if way.method == "ring" and way.rotate_method in (
        AllGather().name,
        AllToAll().name,
    ):  # never use it, though others may have left some
        return 0
    return workspace.allocated_bytes(device)
