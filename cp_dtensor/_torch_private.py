"""The one door to torch's private symbols. Everything that depends on torch's version is decided here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.nn.attention import SDPBackend

# --------------------------------------------------------------------------------------------------------------------
# Collectives that were renamed in torch 2.13

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether collectives of CPU tensors run on this group."""
    return any(device.type == "cpu" for device in group._device_types)


# --------------------------------------------------------------------------------------------------------------------
# SDPA backend selection

_BACKEND_NAMES = {value.value: name for name, value in SDPBackend.__members__.items()}
_DEFAULT_PRIORITY = list(torch._C._get_sdp_priority_order())


def sdpa_backend_enabled(name: str) -> bool:
    """Whether `sdpa_kernel` or the `torch.backends.cuda` flags allow a backend."""
    flags = torch.backends.cuda
    enabled = {
        "MATH": flags.math_sdp_enabled,
        "FLASH_ATTENTION": flags.flash_sdp_enabled,
        "EFFICIENT_ATTENTION": flags.mem_efficient_sdp_enabled,
        "CUDNN_ATTENTION": flags.cudnn_sdp_enabled,
    }
    return enabled[name]()


def user_sdpa_priority() -> list[str] | None:
    """Backend names in the order that the user asked for, None if the order is torch's own."""
    order = list(torch._C._get_sdp_priority_order())
    return None if order == _DEFAULT_PRIORITY else [_BACKEND_NAMES[value] for value in order]


# --------------------------------------------------------------------------------------------------------------------
# Thread-local state that autograd carries over to the threads that run a backward


def get_thread_local(key: str) -> Any:
    """The object stored under `key` in this thread, or, inside of a backward, in the thread that called it."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def set_thread_local(key: str, value: Any) -> None:
    """Stores an object for `get_thread_local`."""
    torch._C._stash_obj_in_tls(key, value)


# --------------------------------------------------------------------------------------------------------------------
# Overriding scaled_dot_product_attention in torch's dispatcher

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
# Autograd keys serve ordinary calls; the backend keys serve calls in inference mode, which skip autograd.
_SDPA_KEYS = ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA")


def override_sdpa(kernel: Callable[..., torch.Tensor]) -> Callable[[], None]:
    """Has torch's dispatcher call `kernel` for every scaled_dot_product_attention, however it was imported.

    Returns:
        a function that takes the override back.
    """
    library = torch.library.Library("aten", "IMPL")
    for key in _SDPA_KEYS:
        library.impl("scaled_dot_product_attention", kernel, key)
    return library._destroy


def original_sdpa(*args: Any, **kwargs: Any) -> torch.Tensor:
    """What torch does without an override, for every kind of tensor."""
    return _SDPA.decompose(*args, **kwargs)


# --------------------------------------------------------------------------------------------------------------------
# Patches of torch's Python code, reversible


@contextmanager
def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute by `make(original)`; on exit puts the original back unless others replaced ours since."""
    original = vars(owner)[name]
    ours = make(original)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if vars(owner)[name] is ours:
            setattr(owner, name, original)


