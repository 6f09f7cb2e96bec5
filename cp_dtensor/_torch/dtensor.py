"""DTensor's op handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.distributed.tensor import DTensor

from cp_dtensor._torch.patches import entry_replaced

OpHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_DISPATCHER: Any = DTensor._op_dispatcher


@contextmanager
def dtensor_ops_handled(handlers: dict[Any, OpHandler]) -> Iterator[None]:
    """While open, DTensor calls these handlers of ops in place of its own rules."""
    with ExitStack() as stack:
        for op, handler in handlers.items():
            stack.enter_context(entry_replaced(_DISPATCHER._custom_op_handlers, op, handler))
        yield


def dispatched_by_default(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op as torch does without a handler, by its sharding strategies, without caches."""
    info = _DISPATCHER.unwrap_to_op_info(op, args, kwargs)
    sharding = _DISPATCHER.sharding_propagator.propagate_op_sharding_non_cached(info.schema)
    if sharding.needs_redistribute:
        redistributed = sharding.redistribute_schema, sharding.use_val_from_redistribute_schema
        _DISPATCHER.redistribute_local_args(info, *redistributed)
    return _DISPATCHER.wrap(op(*info.local_args, **info.local_kwargs), sharding.output_spec)


def bound_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An op's arguments by name, defaults included."""
    arguments = {argument.name: argument.default_value for argument in op._schema.arguments}
    arguments.update(zip(arguments, args, strict=False))
    return {**arguments, **kwargs}
