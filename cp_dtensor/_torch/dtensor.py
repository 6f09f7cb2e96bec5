"""DTensor's op handlers and sharding strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _expand_single_dim_strategy_to_mesh
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from cp_dtensor._torch.patches import entry_replaced

OpHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_DISPATCHER: Any = DTensor._op_dispatcher
"""DTensor's dispatcher, which holds the tables of handlers and strategies."""


@contextmanager
def dtensor_tables(
    handlers: dict[Any, OpHandler], strategies: dict[Any, Callable[[Any], Callable[[Any], Any]]]
) -> Iterator[None]:
    """While open, DTensor has these op handlers and sharding strategies.

    Args:
        handlers: by op.
        strategies: by op, a function from torch's own strategy (None if torch has none) to the new one.
    """
    propagator = _DISPATCHER.sharding_propagator
    with ExitStack() as stack:
        for op, handler in handlers.items():
            stack.enter_context(entry_replaced(_DISPATCHER._custom_op_handlers, op, handler))
        for op, make in strategies.items():
            original = _original_strategy(op)
            # A single-dim strategy would take precedence over ours.
            stack.enter_context(entry_replaced(propagator.op_single_dim_strategy_funcs, op, None))
            stack.enter_context(entry_replaced(propagator.op_strategy_funcs, op, make(original)))
        yield


def _original_strategy(op: Any) -> Callable[[Any], Any] | None:
    """Returns DTensor's present strategy for an op, None if it has none.

    A single-dim strategy takes precedence in DTensor and is expanded here; from torch 2.14 on SDPA's ops have one.
    """
    propagator = _DISPATCHER.sharding_propagator
    single_dim = propagator.op_single_dim_strategy_funcs.get(op)
    if single_dim is None:
        strategy: Callable[[Any], Any] | None = propagator.op_strategy_funcs.get(op)
        return strategy

    def spec_of(argument: Any) -> Any:
        return argument.strategies[0].output_spec if isinstance(argument, OpStrategy) else argument

    def expanded(op_schema: Any) -> Any:
        of_specs = OpSchema(
            op_schema.op,
            tuple(map(spec_of, op_schema.args_schema)),
            {name: spec_of(argument) for name, argument in op_schema.kwargs_schema.items()},
            op_schema.schema_info,
        )
        outputs = propagator._propagate_tensor_meta_non_cached(of_specs)
        ask = _expand_single_dim_strategy_to_mesh(mesh_of(op_schema), op_schema, single_dim, outputs)
        return ask(op_schema.op, op_schema.args_meta, op_schema.kwargs_meta)

    return expanded


def mesh_of(op_schema: Any) -> DeviceMesh:
    """Returns the mesh of an op's DTensors, from the schema that a strategy gets."""
    return op_schema.args_strategy[0].strategies[0].output_spec.mesh


def tensor_inputs(op_schema: Any) -> list[tuple[tuple[Placement, ...], torch.Size]]:
    """Returns (placements, global shape) of each tensor input, from the schema that a strategy gets."""
    specs = [arg.strategies[0].output_spec for arg in (*op_schema.args_strategy, *op_schema.kwargs_strategy)]
    return [(spec.placements, spec.tensor_meta.shape) for spec in specs]


def expand_strategies(
    op_schema: Any,
    one_axis: list[list[Placement | None]],
    outputs: int,
    keep: Callable[[list[tuple[Placement, ...]]], bool],
) -> Any:
    """Combines strategies of one mesh axis over all axes, if `keep` returns True for the placements of all inputs."""
    strategy = expand_to_full_mesh_op_strategy(mesh_of(op_schema), op_schema, one_axis, input_index=outputs)
    strategy.strategies = [
        spec for spec in strategy.strategies if keep([each.placements for each in spec.input_specs or ()])
    ]
    return strategy


def propagated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Runs the sharding strategies of an op, without caches, and redistributes its inputs accordingly.

    Returns:
        The op info, with redistributed local arguments and its `output_sharding`, and the specs of the inputs.
    """
    info = _DISPATCHER.unwrap_to_op_info(op, args, kwargs)
    sharding = _DISPATCHER.sharding_propagator.propagate_op_sharding_non_cached(info.schema)
    info.output_sharding = sharding
    schema = info.schema
    if sharding.needs_redistribute:
        schema = sharding.redistribute_schema
        _DISPATCHER.redistribute_local_args(info, schema, sharding.use_val_from_redistribute_schema)
    return info, schema.args_schema


def run_locally(op: Any, info: Any) -> Any:
    """Runs an op on the local tensors of `propagated` and wraps the results, as torch does by default."""
    return _DISPATCHER.wrap(op(*info.local_args, **info.local_kwargs), info.output_sharding.output_spec)


def bound_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns an op's arguments by name, defaults included."""
    arguments = {argument.name: argument.default_value for argument in op._schema.arguments}
    arguments.update(zip(arguments, args, strict=False))
    return {**arguments, **kwargs}
