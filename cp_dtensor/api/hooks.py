"""Hooks of other programs in contexts: their patches, checks and layers, loaded once the program is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
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
        """Replace functions of a module with `ContextParallel`; True if the patches must hold as long as it lives."""


class _Hooks:
    """The hooks that are registered: the name of the module that has to be loaded, and "module:name" of the hook."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registered: tuple[tuple[str, str], ...] = ()
        self.installation = SharedInstallation(self._patches)

    def register(self, module: str, hook: str) -> ExitStack:
        """Add a hook to contexts, from the next time on that one opens and no other is open.

        Args:
            module: name of a Python module; the hook is imported once it is, and not before.
            hook: "module:name" of a `ContextHook`.

        Returns:
            a lease: the hook is removed by its `close()`, or at the end of a `with` block of it.

        Raises:
            ValueError: a hook that is not written "module:name".
        """
        if len([*filter(None, hook.split(":"))]) != 2:
            raise ValueError(f'expected hook to be "module:name", got {hook!r}')
        registered, lease = (module, hook), ExitStack()
        with self._lock:
            self._registered = (*self._registered, registered)
        lease.callback(self._remove, registered)
        return lease

    def _remove(self, registered: tuple[str, str]) -> None:
        with self._lock:
            place = self._registered.index(registered)
            self._registered = self._registered[:place] + self._registered[place + 1 :]

    def _patches(self) -> Iterator[AbstractContextManager[object]]:
        for module, hook in self._registered:
            yield _torch.when_loaded(module, partial(_patches_of, hook))

    def _loaded(self) -> Iterator[ContextHook]:
        return (_hook_of(hook) for module, hook in self._registered if module in sys.modules)

    def check_compiled(self, arguments: dict[str, Any]) -> None:
        """Call `check_compiled` of the hooks whose programs are loaded."""
        for hook in self._loaded():
            hook.check_compiled(arguments)

    def module(self, module: nn.Module) -> bool:
        """Call `module` of the hooks whose programs are loaded; return whether any is to hold."""
        answers = [hook.module(module) for hook in self._loaded()]  # `any` alone would skip hooks after the first True
        return any(answers)


def _hook_of(name: str) -> ContextHook:
    module, _, attribute = name.partition(":")
    hook: ContextHook = getattr(import_module(module), attribute)
    return hook


def _patches_of(name: str, _: object) -> AbstractContextManager[object]:
    stack = ExitStack()
    with stack:  # if one fails, those before it are left
        for patch in _hook_of(name).patches():
            stack.enter_context(patch)
        return stack.pop_all()


context_hooks = _Hooks()
register_context_hook = context_hooks.register