@contextmanager
def checkpointed_functions_bound(bind: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While open, functions given to `torch.utils.checkpoint`, in either mode, are replaced by `bind(function)`.

    The recompute in backward then runs the bound function, whenever and in whatever thread that is.
    """
    module = torch.utils.checkpoint

    def reentrant(original: staticmethod[..., Any]) -> staticmethod[..., Any]:
        def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            return original.__func__(ctx, bind(run_function), *args)

        return staticmethod(forward)

    def non_reentrant(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(bind(fn), *args, **kwargs)

        return generator

    with (
        _patched(module.CheckpointFunction, "forward", reentrant),
        _patched(module, "_checkpoint_without_reentrant_generator", non_reentrant),
    ):
        yield


@contextmanager
def multihead_attention_ends_in_sdpa(check_need_weights: Callable[[bool], None]) -> Iterator[None]:
    """While open, `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take the path that calls SDPA.

    Their fused inference path computes attention in one opaque op. With `need_weights` they do not call SDPA at all:
    `check_need_weights` gets the flag and may raise.
    """

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            check_need_weights(call.arguments["need_weights"])
            return original(*args, **kwargs)

        return multi_head_attention_forward

    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _patched(torch.nn.functional, "multi_head_attention_forward", checked):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


# --------------------------------------------------------------------------------------------------------------------
# DTensor's tables of op handlers and sharding strategies

OpHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def dtensor_dispatcher() -> Any:
    """The object that holds DTensor's tables."""
    return DTensor._op_dispatcher


@contextmanager
def dtensor_tables(
    handlers: dict[Any, OpHandler], strategies: dict[Any, Callable[[Any], Callable[[Any], Any]]]
) -> Iterator[None]:
    """While open, DTensor has these op handlers and sharding strategies; entries of other ops are not touched.

    `strategies` maps an op to a function from the strategy that torch had (None if it had none) to the new one.
    """
    dispatcher = dtensor_dispatcher()
    propagator = dispatcher.sharding_propagator
    with ExitStack() as stack:
        for op, handler in handlers.items():
            stack.enter_context(_entry(dispatcher._custom_op_handlers, op, handler))
        for op, make in strategies.items():
            original = propagator.op_strategy_funcs.get(op)
            # A strategy of the single-dim kind would win over ours.
            stack.enter_context(_entry(propagator.op_single_dim_strategy_funcs, op, None))
            stack.enter_context(_entry(propagator.op_strategy_funcs, op, make(original)))
        yield


@contextmanager
def _entry(table: dict[Any, Any], key: Any, value: Any) -> Iterator[None]:
    """Sets (None: removes) an entry; on exit puts things back unless others changed the entry since."""
    missing = object()
    before = table.get(key, missing)
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
    try:
        yield
    finally:
        if table.get(key) is value:
            if before is missing:
                table.pop(key, None)
            else:
                table[key] = before


def mesh_of(op_schema: Any) -> DeviceMesh:
    """The mesh of an op's DTensors, from the schema that a strategy gets."""
    return op_schema.args_strategy[0].strategies[0].output_spec.mesh


def tensor_inputs(op_schema: Any) -> list[tuple[tuple[Placement, ...], torch.Size]]:
    """(placements, global shape) of each tensor input, from the schema that a strategy gets."""
    specs = [arg.strategies[0].output_spec for arg in (*op_schema.args_strategy, *op_schema.kwargs_strategy)]
    return [(spec.placements, spec.tensor_meta.shape) for spec in specs]


def expand_strategies(
    op_schema: Any,
    one_axis: list[list[Placement | None]],
    outputs: int,
    keep: Callable[[list[tuple[Placement, ...]]], bool],
) -> Any:
    """Combines strategies of one mesh axis over all axes; `keep` is asked with the placements of all inputs."""
    strategy = expand_to_full_mesh_op_strategy(mesh_of(op_schema), op_schema, one_axis, input_index=outputs)
    strategy.strategies = [
        spec for spec in strategy.strategies if keep([each.placements for each in spec.input_specs or ()])
    ]
    return strategy


def propagated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Asks the sharding strategies, past the caches, and redistributes the inputs as they want.

    Returns:
        the op info, whose local arguments are as wanted and whose `output_sharding` is set, and the input specs.
    """
    dispatcher = dtensor_dispatcher()
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    sharding = dispatcher.sharding_propagator.propagate_op_sharding_non_cached(info.schema)
    info.output_sharding = sharding
    wanted = info.schema
    if sharding.needs_redistribute:
        wanted = sharding.redistribute_schema
        dispatcher.redistribute_local_args(info, wanted, sharding.use_val_from_redistribute_schema)
    return info, wanted.args_schema


def run_locally(op: Any, info: Any) -> Any:
    """Runs an op on the local tensors of `propagated` and wraps the results, as torch does by default."""
    return dtensor_dispatcher().wrap(op(*info.local_args, **info.local_kwargs), info.output_sharding.output_spec)


# --------------------------------------------------------------------------------------------------------------------
# Tensor identity


def swap_identities(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchanges what two tensor objects are: data, shape, autograd state. References from C++ stay with the content.

    `torch.utils.swap_tensors` does the same but refuses tensors that autograd refers to, which is the very case here.
    """
    torch._C._swap_tensor_impl(first, second)
