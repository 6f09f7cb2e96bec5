"""`redirect_imports`: imports of torch's experimental context parallel get the names of this package."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType

from cp_dtensor.api.extension import SharedInstallation
from cp_dtensor.integrations.torch_experimental.rings import watched

_EXPERIMENTAL = "torch.distributed.tensor.experimental"
_ALL_NAMES = ("_attention", "_context_parallel", "_context_parallel._attention")
_BALANCERS = "_context_parallel._load_balancer"
_PUBLIC = ""  # torch.distributed.tensor.experimental itself


def _parts() -> Iterator[AbstractContextManager[None]]:
    ours = importlib.import_module(__package__ or "")
    names = {name: getattr(ours, name) for name in ours.__all__ if name != "redirect_imports"}
    chosen = {
        _PUBLIC: {"context_parallel": names["context_parallel"]},
        **dict.fromkeys(_ALL_NAMES, names),
        _BALANCERS: {name: value for name, value in names.items() if name.endswith("LoadBalancer")},
    }
    for name, replaced in chosen.items():
        try:
            module = importlib.import_module(f"{_EXPERIMENTAL}.{name}".rstrip("."))
        except ModuleNotFoundError:  # in this version of torch
            continue
        yield _names_replaced(module, replaced)
        if name in _ALL_NAMES:
            yield _watching(module)


@contextmanager
def _names_replaced(module: ModuleType, names: Mapping[str, object]) -> Iterator[None]:
    """Sets names of a module while open. On exit restores them, except those that others have replaced since."""
    missing = object()
    before = {name: vars(module).get(name, missing) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        for name, ours in names.items():
            if vars(module).get(name, missing) is not ours:
                continue
            if before[name] is missing:
                delattr(module, name)
            else:
                setattr(module, name, before[name])


@contextmanager
def _watching(module: ModuleType) -> Iterator[None]:
    watched.redirected.append(module)
    try:
        yield
    finally:
        watched.redirected.remove(module)


_installation = SharedInstallation(_parts)


def redirect_imports() -> ExitStack:
    """Replaces the names in `torch.distributed.tensor.experimental` and its private modules by those of this package.

        redirect_imports()  # before other imports of these names
        import accelerate

    The modules stay torch's, and so do names in them that this package does not have. Code that imported a name before
    keeps torch's. It may be called several times; `close()` of the result, or the end of a `with` block over it, takes
    one call back. After the last one the modules are as before, except for names that others replaced meanwhile.
    """
    _installation.acquire()
    redirection = ExitStack()
    redirection.callback(_installation.release)  # unlike an entered context, not called when the result is collected
    return redirection
