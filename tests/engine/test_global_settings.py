"""The user's settings of torch and Python: they change no result, and the library does not change them."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from support.compile_checks import Shards, causal, compiled, fresh
from support.packed_documents import equal_generators
from support.processes import Processes
from support.ranks import run_ranks
from support.settings_calls import CALLS, check_call
from support.settings_state import cold_caches
from support.shards import CAUSAL
from support.shards import Shards as OfCausal
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cp_dtensor import (
    Balanced,
    Causal,
    ContextParallel,
    Documents,
    HeadTail,
    PerDocument,
    SlidingWindow,
    _torch,
    context_parallel,
    context_parallel_attention,
    explain,
    imbalance,
    local_positions,
)

T = TypeVar("T")
Settings = Sequence[Callable[[], AbstractContextManager[object]]]


class Functions(TorchFunctionMode):
    """A user's own, which sees every call and every tensor that is made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Likewise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def changed(get: Callable[[], T], change: Callable[[T], object], to: T) -> Iterator[None]:
    before = get()
    change(to)
    try:
        yield
    finally:
        change(before)


default_dtype = partial(changed, torch.get_default_dtype, torch.set_default_dtype)
threads = partial(changed, torch.get_num_threads, torch.set_num_threads)
default_device: Any = partial(changed, lambda: None, torch.set_default_device)
# It fills uninitialized memory, too.
deterministic = partial(changed, lambda: False, torch.use_deterministic_algorithms, True)


class Ambient(NamedTuple):
    """Settings that are on at the same time."""

    of_thread: Settings = ()
    """Entered by each rank."""
    of_process: Settings = ()
    training: bool = True
    """Whether the first call, under the settings, has a backward."""
    without: frozenset[str] = frozenset()
    """Calls that are not tried so."""

    def entered(self) -> AbstractContextManager[object]:
        """Those of the thread."""
        return _entered(self.of_thread)


def _entered(settings: Settings) -> AbstractContextManager[object]:
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting())
        return stack.pop_all()


