"""Hooks of other programs in contexts: their patches, checks and layers, loaded once the program is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
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
        """Replace functions of a module with `ContextParallel`; True if the patches must hold as long as it lives."""


class _Registered:
    """A hook by its name, "module:name", and its patches, which contexts, modules and providers share."""

    def __init__(self, program: str, name: str) -> None:
        self._program, self._name = program, name
        self.patches = SharedInstallation(lambda: [_torch.when_loaded(program, self._patches)])

    def loaded(self) -> list[ContextHook]:
        """Return the hook if its program is loaded, else nothing."""
        module, _, attribute = self._name.partition(":")
        return [getattr(import_module(module), attribute)] if self._program in sys.modules else []

    def _patches(self, _program: object) -> AbstractContextManager[object]:
        with ExitStack() as stack:  # if one fails, those before it are left
            for hook in self.loaded():
                for patch in hook.patches():
                    stack.enter_context(patch)
            return stack.pop_all()


class _Hooks:
    """The hooks that are registered now."""

    def __init__(self) -> None:
        self._lock, self._of_name = threading.Lock(), cache(_Registered)  # one of a name: a reload adds it again
        self._registered: tuple[_Registered, ...] = ()

    def register(self, program: str, hook: str) -> ExitStack:
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
        registered, lease = self._of_name(program, hook), ExitStack()
        with self._lock:
            self._registered += (registered,)
        lease.callback(self._remove, registered)
        return lease

    def _remove(self, registered: _Registered) -> None:
        with self._lock:
            place = self._registered.index(registered)
            self._registered = self._registered[:place] + self._registered[place + 1 :]

    def acquire(self) -> ExitStack:
        """Hold the patches of all hooks until the result is closed."""
        with ExitStack() as stack:
            for each in dict.fromkeys(self._registered):
                each.patches.acquire()
                stack.callback(each.patches.release)
            return stack.pop_all()

    def loaded(self) -> list[ContextHook]:
        """Return the hooks whose programs are loaded."""
        return [hook for each in dict.fromkeys(self._registered) for hook in each.loaded()]

    def check_compiled(self, arguments: dict[str, Any]) -> None:
        """Call `check_compiled` of the hooks whose programs are loaded."""
        for hook in self.loaded():
            hook.check_compiled(arguments)

    def module(self, module: nn.Module) -> bool:
        """Call `module` of the hooks whose programs are loaded; return whether any is to hold."""
        answers = [hook.module(module) for hook in self.loaded()]  # `any` of a generator would skip hooks after a True
        return any(answers)


context_hooks = _Hooks()
register_context_hook = context_hooks.register
