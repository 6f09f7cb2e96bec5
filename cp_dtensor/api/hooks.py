"""Hooks of other programs in contexts: their patches, checks and layers, loaded once the program is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from torch import nn

from cp_dtensor import _torch
from cp_dtensor.api.interception import SharedInstallation


class ContextHook(Protocol):
    """Parts of another program's hook, which contexts and modules with `ContextParallel` call."""

    def patches(self) -> Iterable[AbstractContextManager[object]]:
        """Return patches, in the order in which they are entered; they hold while any context is open."""

    def check_compiled(self, arguments: dict[str, Any]) -> None:
        """Check the arguments of a function, by name, before it is compiled in a context; may raise."""

    def module(self, module: nn.Module) -> bool:
        """Replace functions of a module with `ContextParallel`, or refuse it by NotImplementedError.

        True if the patches must hold as long as it lives.
        """


_registered: list[tuple[str, str]] = []
"""Programs and names of hooks, in the order of registration; more than once after a reload of this package."""


def register_context_hook(program: str, hook: str) -> ExitStack:
    """Add a hook to contexts, from the next time on that one opens and no other is open.

    Args:
        program: name of a Python module; the hook is imported once it is, and not before.
        hook: "module:name" of a `ContextHook`.

    Returns:
        a lease: the hook is removed by its `close()`, or at the end of a `with` block of it.

    Raises:
        ValueError: a hook that is not written "module:name".
    """
    if hook.count(":") != 1 or not all(hook.split(":")):
        raise ValueError(f'expected hook to be "module:name", got {hook!r}')
    _registered.append((program, hook))
    lease = ExitStack()
    lease.callback(_registered.remove, (program, hook))
    return lease


def loaded_hooks() -> list[ContextHook]:
    """Return the hooks whose programs are loaded."""
    return [_imported(name) for program, name in dict.fromkeys(_registered) if program in sys.modules]


def hooks_held() -> ExitStack:
    """Hold the patches of all hooks until the result is closed; those of a program begin when it is loaded."""
    with ExitStack() as stack:
        for program, name in dict.fromkeys(_registered):
            stack.enter_context(_patches(program, name).held())
        return stack.pop_all()


def _imported(name: str) -> ContextHook:
    module, _, attribute = name.partition(":")
    hook: ContextHook = getattr(import_module(module), attribute)
    return hook


@cache  # contexts, modules and providers share the patches of a hook
def _patches(program: str, name: str) -> SharedInstallation:
    @contextmanager
    def patched(_program: object) -> Iterator[None]:
        with ExitStack() as stack:
            for patch in _imported(name).patches():
                stack.enter_context(patch)
            yield

    return SharedInstallation(lambda: [_torch.when_loaded(program, patched)])