copies = partial(saved_tensors_hooks, torch.clone, torch.clone)
profiler = partial(torch.profiler.profile, activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
AMBIENT = {
    # What forgets its device is on "meta" then, which has no values.
    "default device and dtype": Ambient((partial(default_device, "meta"),), (partial(default_dtype, torch.bfloat16),)),
    "inference first": Ambient((torch.inference_mode,), training=False),
    "no gradients first": Ambient((torch.no_grad,), training=False),
    "modes": Ambient((Functions, Operators), (partial(default_dtype, torch.float64),)),
    # It follows modules (usp is one, too) by hooks of the process, and ranks are threads here.
    "collectives counted": Ambient(
        (CommDebugMode, save_on_cpu), (deterministic,), without=frozenset({"module", "usp"})
    ),
    # The check for NaN has no sharding strategy for DTensors.
    "autograd": Ambient(
        (partial(torch.autograd.set_multithreading_enabled, False), copies),
        (torch.autograd.detect_anomaly, partial(threads, 2)),
        without=frozenset({"dtensor", "dtensor_sdpa"}),
    ),
    "autocast": Ambient((partial(torch.autocast, "cpu", torch.bfloat16),)),
    # It is slow where several threads use it.
    "operators counted": Ambient(
        (partial(FlopCounterMode, display=False),),
        (profiler,),
        without=frozenset(CALLS) - {"ring", "everything", "context", "dtensor_sdpa"},
    ),
}
CASES = [(ambient, name) for ambient, settings in AMBIENT.items() for name in CALLS if name not in settings.without]


@pytest.mark.parametrize(("ambient", "name"), CASES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_attention(ambient: str, name: str) -> None:
    settings = AMBIENT[ambient]
    drawn_before = torch.get_rng_state()
    with _entered(settings.of_process):
        check_call(name, settings.entered, settings.training)
    assert torch.equal(torch.get_rng_state(), drawn_before), "random numbers without dropout"


@pytest.mark.parametrize("ambient", ["default device and dtype", "modes", "collectives counted"])
def test_dropout_is_the_same(ambient: str) -> None:
    leaves = [torch.randn(1, 2, 8, 8, dtype=torch.float64) for _ in range(3)]

    def body(rank: int, settings: Ambient) -> list[torch.Tensor]:
        q, k, v = ((leaf + rank).requires_grad_() for leaf in leaves)
        with settings.entered():
            out = context_parallel_attention(
                q, k, v, mesh=dist.group.WORLD, dropout_p=0.5, mask=SlidingWindow(4, 1), layout=HeadTail()
            )
            out.backward(v)
        return [out.detach(), q.grad, k.grad, v.grad]

    with equal_generators():
        expected = run_ranks(2, body, Ambient())
        cold_caches()
        with _entered(AMBIENT[ambient].of_process):
            results = run_ranks(2, body, AMBIENT[ambient])
    for got, wanted in zip(results, expected, strict=True):
        assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("ambient", ["default device and dtype", "inference first", "modes"])
def test_plans_and_predictions(ambient: str) -> None:
    documents = Documents([0, 5, 64, 200], within=Causal())

    def body(rank: int, settings: Ambient) -> list[object]:
        with settings.entered():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
            predicted = explain(mesh, seq_len=4096, q_heads=8, kv_heads=2)
            layouts = Balanced(documents, 200), PerDocument([0, 5, 64, 200])
            assert local_positions(mesh, 200).device == torch.get_default_device()
            owned = [local_positions(mesh, 200, layout, device="cpu").tolist() for layout in layouts]
            return [str(predicted), owned, *(imbalance(layout, documents, 200, 4) for layout in layouts)]

    expected = run_ranks(4, body, Ambient())
    cold_caches()
    with _entered(AMBIENT[ambient].of_process):
        assert run_ranks(4, body, AMBIENT[ambient]) == expected


def test_what_is_kept_is_made_out_of_reach_of_modes() -> None:
    class Zeros(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return torch.zeros_like(func(*args, **(kwargs or {})))

    with default_device("meta"), Zeros(), Operators(), torch.inference_mode():
        kept = _torch.prepared(lambda: torch.arange(3))
    assert kept.tolist() == [0, 1, 2]
    assert not kept.is_inference()


def compile_under_settings(rank: int) -> None:
    fresh()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return context_parallel_attention(q * 2.0, k, v, mesh=mesh, mask=Causal(), enable_gqa=True) * 3.0

    shards, results = Shards(rank), []
    inputs = [shards.inputs() for _ in range(3)]
    with default_dtype(torch.bfloat16), default_device("meta"):
        for leaves, body, arounds in (
            (inputs[0], function, ()),
            (inputs[1], causal, (context_parallel(mesh, mask=Causal()),)),
            (inputs[2], causal, (context_parallel(mesh, mask=Causal()), Functions())),
        ):
            with _entered([lambda each=each: each for each in arounds]):  # type: ignore[misc]
                out = compiled(body)(*leaves)
                results.append((out, *torch.autograd.grad(out, leaves, shards.grad)))
    for result in results:
        shards.check_results(*result)
    with context_parallel(mesh):
        shards.check(compiled(causal))


class Attention(torch.nn.Module):
    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)


def count_in_module(rank: int) -> None:
    style = ContextParallel(seq_len=CAUSAL.q_len)
    module = parallelize_module(Attention(), init_device_mesh("cpu", (2,)), style)
    with CommDebugMode() as counted:
        OfCausal(rank).check(module)
    assert counted.get_total_counts()


@pytest.mark.parametrize("body", [compile_under_settings, count_in_module])
def test_in_processes(body: Callable[[int], None], two_processes: Processes) -> None:
    """Compiled code, and collectives of modules, which a mode counts by hooks of the process."""
    two_processes.run(body)


IN_NEW_PROCESS = """
import importlib.machinery, logging, sys, warnings, torch
class Optimized(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True, optimize=2)
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] != "cp_dtensor":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Optimized(spec.loader.name, spec.loader.path)
        return spec
sys.meta_path.insert(0, Finder)
def state():
    names = "get_default_dtype get_default_device is_grad_enabled get_num_threads are_deterministic_algorithms_enabled "
    names += "get_float32_matmul_precision is_anomaly_enabled"
    flags = [getattr(torch.backends.cuda, name)() for name in ("flash_sdp_enabled", "math_sdp_enabled")]
    functions = torch.nn.functional.scaled_dot_product_attention, warnings.showwarning, tuple(logging.root.handlers)
    return [getattr(torch, name)() for name in names.split()], flags, functions, torch.get_rng_state().tolist()
before, filters = state(), list(warnings.filters)
import cp_dtensor
from cp_dtensor.integrations import long_context, ring_flash_attn, torch_experimental, unified
for wrong, what in (
    (state() != before or torch.cuda.is_initialized(), "importing changes torch"),
    (cp_dtensor.__doc__ or cp_dtensor.ring_attention.__doc__, "the package has docstrings"),
    ([each for each in filters if each not in warnings.filters], "importing changes filters of warnings"),
):
    if wrong:
        raise SystemExit(what)
warnings.simplefilter("default")
from support.settings_calls import check_call
for name in "ring dtensor dtensor_sdpa varlen_attn mla flex_context provider torch_experimental everything".split():
    check_call(name)
"""


def test_without_asserts_and_docstrings_and_with_warnings_as_errors() -> None:
    """As under `python -OO`, for the package only: all of torch would be compiled again."""
    here = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])}
    command = [sys.executable, "-bb", "-W", "error", "-c", IN_NEW_PROCESS]
    subprocess.run(command, check=True, timeout=100, env=environment)
