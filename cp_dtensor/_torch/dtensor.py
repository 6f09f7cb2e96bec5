"""DTensor's op handlers, and torch's own context parallelism, which replaces them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor._torch.compiler import when_loaded
from cp_dtensor._torch.patches import attribute_replaced, entry_replaced

OpHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_DISPATCHER: Any = DTensor._op_dispatcher


def dtensor_op_handled(op: Any, handler: OpHandler) -> AbstractContextManager[None]:
    """Make DTensor, while open, call a handler of an op in place of its own rule."""
    return entry_replaced(_DISPATCHER._custom_op_handlers, op, handler)


def bound_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an op's arguments by name, defaults included."""
    arguments = {argument.name: argument.default_value for argument in op._schema.arguments}
    arguments.update(zip(arguments, args, strict=False))
    return {**arguments, **kwargs}


# Torch's own context parallelism

_TORCHS = "torch.distributed.tensor.experimental"


def torchs_context_parallel_is_open() -> bool:
    """Return True while torch's own `context_parallel`, or its dispatcher, is open in this process."""
    handler = _DISPATCHER._custom_op_handlers.get(torch.ops.aten._scaled_dot_product_flash_attention.default)
    return str(getattr(handler, "__module__", "")).startswith(_TORCHS)


def torchs_modules_checked(check: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `check`, which may raise, while open, before torch's `_ContextParallel` makes DTensors of shards.

    Modules have its methods as hooks, bound before. All of these read the sequence dim, which is a property while open.
    """

    def read(self: Any) -> Any:
        check()
        return vars(self)["seq_dim"]

    def write(self: Any, value: Any) -> None:
        vars(self)["seq_dim"] = value

    def change(module: ModuleType) -> AbstractContextManager[None]:
        style = getattr(module, "_ContextParallel", None)
        if getattr(style, "__module__", None) != module.__name__:  # other code has replaced it
            return nullcontext()
        return attribute_replaced(style, "seq_dim", property(read, write))

    return when_loaded(f"{_TORCHS}._context_parallel._attention", change)
